"""Work over capacity, and what is learnt from how fast it goes."""

import pytest

from pagefleet.cluster.wait_forecast import Capacity, WaitForecast, Work


def test_the_scarcest_of_three_decides() -> None:
    capacity = Capacity(prefill_rate=1000.0, num_blocks=10, num_sequences=4)
    assert capacity.seconds_for(Work(2000, 1.0, 1.0)) == 2.0
    assert capacity.seconds_for(Work(0, 30.0, 1.0)) == 3.0
    assert capacity.seconds_for(Work(0, 1.0, 16.0)) == 4.0


def test_work_adds_up() -> None:
    assert Work(1, 2.0, 3.0) + Work(4, 5.0, 6.0) - Work(1, 2.0, 3.0) == Work(4, 5.0, 6.0)


@pytest.mark.parametrize("actual_s", [0.05, 0.1, 0.3])
def test_the_factor_becomes_what_a_second_of_work_takes(actual_s: float) -> None:
    forecast = WaitForecast()
    assert forecast.factor == 1.0
    for number in range(3000):
        forecast.granted(0.1, number * actual_s, others_wait=True)
    assert forecast.factor == pytest.approx(actual_s / 0.1, rel=0.05)


def test_idle_time_says_nothing() -> None:
    forecast = WaitForecast()
    for number in range(1000):
        forecast.granted(0.1, number * 10.0, others_wait=False)
    assert forecast.factor == 1.0


def test_a_burst_says_nothing() -> None:
    forecast = WaitForecast()
    for number in range(100):
        for _ in range(9):
            forecast.granted(0.1, number * 10.0, others_wait=True)
        forecast.granted(0.1, number * 10.0, others_wait=False)
    assert forecast.factor == 1.0
