"""What clients saw in the last seconds."""

from pagefleet.cluster.recent_rates import RecentRates


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_means_over_the_window_and_nothing_older() -> None:
    clock = Clock()
    recent = RecentRates(clock, window_s=10)
    recent.add_tokens(1000)
    for _ in range(20):
        clock.now += 1.0
        recent.add_tokens(50)
    recent.add_end(0.2)
    found = recent.rates()
    assert found.window_s == 10.0
    assert found.tokens_per_s == 55.0, "11 seconds have begun, 10 have passed"
    assert found.requests_per_s == 0.1
    clock.now += 30.0
    found = recent.rates()
    assert (found.tokens_per_s, found.requests_per_s, found.ttft_p50_s) == (0.0, 0.0, None)


def test_a_young_gateway_divides_by_the_time_it_has_run() -> None:
    clock = Clock()
    recent = RecentRates(clock)
    recent.add_tokens(40)
    clock.now += 2.0
    assert recent.rates().tokens_per_s == 20.0


def test_percentiles_of_the_first_tokens() -> None:
    clock = Clock()
    recent = RecentRates(clock)
    for hundredths in range(1, 101):
        recent.add_end(hundredths / 100)
    recent.add_end(None)
    found = recent.rates()
    assert (found.ttft_p50_s, found.ttft_p99_s) == (0.5, 0.99)
