"""The leader's executor, with one other rank that a script plays."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from pagefleet.scheduler.output import (
    CopyDone,
    CopyJob,
    CopyKind,
    ModelRunnerOutput,
    SchedulerOutput,
)
from pagefleet.workers.executor import LocalExecutor, TensorParallelExecutor, make_executor
from pagefleet.workers.parallel import GroupAborted, RankLost, SingleRank
from pagefleet.workers.rank_loop import CopyStates, RankLoop
from pagefleet.workers.rendezvous import RankGroups
from pagefleet.workers.step_codec import StepKind, StepMessage, decode_step, encode_step


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


class ScriptedGroup(SingleRank):
    """Rank 0 of two. `others` is the state of each copy on rank 1, by job; absent = pending."""

    world_size = 2

    def __init__(self) -> None:
        self.sent: list[StepMessage] = []
        self.others: dict[int, int] = {}
        self.aborted = self.closed = False

    def broadcast(self, message: bytes | None) -> bytes:
        if self.aborted:
            raise GroupAborted(0, "aborted")
        assert message is not None
        self.sent.append(decode_step(message))
        return message

    def gather(self, tensor: Tensor, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
        jobs = self.sent[-1].copy_jobs.tolist()
        theirs = torch.tensor([[self.others.get(job, 0) for job in jobs]], dtype=torch.int32)
        return torch.cat([tensor, theirs], dim)

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.closed = True


@dataclass
class ScriptedRunner:
    """Answers step N with token 100 + N, and with the copies given to it."""

    group: SingleRank
    copies: list[CopyDone] = field(default_factory=list[CopyDone])
    execute_hook: Callable[[], None] = lambda: None
    appended: list[tuple[list[int], list[int]]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        self.ranks = RankGroups(self.group, self.group)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.execute_hook()
        self.steps.append(output.step)
        tokens = np.full(len(output.sample_rows), 100 + output.step, dtype=np.int32)
        return ModelRunnerOutput(output.step, tokens, copies_done=self.poll_copies())

    def poll_copies(self) -> tuple[CopyDone, ...]:
        done, self.copies = tuple(self.copies), []
        return done

    def append_sampled(self, output: SchedulerOutput, token_ids: np.ndarray) -> None:
        self.appended.append((output.sample_rows.tolist(), token_ids.tolist()))

    def close(self) -> None:
        self.ranks.close()


@pytest.fixture
def group() -> ScriptedGroup:
    return ScriptedGroup()


@pytest.fixture
def runner(group: ScriptedGroup) -> ScriptedRunner:
    return ScriptedRunner(group)


@pytest.fixture
def executor(runner: ScriptedRunner) -> TensorParallelExecutor:
    return TensorParallelExecutor(runner)  # pyright: ignore


def step(number: int, sample_rows: Sequence[int] = (), jobs: Sequence[int] = ()) -> SchedulerOutput:
    copies = tuple(CopyJob(job, CopyKind.STORE, ints(1), ints(2)) for job in jobs)
    return SchedulerOutput(number, sample_rows=ints(*sample_rows), copy_jobs=copies)


def test_each_step_tells_the_tokens_of_the_one_before(
    executor: TensorParallelExecutor, group: ScriptedGroup
) -> None:
    assert executor.execute(step(1, [4, 5])).token_ids.tolist() == [101, 101]
    executor.execute(step(2, [4]))
    executor.execute(step(3))
    executor.execute(step(4))
    assert [m.previous_tokens.tolist() for m in group.sent] == [[], [101, 101], [102], []]


def test_a_copy_has_ended_when_it_has_on_every_rank(
    executor: TensorParallelExecutor, group: ScriptedGroup, runner: ScriptedRunner
) -> None:
    assert executor.execute(step(1, jobs=[7, 8])).copies_done == ()
    runner.copies = [CopyDone(7, elapsed_s=0.5)]
    assert executor.poll_copies() == ()
    group.others = {8: 1}
    assert executor.poll_copies() == ()
    group.others = {7: 1, 8: 1}
    assert executor.poll_copies() == (CopyDone(7, elapsed_s=0.5),)
    assert group.sent[-1].kind is StepKind.POLL
    runner.copies = [CopyDone(8)]
    assert executor.execute(step(2)).copies_done == (CopyDone(8),)
    num_sent = len(group.sent)
    assert executor.poll_copies() == ()
    assert len(group.sent) == num_sent, "nothing runs: nobody is asked"


@pytest.mark.parametrize(("here", "there"), [(True, 2), (False, 1), (False, 2)])
def test_a_copy_that_failed_on_one_rank_has_failed(
    executor: TensorParallelExecutor,
    group: ScriptedGroup,
    runner: ScriptedRunner,
    here: bool,
    there: int,
) -> None:
    group.others = {7: there}
    runner.copies = [CopyDone(7, ok=here)]
    assert executor.execute(step(1, jobs=[7])).copies_done == (CopyDone(7, ok=False),)


def test_a_step_that_breaks_on_the_leader_frees_the_others(
    executor: TensorParallelExecutor, group: ScriptedGroup, runner: ScriptedRunner
) -> None:
    def fail() -> None:
        raise MemoryError("no room")

    runner.execute_hook = fail
    with pytest.raises(MemoryError):
        executor.execute(step(1))
    assert group.aborted
    executor.shutdown()
    assert group.closed


def test_shutdown_sends_the_ranks_home(
    executor: TensorParallelExecutor, group: ScriptedGroup
) -> None:
    executor.shutdown()
    assert [message.kind for message in group.sent] == [StepKind.STOP]
    assert group.closed


def test_a_launched_step_tells_the_tokens_of_the_one_before_it(
    executor: TensorParallelExecutor, group: ScriptedGroup
) -> None:
    results = [executor.launch(step(number, sample_rows=(0,))) for number in (1, 2)]
    assert [result().token_ids.tolist() for result in results] == [[101], [102]]
    assert [message.previous_tokens.tolist() for message in group.sent] == [[], [101]]
    executor.shutdown()


class DeviceRunner:
    """Notes what it is asked; a step that is launched has not ended."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.calls: list[tuple[str, int]] = []

    def launch(self, output: SchedulerOutput) -> SchedulerOutput:
        self.calls.append(("launch", output.step))
        return output

    def finish(self, launched: SchedulerOutput) -> ModelRunnerOutput:
        self.calls.append(("finish", launched.step))
        return ModelRunnerOutput(launched.step)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.calls.append(("execute", output.step))
        return ModelRunnerOutput(output.step)

    def close(self) -> None:
        self.calls.append(("close", 0))


