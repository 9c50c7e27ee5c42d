"""Rows sample by their own parameters, whatever stands beside them."""

import numpy as np
import pytest
import torch

from pagefleet.protos.messages import SamplingParams
from pagefleet.scheduler.output import NewRow, SchedulerOutput
from pagefleet.workers.input_batch import InputBatch
from pagefleet.workers.sampler import Sampler, Samples, token_logprobs

VOCAB = 50
PROMPT = [4, 5, 6, 4]


def sample(logits: torch.Tensor, *params: SamplingParams) -> Samples:
    """One step in which row i has logits[i] and params[i]; every prompt is PROMPT + output 7."""
    batch = InputBatch(len(params), 16, 4, torch.device("cpu"), eos_token_ids=(2,))
    tokens = np.array([*PROMPT, 7], dtype=np.int32)
    table = np.zeros(2, dtype=np.int32)
    rows = tuple(
        NewRow(row, row, tokens, len(PROMPT), table, param, 0) for row, param in enumerate(params)
    )
    batch.apply(SchedulerOutput(step=1, new_rows=rows))
    return Sampler(batch).sample(logits.clone(), np.arange(len(params), dtype=np.int32))


def random_logits(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


VARIED = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, top_k=5, temperature=0.7, logprobs=3),
    SamplingParams(seed=3, top_p=0.5, min_p=0.1),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, logit_bias=((9, 4.0),)),
    SamplingParams(seed=4, presence_penalty=1.0, frequency_penalty=0.5, min_tokens=5),
    SamplingParams(temperature=0.0, top_p=0.01, logprobs=0),
]


def test_each_row_is_the_same_alone_and_in_a_batch() -> None:
    logits = random_logits(len(VARIED))
    together = sample(logits, *VARIED)
    for row, params in enumerate(VARIED):
        alone = sample(logits[row : row + 1], params)
        assert alone.token_ids[0] == together.token_ids[row]
        assert alone.logprobs.get(0) == together.logprobs.get(row)
    assert set(together.logprobs) == {2, 6}


def test_temperature_zero_is_greedy_whatever_the_filters_say() -> None:
    logits = random_logits(3)
    best = logits.argmax(-1).tolist()
    odd = SamplingParams(temperature=0.0, top_p=0.0001, top_k=1, min_p=1.0, seed=9)
    assert sample(logits, odd, odd, odd).token_ids.tolist() == best


def test_logprobs_are_those_of_the_untouched_logits() -> None:
    logits = random_logits(1)
    params = SamplingParams(
        temperature=0.0, logprobs=2, logit_bias=((3, 100.0),), repetition_penalty=2.0
    )
    found = sample(logits, params)
    expected = logits[0].log_softmax(-1)
    assert found.token_ids.tolist() == [3]
    entry = found.logprobs[0]
    best = expected.topk(2).indices.tolist()
    assert entry.token_ids == (3, *[token for token in best if token != 3])
    for token, logprob in zip(entry.token_ids, entry.logprobs, strict=True):
        assert logprob == pytest.approx(float(expected[token]), abs=1e-5)
    assert entry.rank == int((expected > expected[3]).sum()) + 1


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_only_the_broken_row_fails(broken: float) -> None:
    logits = random_logits(len(VARIED))
    good = sample(logits, *VARIED)
    logits[2, 17] = broken
    bad = sample(logits, *VARIED)
    assert bad.failed == (2,)
    assert bad.token_ids[2] == 0
    assert 2 not in bad.logprobs
    others = [row for row in range(len(VARIED)) if row != 2]
    assert bad.token_ids[others].tolist() == good.token_ids[others].tolist()


def test_minus_infinity_is_sent_as_a_finite_number() -> None:
    logits = torch.full((1, VOCAB), float("-inf"))
    logits[0, 8] = 1.0
    found = sample(logits, SamplingParams(seed=1, top_k=1, logprobs=5))
    entry = found.logprobs[0]
    assert entry.token_ids[0] == 8
    assert len(entry.token_ids) == 5
    assert np.isfinite(entry.logprobs).all()
    assert entry.logprobs[1:] == (-9999.0,) * 4


def test_a_token_is_not_repeated_among_the_best() -> None:
    logits = random_logits(2)
    best = logits.argsort(-1, descending=True)
    entries = token_logprobs(logits, torch.stack([best[0, 0], best[1, 9]]), [3, 3])
    assert entries[0].token_ids == tuple(best[0, :3].tolist())
    assert entries[0].rank == 1
    assert entries[1].token_ids == (int(best[1, 9]), *best[1, :3].tolist())
    assert entries[1].rank == 10
