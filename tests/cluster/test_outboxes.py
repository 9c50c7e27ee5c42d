"""What lies ready for gateways: in order, once, and only for those that live."""

from pagefleet.cluster.outboxes import Outboxes
from pagefleet.protos.messages import Refused


def answer(key: str) -> Refused:
    return Refused(key, 1, "Overloaded", "the queue is full")


def test_answers_are_fetched_once_and_in_order() -> None:
    outboxes = Outboxes()
    outboxes.heard("g", 0.0)
    assert not outboxes.has_answers("g")
    outboxes.send("g", answer("a"))
    outboxes.send("g", answer("b"))
    assert outboxes.has_answers("g")
    assert outboxes.fetch("g") == (answer("a"), answer("b"))
    assert not outboxes.has_answers("g") and outboxes.fetch("g") == ()


def test_what_has_been_fetched_cannot_be_taken_back() -> None:
    outboxes = Outboxes()
    outboxes.heard("g", 0.0)
    outboxes.send("g", answer("a"))
    assert outboxes.take_back("g", answer("a"))
    assert outboxes.fetch("g") == ()
    outboxes.send("g", answer("b"))
    outboxes.fetch("g")
    assert not outboxes.take_back("g", answer("b"))
    assert not outboxes.take_back("nobody", answer("b"))


def test_a_silent_gateway_is_forgotten_with_its_answers() -> None:
    outboxes = Outboxes()
    outboxes.heard("silent", 0.0)
    outboxes.heard("g", 0.0)
    outboxes.send("silent", answer("a"))
    outboxes.heard("g", 10.0)
    assert outboxes.forget_silent(since=5.0) == ["silent"]
    outboxes.send("silent", answer("b"))
    assert not outboxes.has_answers("silent")
    assert outboxes.forget_silent(since=5.0) == []
