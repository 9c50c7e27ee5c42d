"""Steps that are launched before the one before them is finished: what was sampled there is taken
from the device, and every answer is what it is one step after the other."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from factories import make_llama
from model_driver import GREEDY, HandWritten, load_runner, serve
from request_kinds import VOCAB, requests_of_every_kind, without_usage

from pagefleet.protos.messages import SamplingParams
from pagefleet.scheduler.config import PreemptionMode
from pagefleet.scheduler.output import SchedulerOutput
from pagefleet.workers.model_runner import ModelRunner
from pagefleet.workers.promised_tokens import Promise, PromisedTokens

PENALISED = replace(GREEDY, repetition_penalty=1.4, frequency_penalty=0.5)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = make_llama(tmp_path_factory.mktemp("model"), num_heads=8, tied=True)
    return load_runner(folder, num_blocks=128, block_size=4, host_memory=2**19, deterministic=True)


def test_answers_are_the_same(runner: ModelRunner) -> None:
    requests = requests_of_every_kind()
    plain = serve(runner, requests)
    assert without_usage(serve(runner, requests, overlap=True)) == without_usage(plain)


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_answers_are_the_same_with_preemptions(runner: ModelRunner, mode: PreemptionMode) -> None:
    requests = requests_of_every_kind()
    plain = serve(runner, requests)
    overlapped = serve(
        runner,
        requests,
        num_blocks=60,
        num_host_blocks=runner.num_host_blocks,
        preemption_mode=mode,
        preempt_every=5,
        overlap=True,
    )
    assert without_usage(overlapped) == without_usage(plain)
    assert sum(answer.usage.preemptions for answer in overlapped.values() if answer.usage) > 5


def two_steps(runner: ModelRunner, sampling: SamplingParams) -> tuple[SchedulerOutput, ...]:
    hand = HandWritten(runner)
    first = hand.output({0: (0, 5)}, [hand.row(0, [3, 1, 4, 1, 5], sampling, num_blocks=3)])
    return first, hand.output({0: (5, 1)}), hand.output({0: (6, 1)})


@pytest.mark.parametrize("sampling", [GREEDY, PENALISED], ids=["greedy", "penalised"])
def test_a_token_is_fed_before_the_host_knows_it(
    runner: ModelRunner, sampling: SamplingParams
) -> None:
    one_by_one = [runner.execute(step).token_ids.tolist() for step in two_steps(runner, sampling)]
    steps = two_steps(runner, sampling)
    first = runner.launch(steps[0])
    runner.batch.tokens[0, 5] = VOCAB - 1  # not what it is
    second = runner.launch(steps[1])
    found = [runner.finish(first), runner.finish(second), runner.execute(steps[2])]
    assert [result.token_ids.tolist() for result in found] == one_by_one
    assert runner.batch.tokens[0, 5:8].tolist() == [row[0] for row in one_by_one]


def test_a_row_that_changed_hands_keeps_nothing_of_what_was_in_flight(runner: ModelRunner) -> None:
    hand = HandWritten(runner)
    first = runner.launch(hand.output({0: (0, 3)}, [hand.row(0, [1, 2, 3])]))
    other = hand.row(0, [9, 8, 7, 6, 5], num_prompt_tokens=5)
    taken = replace(
        hand.output({0: (0, 2)}, [other], sample_rows=()), removed_rows=np.zeros(1, dtype=np.int32)
    )
    second = runner.launch(taken)
    runner.finish(first)
    runner.finish(second)
    assert runner.batch.tokens[0, :5].tolist() == [9, 8, 7, 6, 5]
    assert runner.batch.num_tokens[0] == 5


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_only_the_last_token_of_a_promised_row_is_fed() -> None:
    promised = PromisedTokens(4)
    rows = np.array([2, 0], dtype=np.int32)
    promise = Promise(rows, ids(1, 1), ids(7, 3), None)
    promised.add(promise, torch.tensor([50, 60]))
    num_tokens = ids(4, 9, 8, 0)
    step_rows = np.array([0, 1, 2, 2], dtype=np.int32)
    feed = promised.feed(step_rows, ids(3, 8, 6, 7), num_tokens)
    assert feed is not None
    token_ids = torch.tensor([-1, 11, 12, -1])
    feed.write(token_ids)
    assert token_ids.tolist() == [60, 11, 12, 50]
    assert promised.is_unknown(rows) and not promised.is_unknown(step_rows[1:2])
    promised.forget(2)
    assert not promised.is_unknown(rows[:1])
    promised.keep(promise)
    assert promised.feed(step_rows, ids(3, 8, 6, 7), num_tokens) is None


def test_what_a_later_step_promised_outlives_an_earlier_ones_arrival() -> None:
    promised = PromisedTokens(2)
    row = np.zeros(1, dtype=np.int32)
    first, second = (Promise(row, ids(1), ids(at), None) for at in (4, 5))
    promised.add(first, torch.tensor([1]))
    promised.add(second, torch.tensor([2]))
    promised.keep(first)
    feed = promised.feed(row, ids(5), ids(6, 0))
    assert feed is not None and feed.source.tolist() == [2]
