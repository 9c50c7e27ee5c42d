"""What followed the end of a text where it stood before."""

import random

import numpy as np
import pytest

from pagefleet.scheduler import ngram_proposer
from pagefleet.scheduler.ngram_proposer import NgramProposer


def propose(tokens: list[int], count: int, least: int = 2, most: int = 4) -> list[int]:
    return NgramProposer(least, most).propose(np.array(tokens, dtype=np.int32), len(tokens), count)


def test_what_followed_is_proposed() -> None:
    assert propose([1, 2, 3, 4, 5, 9, 1, 2], 3) == [3, 4, 5]


def test_a_longer_match_is_preferred_to_a_later_one() -> None:
    assert propose([7, 1, 2, 3, 0, 0, 8, 1, 2, 4, 0, 7, 1, 2], 1) == [3]


def test_the_later_of_equal_matches_is_preferred() -> None:
    assert propose([9, 1, 2, 3, 9, 1, 2, 4, 9, 1, 2], 1) == [4]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4, 5, 6]])
def test_nothing_is_proposed_without_a_match(tokens: list[int]) -> None:
    assert propose(tokens, 3) == []


def test_a_short_period_goes_on_for_as_long_as_asked() -> None:
    assert propose([1, 2, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert propose([4, 4, 4], 4) == [4, 4, 4, 4]


def test_tokens_of_any_size_are_told_apart() -> None:
    big = 2**31 - 1
    assert propose([big, 0, 5, 0, big, 6, big, 0], 1) == [5]


def expected(tokens: list[int], least: int, most: int, count: int) -> list[int]:
    """The plain way: every length, every place. All places are candidates here."""
    for length in range(min(most, len(tokens)), least - 1, -1):
        for place in range(len(tokens) - 1, length - 1, -1):
            if tokens[place - length : place] == tokens[-length:]:
                draft = list(tokens)
                for offset in range(count):
                    draft.append(draft[place + offset])
                return draft[len(tokens) :]
    return []


@pytest.mark.parametrize("seed", range(20))
def test_tokens_that_come_one_by_one_are_found_as_if_all_were_there(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ngram_proposer, "_MAX_CANDIDATES", 400)
    chance = random.Random(seed)
    vocab_size = chance.choice((4, 30))
    least = chance.choice((1, 2, 3))
    text = [chance.randrange(vocab_size) for _ in range(400)]
    proposer, known = NgramProposer(least, least + 1), 0
    while known < 390:
        known += chance.choice((1, 1, 1, 2, 6))
        tokens = np.full(400, -7, dtype=np.int32)  # what is not known yet is never read
        tokens[:known] = text[:known]
        if chance.random() < 0.7:
            fresh = NgramProposer(least, least + 1)
            assert proposer.propose(tokens, known, 3) == fresh.propose(tokens, known, 3)


@pytest.mark.parametrize("seed", range(20))
def test_the_search_finds_what_a_full_scan_finds(seed: int) -> None:
    chance = random.Random(seed)
    tokens = [chance.randrange(40) for _ in range(150)]
    found = propose(tokens + tokens[20:24], 4)
    assert found == expected(tokens + tokens[20:24], 2, 4, 4) != []
