"""How long this replica's steps take. Knows no clock: durations come in.

What else is measured (prefill rate, copy bandwidth) the scheduler measures for its own choices.
"""

from collections import deque

from ..scheduler.output import SchedulerOutput

_MEMORY = 200  # steps


class StepTimes:
    """The running mean of pure decode steps, and how long any step may take; 0.0 = not known."""

    def __init__(self, decode_step_s: float = 0.0, *, weight: float = 0.1) -> None:
        self.decode_step_s = decode_step_s
        self._weight = weight
        self._recent: deque[float] = deque(maxlen=_MEMORY)

    @property
    def p99_s(self) -> float:
        """Of the last steps, those with prompts too: one that takes much longer is stuck."""
        ordered = sorted(self._recent)
        return ordered[-1 - len(ordered) // 100] if ordered else self.decode_step_s

    def add(self, output: SchedulerOutput, elapsed_s: float) -> None:
        """Learn from one step that took `elapsed_s` on the device."""
        if elapsed_s > 0.0:
            self._recent.append(elapsed_s)
        counts = output.num_scheduled_tokens
        if output.draft_token_ids is not None:
            counts = counts - output.num_draft_tokens
        is_decode = counts.size > 0 and counts.max() == 1
        if not is_decode or elapsed_s <= 0.0:
            return
        # the first sample counts whole: nothing was known before it
        weight = self._weight if self.decode_step_s > 0.0 else 1.0
        self.decode_step_s += weight * (elapsed_s - self.decode_step_s)
