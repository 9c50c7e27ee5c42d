"""Who runs a step on the device: one rank in this process, or several elsewhere.

The engine knows only the protocol. Knows nothing of requests, queues or sockets.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np

from ..scheduler.output import CopyDone, Int32Array, ModelRunnerOutput, SchedulerOutput
from .model_runner import ModelRunner
from .parallel import GroupError
from .rank_loop import FAILED, PENDING, CopyStates
from .step_codec import StepKind, StepMessage, encode_step


class Executor(Protocol):
    """Runs the steps it is given, in order. `execute` is never called twice at once."""

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step and return when its tokens are on the host."""
        ...

    def launch(self, output: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Begin a step, while the one before it may still run; the answer waits for its result."""
        ...

    def poll_copies(self) -> tuple[CopyDone, ...]:
        """Copies between the tiers that ended and that no step's result has named."""
        ...

    def shutdown(self) -> None:
        """Release the device; no step follows."""
        ...


class LocalExecutor:
    """One rank in this process. A GPU is told of a step ahead; on the CPU a thread computes it."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._thread: ThreadPoolExecutor | None = None

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step on this process's device."""
        return self._runner.execute(output)

    def launch(self, output: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Begin a step and return."""
        if self._runner.device.type != "cpu":
            return partial(self._runner.finish, self._runner.launch(output))
        self._thread = self._thread or ThreadPoolExecutor(1, "pagefleet-step")
        return self._thread.submit(self._runner.execute, output).result

    def poll_copies(self) -> tuple[CopyDone, ...]:
        """Copies that ended while no step ran."""
        return self._runner.poll_copies()

    def shutdown(self) -> None:
        """Stop the runner; its memory goes with it."""
        if self._thread is not None:
            self._thread.shutdown()
        self._runner.close()


class TensorParallelExecutor:
    """The leader's rank here and all others elsewhere, each in a `RankLoop`.

    The tokens of a step go to the other ranks with the next one, so that a step cannot be launched
    before they are known: overlapped, the next one is scheduled meanwhile, and no more.
    A step is broadcast and then run; a copy between the tiers has ended when it has on every
    rank. When a rank is lost, `execute` or `poll_copies` raises GroupError, on the other ranks
    too, and the replica has to be rebuilt.
    """

    def __init__(self, runner: ModelRunner) -> None:
        assert runner.ranks.rank == 0, "only the leader gives orders"
        self._runner = runner
        self._messages = runner.ranks.messages
        self._copies = CopyStates()
        self._running_copies: list[int] = []
        self._sampled: Int32Array = np.empty(0, dtype=np.int32)
        self._thread: ThreadPoolExecutor | None = None

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step on all ranks."""
        self._running_copies += [job.job_id for job in output.copy_jobs]
        with ExitStack() as on_failure:
            on_failure.callback(self._runner.ranks.abort)
            self._order(StepKind.EXECUTE, output)
            result = self._runner.execute(output)
            self._sampled = result.token_ids
            result = replace(result, copies_done=self._ended_copies(result.copies_done))
            on_failure.pop_all()
        return result

    def launch(self, output: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Run a step on all ranks, in a thread of its own."""
        self._thread = self._thread or ThreadPoolExecutor(1, "pagefleet-step")
        return self._thread.submit(self.execute, output).result

    def poll_copies(self) -> tuple[CopyDone, ...]:
        """Copies that have ended on all ranks while no step ran."""
        if not self._running_copies:
            self._messages.check()
            return ()
        with ExitStack() as on_failure:
            on_failure.callback(self._runner.ranks.abort)
            self._order(StepKind.POLL)
            done = self._ended_copies(self._runner.poll_copies())
            on_failure.pop_all()
        return done

    def shutdown(self) -> None:
        """Send the other ranks home, and stop this one."""
        if self._thread is not None:
            self._thread.shutdown()
        with suppress(GroupError):  # who cannot be told has ended already
            self._order(StepKind.STOP)
        self._runner.close()

    def _order(self, kind: StepKind, output: SchedulerOutput | None = None) -> None:
        jobs = np.array(self._running_copies, dtype=np.int32)
        message = StepMessage(kind, output, self._sampled, jobs)
        self._messages.broadcast(encode_step(message))

    def _ended_copies(self, ended_here: tuple[CopyDone, ...]) -> tuple[CopyDone, ...]:
        """Ask every rank for the state of the copies that run; the ranks answer an order."""
        self._copies.add(ended_here)
        if not self._running_copies:
            return ()
        jobs = self._running_copies
        states = self._messages.gather(self._copies.report(np.array(jobs, dtype=np.int32)), 0)
        assert states is not None, "the leader gets what is gathered"
        has_ended = (states != PENDING).all(0).tolist()
        has_failed = (states == FAILED).any(0).tolist()
        self._running_copies = [
            job for job, ended in zip(jobs, has_ended, strict=True) if not ended
        ]
        return tuple(
            replace(self._copies.take(job), ok=not failed)
            for job, ended, failed in zip(jobs, has_ended, has_failed, strict=True)
            if ended
        )


def make_executor(runner: ModelRunner) -> Executor:
    """The executor for a loaded leader."""
    if runner.ranks.world_size == 1:
        return LocalExecutor(runner)
    return TensorParallelExecutor(runner)
