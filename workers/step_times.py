"""How fast this replica is, measured from its own steps. Knows no clock: durations come in."""

from ..scheduler.output import SchedulerOutput


class StepTimes:
    """Running means of the prefill rate and of the time of a pure decode step.

    A mixed step teaches only the prefill rate: the time of a decode step is taken off first and
    the rest is charged to the prompt tokens. 0.0 = not known yet.
    """

    def __init__(
        self,
        prefill_tokens_per_s: float = 0.0,
        decode_step_s: float = 0.0,
        *,
        weight: float = 0.1,
    ) -> None:
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self.decode_step_s = decode_step_s
        self._weight = weight

    def add(self, output: SchedulerOutput, elapsed_s: float) -> None:
        """Learn from one step that took `elapsed_s` on the device."""
        scheduled = output.num_scheduled_tokens
        if elapsed_s <= 0.0 or scheduled.size == 0:
            return
        num_prefill_tokens = int(scheduled[scheduled > 1].sum())
        if num_prefill_tokens == 0:
            self.decode_step_s = self._mean(self.decode_step_s, elapsed_s)
            return
        has_decodes = bool((scheduled == 1).any())
        prefill_s = elapsed_s - (self.decode_step_s if has_decodes else 0.0)
        if prefill_s > 0.0:
            rate = num_prefill_tokens / prefill_s
            self.prefill_tokens_per_s = self._mean(self.prefill_tokens_per_s, rate)

    def _mean(self, mean: float, sample: float) -> float:
        # the first sample counts whole: nothing was known before it
        return sample if mean == 0.0 else mean + self._weight * (sample - mean)
