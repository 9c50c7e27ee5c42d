"""Thoughts and answers, whole and cut into any pieces."""

import random

import pytest

from pagefleet.cluster.reasoning import ReasoningReader

CASES = [
    (False, "<think>\na < b\n</think>\n\nYes.", ("a < b", "Yes.")),
    (True, "hm\nhm\n\n</think>\nYes.\n", ("hm\nhm", "Yes.\n")),
    (False, "No thoughts <think>x</think>", ("", "No thoughts <think>x</think>")),
    (False, "  <think></think>ok", ("", "ok")),
    (True, "cut off </thi", ("cut off </thi", "")),
    (False, "<thi", ("", "<thi")),
    (False, "", ("", "")),
    (True, "a</think>", ("a", "")),
    (True, "\n\nline\n\n\nline</think>x</think>", ("line\n\n\nline", "x</think>")),
]


@pytest.mark.parametrize(("is_open", "text", "expected"), CASES)
def test_tells_them_apart_however_they_come(is_open, text, expected):
    for seed in range(30):
        rng = random.Random(seed)
        reader = ReasoningReader(is_open=is_open)
        found, left = [], text
        while left:
            count = rng.randrange(1, 8)
            found.append(reader.push(left[:count]))
            left = left[count:]
        found.append(reader.flush())
        reasoning, answer = zip(*found, strict=True)
        assert ("".join(reasoning), "".join(answer)) == expected
