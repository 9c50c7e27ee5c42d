"""How long calls took, as histograms."""

from pagefleet.cluster.call_times import CallClock


def test_counts_by_upper_bound_and_adds_up():
    clock = CallClock()
    for elapsed_s in (2e-6, 1e-5, 3e-3, 20.0):
        clock.add("reserve", elapsed_s)
    clock.add("tick", 1e-4)
    reserve, tick = clock.stats()
    assert (reserve.call, sum(reserve.counts)) == ("reserve", 4)
    assert round(reserve.total_s, 6) == 20.003012
    assert reserve.counts[0] == 2, "a bound belongs to its own bucket"
    assert reserve.counts[reserve.bounds_s.index(5e-3)] == 1
    assert reserve.counts[-1] == 1, "beyond the last bound"
    assert (tick.call, sum(tick.counts)) == ("tick", 1)
