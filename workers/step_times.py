"""How long this replica's steps take. Knows no clock: durations come in.

What else is measured (prefill rate, copy bandwidth) the scheduler measures for its own choices.
"""

from ..scheduler.output import SchedulerOutput


class StepTimes:
    """The running mean of pure decode steps; 0.0 = not known yet."""

    def __init__(self, decode_step_s: float = 0.0, *, weight: float = 0.1) -> None:
        self.decode_step_s = decode_step_s
        self._weight = weight

    def add(self, output: SchedulerOutput, elapsed_s: float) -> None:
        """Learn from one step that took `elapsed_s` on the device."""
        is_decode = output.num_scheduled_tokens.size > 0 and output.num_scheduled_tokens.max() == 1
        if not is_decode or elapsed_s <= 0.0:
            return
        # the first sample counts whole: nothing was known before it
        weight = self._weight if self.decode_step_s > 0.0 else 1.0
        self.decode_step_s += weight * (elapsed_s - self.decode_step_s)
