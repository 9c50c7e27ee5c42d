"""One attempt of each request, found by its key and by its lease."""

from cluster_factories import join, make_controller, make_info, make_request

from pagefleet.cluster.admission import Need
from pagefleet.cluster.attempts import Attempts
from pagefleet.cluster.fair_queue import WaitingRequest
from pagefleet.cluster.grants import Grant
from pagefleet.cluster.model_pool import ModelPool


def make_pool() -> ModelPool:
    controller = make_controller()
    join(controller, make_info())
    return controller.pools()["m"]


def make_waiting(**fields: object) -> WaitingRequest:
    return WaitingRequest(make_request(**fields), Need(5, 16, 16.0), 0.0, 0.0, None, 0.0, 1.0)


def grant(pool: ModelPool, **fields: object) -> Grant:
    outcome = pool.submit(make_request(**fields), 1.0)
    assert isinstance(outcome, Grant)
    return outcome


def test_a_grant_takes_the_place_of_the_wait() -> None:
    attempts, pool = Attempts(), make_pool()
    attempts.waits(make_waiting(request_key="q"), pool)
    known = attempts.get("q")
    assert known is not None and known.waiting is not None and known.record is None
    attempts.check_integrity(1)
    given = grant(pool, request_key="q")
    attempts.granted(given, pool)
    known = attempts.get("q")
    assert known is not None and known.waiting is None and known.record is given.record
    attempts.check_integrity(0)


def test_it_ends_by_either_name() -> None:
    attempts, pool = Attempts(), make_pool()
    by_lease, by_key = grant(pool, request_key="q0"), grant(pool, request_key="q1")
    for given in (by_lease, by_key):
        attempts.granted(given, pool)
    attempts.forget_lease(by_lease.record)
    attempts.forget("q1")
    assert attempts.get("q0") is attempts.get("q1") is None
    attempts.forget_lease(by_key.record)  # it ended before its lease did
    attempts.check_integrity(0)


def test_only_who_waits_for_a_gateway_ends_with_it() -> None:
    attempts, pool = Attempts(), make_pool()
    attempts.waits(make_waiting(request_key="q0", gateway_id="g"), pool)
    attempts.waits(make_waiting(request_key="q1", gateway_id="other"), pool)
    attempts.granted(grant(pool, request_key="q2", gateway_id="g"), pool)
    for key, _ in attempts.waiting_for("g"):
        assert key == "q0"
        attempts.forget(key)
    assert attempts.get("q0") is None and attempts.get("q1") is not None
    attempts.check_integrity(1)
