"""Times learnt from steps."""

import numpy as np
import pytest

from pagefleet.scheduler.output import SchedulerOutput
from pagefleet.workers.step_times import StepTimes


def step(*num_tokens: int) -> SchedulerOutput:
    return SchedulerOutput(1, num_scheduled_tokens=np.array(num_tokens, dtype=np.int32))


def test_the_first_sample_counts_whole_later_ones_in_part() -> None:
    times = StepTimes(weight=0.5)
    times.add(step(1, 1, 1), 0.010)
    assert times.decode_step_s == pytest.approx(0.010)
    times.add(step(1), 0.020)
    assert times.decode_step_s == pytest.approx(0.015)


@pytest.mark.parametrize(("tokens", "elapsed_s"), [((), 0.1), ((1,), 0.0), ((1, 50), 0.5)])
def test_steps_that_teach_nothing(tokens: tuple[int, ...], elapsed_s: float) -> None:
    times = StepTimes(0.010)
    times.add(step(*tokens), elapsed_s)
    assert times.decode_step_s == 0.010


def test_the_longest_steps_are_those_that_the_watchdog_must_allow() -> None:
    times = StepTimes(0.010)
    assert times.p99_s == 0.010
    for _ in range(150):
        times.add(step(1), 0.010)
    times.add(step(1, 500), 0.700)
    times.add(step(1, 500), 0.800)
    assert times.p99_s == 0.700
    for _ in range(200):
        times.add(step(1), 0.020)
    assert times.p99_s == 0.020, "what is long past does not count"
