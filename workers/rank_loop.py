"""What a rank other than the leader does: obey one step after the other until told to stop.

Knows the group and the model runner; decides nothing, and knows no request and no Ray.
"""
# pyright: reportUnknownMemberType=false

import torch
from torch import Tensor

from ..scheduler.output import CopyDone, Int32Array, SchedulerOutput
from .model_runner import ModelRunner
from .step_codec import StepKind, StepMessage, decode_step

PENDING, SUCCEEDED, FAILED = range(3)


class CopyStates:
    """Which copies between the tiers have ended on this rank and were not yet claimed."""

    def __init__(self) -> None:
        self._done: dict[int, CopyDone] = {}

    def add(self, copies: tuple[CopyDone, ...]) -> None:
        """What a step or a poll of this rank brought."""
        for copy in copies:
            self._done[copy.job_id] = copy

    def report(self, job_ids: Int32Array) -> Tensor:
        """int32 [1, n]: PENDING, SUCCEEDED or FAILED on this rank. What the leader no longer asks
        for has ended on all ranks, and is forgotten."""
        self._done = {job: self._done[job] for job in job_ids.tolist() if job in self._done}
        return torch.tensor([[self._state(job) for job in job_ids.tolist()]], dtype=torch.int32)

    def take(self, job_id: int) -> CopyDone:
        """A copy that has ended here, claimed."""
        return self._done.pop(job_id)

    def _state(self, job_id: int) -> int:
        copy = self._done.get(job_id)
        if copy is None:
            return PENDING
        return SUCCEEDED if copy.ok else FAILED


class RankLoop:
    """One rank's life after loading. `run` returns when the leader says so.

    Raises GroupError when the leader or another rank is gone: nothing is left to do but to end.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._messages = runner.ranks.messages
        self._copies = CopyStates()
        self._previous = SchedulerOutput(step=0)

    def run(self) -> None:
        """Obey until STOP."""
        try:
            while True:
                message = decode_step(self._messages.broadcast(None))
                if message.kind is StepKind.STOP:
                    return
                self._obey(message)
        finally:
            # Closes the group too: the others must not wait for a rank that has failed.
            self._runner.close()

    def _obey(self, message: StepMessage) -> None:
        if message.output is None:
            self._copies.add(self._runner.poll_copies())
        else:
            self._runner.append_sampled(self._previous, message.previous_tokens)
            result = self._runner.execute(message.output)
            self._previous = message.output
            self._copies.add(result.copies_done)
        if len(message.copy_jobs) > 0:
            self._messages.gather(self._copies.report(message.copy_jobs), 0)
