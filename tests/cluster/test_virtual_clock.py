"""Events in order of time, and of setting where times are equal."""

from pagefleet.cluster.virtual_clock import VirtualClock


def test_events_come_in_order_and_take_the_time_along() -> None:
    clock, seen = VirtualClock(), []
    for when, name in ((2.0, "later"), (1.0, "first"), (1.0, "second")):
        clock.at(when, lambda name=name: seen.append((clock.now, name)))
    while clock.step():
        pass
    assert seen == [(1.0, "first"), (1.0, "second"), (2.0, "later")]
    assert not clock.step() and clock.now == 2.0


def test_what_has_passed_happens_now() -> None:
    clock, seen = VirtualClock(), []
    clock.at(5.0, lambda: clock.at(1.0, lambda: seen.append(clock.now)))
    while clock.step():
        pass
    assert seen == [5.0]
