"""Grammars over a real tokenizer file: masks, the end, rebuilding, and rows in a batch."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from tiny_model import make_tiny_model
from tokenizers import Tokenizer

from pagefleet.protos.messages import SamplingParams
from pagefleet.scheduler.output import NewRow, SchedulerOutput
from pagefleet.workers.grammar import GrammarError, GrammarState, GrammarTokenizer
from pagefleet.workers.input_batch import InputBatch
from pagefleet.workers.sampler import Sampler

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 22, 333]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
GRAMMAR = LLMatcher.grammar_from_json_schema(SCHEMA)
EOS = 0
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def vocabulary(folder: Path) -> GrammarTokenizer:
    return GrammarTokenizer(folder / "tokenizer.json", 264, (EOS,))


@pytest.fixture(scope="module")
def text(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def ids(text: Tokenizer, string: str) -> np.ndarray:
    return np.array(text.encode(string).ids, dtype=np.int32)


def next_texts(text: Tokenizer, allowed: np.ndarray) -> set[str]:
    return {text.decode([i], skip_special_tokens=False) for i in np.flatnonzero(allowed).tolist()}


def test_masks_follow_the_output(vocabulary, text):
    state = GrammarState(GRAMMAR)
    assert next_texts(text, state.allowed(vocabulary, ids(text, ""))) == {"{"}
    assert next_texts(text, state.allowed(vocabulary, ids(text, '{"ok": '))) >= {"t", "f"}
    assert "1" not in next_texts(text, state.allowed(vocabulary, ids(text, '{"ok": t')))


def test_only_the_end_follows_the_end(vocabulary, text):
    whole = ids(text, '{"ok": true, "n": 22}')
    state = GrammarState(GRAMMAR)
    assert np.flatnonzero(state.allowed(vocabulary, whole)).tolist() == [EOS]
    ended = np.append(whole, np.int32(EOS))
    assert np.flatnonzero(state.allowed(vocabulary, ended)).tolist() == [EOS]  # ignore_eos


def test_state_is_a_function_of_the_output(vocabulary, text):
    """Preempted, resumed elsewhere, rolled back or replaced: the same tokens, the same mask."""
    whole = ids(text, '{"ok": false, "n": 333}')
    stepwise, jumping = GrammarState(GRAMMAR), GrammarState(GRAMMAR)
    masks = [stepwise.allowed(vocabulary, whole[:count]) for count in range(len(whole) + 1)]
    for count in np.random.default_rng(0).permutation(len(whole) + 1):
        np.testing.assert_array_equal(jumping.allowed(vocabulary, whole[:count]), masks[count])
        fresh = GrammarState(GRAMMAR).allowed(vocabulary, whole[:count])
        np.testing.assert_array_equal(fresh, masks[count])


def test_what_does_not_match_is_an_error(vocabulary, text):
    with pytest.raises(GrammarError):
        GrammarState(GRAMMAR).allowed(vocabulary, ids(text, "nonsense"))
    with pytest.raises(GrammarError):
        GrammarState("start: (").allowed(vocabulary, ids(text, ""))


def test_a_missing_tokenizer_is_an_error(tmp_path):
    with pytest.raises(GrammarError, match="no grammars"):
        GrammarState(GRAMMAR).allowed(
            GrammarTokenizer(tmp_path / "tokenizer.json", 264, (EOS,)), np.empty(0, dtype=np.int32)
        )


def run(vocabulary, rows: list[tuple[SamplingParams, list[int]]], seed: int = 0) -> list[list[int]]:
    """Sample each row from random logits, up to its EOS; rows are (params, output so far)."""
    batch = InputBatch(len(rows), 256, 4, torch.device("cpu"), eos_token_ids=(EOS,))
    table = np.zeros(4, dtype=np.int32)
    new = tuple(
        NewRow(r, r, np.array([*PROMPT, *out], dtype=np.int32), len(PROMPT), table, params, 0)
        for r, (params, out) in enumerate(rows)
    )
    batch.apply(SchedulerOutput(step=1, new_rows=new))
    sampler = Sampler(batch, vocabulary)
    outputs = [list(out) for _, out in rows]
    live = [r for r, out in enumerate(outputs) if EOS not in out]
    while live:
        logits = torch.stack([logits_at(len(outputs[r]), seed) for r in live])
        samples = sampler.sample(logits, np.array(live, dtype=np.int32))
        assert not samples.failed
        batch.append_tokens(np.array(live, dtype=np.int32), samples.token_ids)
        for row, token in zip(list(live), samples.token_ids.tolist(), strict=True):
            outputs[row].append(token)
            if token == EOS or len(outputs[row]) > 120:
                live.remove(row)
    return outputs


def logits_at(position: int, seed: int) -> torch.Tensor:
    return torch.randn(264, generator=torch.Generator().manual_seed(seed * 1000 + position))


@pytest.mark.parametrize("seed", range(5))
def test_every_sampled_output_matches_and_resumes_alike(vocabulary, text, seed):
    params = SamplingParams(seed=seed, temperature=1.0, grammar=GRAMMAR)
    greedy = SamplingParams(temperature=0.0, grammar=GRAMMAR, min_tokens=100)
    free = SamplingParams(seed=seed)
    outputs = run(vocabulary, [(params, []), (free, []), (greedy, [])], seed)
    for output in (outputs[0], outputs[2]):
        value = json.loads(text.decode(output))
        assert set(value) == {"ok", "n"}
        assert value["n"] in (1, 22, 333)
    for border in (1, len(outputs[0]) // 2, len(outputs[0]) - 1):
        resumed = run(vocabulary, [(params, outputs[0][:border])], seed)
        assert resumed == [outputs[0]]


def test_a_row_that_left_its_grammar_fails_alone(vocabulary, text):
    batch = InputBatch(2, 64, 4, torch.device("cpu"), eos_token_ids=(EOS,))
    params = SamplingParams(temperature=0.0, grammar=GRAMMAR)
    table = np.zeros(4, dtype=np.int32)
    rows = tuple(
        NewRow(r, r, np.append(PROMPT, ids(text, out)).astype(np.int32), 3, table, params, 0)
        for r, out in enumerate(("{", "no"))
    )
    batch.apply(SchedulerOutput(step=1, new_rows=rows))
    logits = torch.stack([logits_at(0, 0), logits_at(0, 1)])
    samples = Sampler(batch, vocabulary).sample(logits, np.arange(2, dtype=np.int32))
    assert samples.failed == (1,)
    assert text.decode([int(samples.token_ids[0])]) in ('"', " ", "\n", "\t", "\r")
