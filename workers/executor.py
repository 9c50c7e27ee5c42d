"""Who runs a step on the device: one rank in this process, or several elsewhere.

The engine knows only the protocol. Knows nothing of requests, queues or sockets.
"""

from typing import Protocol

from ..scheduler.output import CopyDone, ModelRunnerOutput, SchedulerOutput
from .model_runner import ModelRunner


class Executor(Protocol):
    """Runs the steps it is given, in order. `execute` is never called twice at once."""

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step and return when its tokens are on the host."""
        ...

    def poll_copies(self) -> tuple[CopyDone, ...]:
        """Copies between the tiers that ended and that no step's result has named."""
        ...

    def shutdown(self) -> None:
        """Release the device; no step follows."""
        ...


class LocalExecutor:
    """One rank in this process."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step on this process's device."""
        return self._runner.execute(output)

    def poll_copies(self) -> tuple[CopyDone, ...]:
        """Copies that ended while no step ran."""
        return self._runner.poll_copies()

    def shutdown(self) -> None:
        """Stop the runner; its memory goes with it."""
        self._runner.close()