def test_a_gpu_is_told_of_a_step_before_the_one_before_it_has_ended() -> None:
    runner = DeviceRunner("cuda")
    executor = LocalExecutor(runner)  # pyright: ignore
    first, second = executor.launch(step(1)), executor.launch(step(2))
    assert [first().step, second().step] == [1, 2]
    executor.shutdown()
    steps = [("launch", 1), ("launch", 2), ("finish", 1), ("finish", 2)]
    assert runner.calls == [*steps, ("close", 0)]


def test_on_the_cpu_a_thread_computes_launched_steps_in_order() -> None:
    runner = DeviceRunner("cpu")
    executor = LocalExecutor(runner)  # pyright: ignore
    results = [executor.launch(step(number)) for number in (1, 2)]
    assert [result().step for result in results] == [1, 2]
    executor.shutdown()
    assert runner.calls == [("execute", 1), ("execute", 2), ("close", 0)]


def test_one_rank_needs_no_orders() -> None:
    runner = ScriptedRunner(SingleRank())
    assert isinstance(make_executor(runner), LocalExecutor)  # pyright: ignore


class Follower(SingleRank):
    """Rank 1 of two, with the messages it will get; then its leader is lost."""

    rank = 1
    world_size = 2

    def __init__(self, messages: Sequence[StepMessage]) -> None:
        self.messages = list(messages)
        self.reported: list[list[int]] = []
        self.closed = False

    def broadcast(self, message: bytes | None) -> bytes:
        assert message is None
        if not self.messages:
            raise RankLost(0, "rank 0 is gone")
        return encode_step(self.messages.pop(0))

    def gather(self, tensor: Tensor, dim: int, sizes: Sequence[int] | None = None) -> None:
        self.reported.append(tensor.tolist()[0])

    def close(self) -> None:
        self.closed = True


def test_a_rank_obeys_until_it_is_sent_home() -> None:
    group = Follower(
        [
            StepMessage(StepKind.EXECUTE, step(1, [4, 5])),
            StepMessage(StepKind.EXECUTE, step(2), ints(31, 32), ints(7)),
            StepMessage(StepKind.POLL, copy_jobs=ints(7)),
            StepMessage(StepKind.STOP),
            StepMessage(StepKind.EXECUTE, step(3)),
        ]
    )
    runner = ScriptedRunner(group)
    runner.copies = [CopyDone(7)]
    RankLoop(runner).run()  # pyright: ignore
    assert runner.steps == [1, 2]
    assert runner.appended == [([], []), ([4, 5], [31, 32])]
    assert group.reported == [[1], [1]]
    assert group.closed


def test_a_rank_whose_leader_is_lost_ends_with_the_reason() -> None:
    group = Follower([StepMessage(StepKind.EXECUTE, step(1))])
    with pytest.raises(RankLost):
        RankLoop(ScriptedRunner(group)).run()  # pyright: ignore
    assert group.closed


def test_what_the_leader_no_longer_asks_for_is_forgotten() -> None:
    states = CopyStates()
    states.add((CopyDone(1), CopyDone(2, ok=False)))
    assert states.report(ints(1, 2, 3)).tolist() == [[1, 2, 0]]
    assert states.report(ints(2)).tolist() == [[2]]
    assert states.report(ints(1)).tolist() == [[0]]
