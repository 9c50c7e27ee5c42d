"""Replicas of other weights under one name: who is asked, and what has begun."""

from dataclasses import replace

import pytest
from cluster_factories import (
    IDENTITY,
    FakeReplica,
    join,
    make_controller,
    make_info,
    make_request,
    tell,
)

from pagefleet.cluster.controller import Controller
from pagefleet.protos.errors import ModelNotFound
from pagefleet.protos.messages import (
    CacheIdentity,
    CacheReset,
    Lease,
    Refused,
    ReplicaInfo,
    Ticket,
    WantedWeights,
)

NEW = replace(IDENTITY, weights_version=2, model_fingerprint="other")


def leased_weights(controller, **fields: object) -> object:
    answer = controller.reserve(make_request(**fields), 1.0)
    controller.check_integrity()
    assert isinstance(answer, Lease), answer
    return answer.weights


def join_of(controller, replica_id: str, identity: CacheIdentity = NEW):
    return join(controller, make_info(replica_id, identity=identity))


def test_new_requests_go_where_most_replicas_serve_and_of_equals_to_the_newest():
    controller = make_controller()
    join_of(controller, "a", IDENTITY)
    join_of(controller, "b", IDENTITY)
    join_of(controller, "c")
    assert leased_weights(controller) == IDENTITY.weights
    controller.drain("a", 1.0)
    assert leased_weights(controller) == NEW.weights
    assert [card.identity for card in controller.model_cards()] == [NEW]


def test_what_has_begun_stays_with_its_weights():
    controller = make_controller()
    join_of(controller, "a", IDENTITY)
    join_of(controller, "b")
    assert leased_weights(controller) == NEW.weights
    assert leased_weights(controller, weights=IDENTITY.weights) == IDENTITY.weights


def test_what_has_begun_is_refused_once_its_weights_are_gone():
    controller = make_controller()
    join_of(controller, "a", IDENTITY)
    join_of(controller, "b")
    controller.drain("a", 1.0)
    answer = controller.reserve(make_request(weights=IDENTITY.weights), 1.0)
    assert isinstance(answer, Refused)
    assert (answer.error, answer.retry_after_s) == ("Unavailable", 1.0)
    assert "replaced" in answer.reason
    controller.check_integrity()


def test_what_waits_goes_along_unless_it_has_begun():
    controller = make_controller()
    old = join_of(controller, "a", IDENTITY)
    full = controller.reserve(make_request(num_tokens=1500, max_tokens=100), 1.0)
    assert isinstance(full, Lease)
    old.accept(full)
    tell(controller, old, 1.1)
    assert isinstance(controller.reserve(make_request(request_key="new"), 1.2), Ticket)
    begun = make_request(request_key="begun", weights=IDENTITY.weights)
    assert isinstance(controller.reserve(begun, 1.2), Ticket)
    join_of(controller, "b")
    controller.check_integrity()
    (grant,) = controller.poll_grants("g", 1.3)
    assert isinstance(grant, Lease)
    assert (grant.request_key, grant.weights) == ("new", NEW.weights)
    controller.drain("a", 1.4)
    (refusal,) = controller.poll_grants("g", 1.5)
    assert isinstance(refusal, Refused) and refusal.request_key == "begun"
    controller.check_integrity()


def test_a_waiting_request_keeps_its_deadline_and_its_place():
    controller = make_controller()
    join_of(controller, "a", IDENTITY)
    controller.reserve(make_request(num_tokens=1500, max_tokens=100), 1.0)
    controller.reserve(make_request(request_key="q", deadline_s=3.0), 1.0)
    controller.register_replica(make_info("b", identity=NEW), controller.model_cards()[0], 2.0)
    (waiting,) = controller.pools()["m"].queue
    assert (waiting.since, waiting.deadline_at) == (1.0, 4.0)
    controller.tick(4.1)
    (refusal,) = controller.poll_grants("g", 4.2)
    assert isinstance(refusal, Refused) and refusal.error == "DeadlineExceeded"


def test_streams_can_move_only_to_the_same_weights():
    controller = make_controller()
    join_of(controller, "a", IDENTITY)
    join_of(controller, "b")
    assert not controller.can_move("a")
    join_of(controller, "c")
    assert controller.can_move("b")
    controller.drain("c", 1.0)
    assert not controller.can_move("b")


def test_of_old_weights_nothing_is_left():
    controller = make_controller()
    join_of(controller, "a", IDENTITY)
    join_of(controller, "b")
    controller.declare_dead("a", 1.0)
    assert [pool.identity for pool in controller.pools_of("m")] == [NEW]


# Orders


def renewed(controller, now: float, *replicas: FakeReplica) -> list[str]:
    """Who is told to come again."""
    return [r.info.replica_id for r in replicas if tell(controller, r, now).renews]


def make_fleet() -> tuple[Controller, list[FakeReplica]]:
    controller = make_controller()
    infos = [make_info(name, checkpoint="/old") for name in ("a", "b")]
    return controller, [join(controller, info) for info in infos]


def make_next(replica: FakeReplica, **fields: object) -> ReplicaInfo:
    """Its next incarnation, with the ordered weights."""
    values: dict[str, object] = {
        "identity": NEW,
        "incarnation": "next",
        "checkpoint": "/new",
        "weights_ordered": True,
    }
    return replace(replica.info, **(values | fields))


def test_new_weights_come_in_one_replica_after_the_other():
    controller, (a, b) = make_fleet()
    assert controller.update_weights("m", "/new", 600.0, 1.0) == 2
    assert controller.wanted_weights("m") == WantedWeights("/new", 2)
    assert renewed(controller, 1.1, a, b) == ["a"]
    controller.declare_dead("a", 2.0)
    controller.tick(2.1)
    assert renewed(controller, 2.2, b) == [], "nobody else goes before it is back"
    join(controller, make_next(a), 3.0)
    controller.tick(3.1)
    assert renewed(controller, 3.2, b) == ["b"]
    controller.declare_dead("b", 4.0)
    join(controller, make_next(b), 5.0)
    controller.tick(5.1)
    assert {r.weights_version for r in controller.cluster_state(5.1).replicas} == {2}
    assert not any(r.renews for r in controller.cluster_state(5.1).replicas)
    controller.check_integrity()


def test_the_last_of_its_weights_gives_its_streams_the_ordered_time():
    controller, (a, b) = make_fleet()
    controller.update_weights("m", "/new", 500.0, 1.0)
    assert tell(controller, a, 1.0).drain_s == 30.0, "its streams can move to b"
    controller.declare_dead("a", 2.0)
    join(controller, make_next(a), 3.0)
    controller.tick(3.0)
    assert tell(controller, b, 3.0).drain_s == 500.0


def test_another_order_goes_on_where_the_weights_could_not_be_loaded():
    controller, (a, b) = make_fleet()
    controller.update_weights("m", "/broken", 600.0, 1.0)
    controller.declare_dead("a", 2.0)
    assert controller.update_weights("m", "/new", 600.0, 3.0) == 3
    assert controller.wanted_weights("m") == WantedWeights("/new", 3)
    assert renewed(controller, 3.1, b) == []
    identity = replace(IDENTITY, weights_version=3)
    join(controller, make_next(a, identity=identity), 4.0)
    controller.tick(4.1)
    assert renewed(controller, 4.2, b) == ["b"]


def test_a_controller_that_restarts_goes_on_with_an_ordered_roll_only():
    for ordered, told in ((True, ["b"]), (False, [])):
        restarted = make_controller()
        b = join(restarted, make_info("b", checkpoint="/old"))
        join(restarted, replace(make_next(make_fleet()[1][0]), weights_ordered=ordered))
        restarted.tick(1.0)
        assert renewed(restarted, 1.1, b) == told
        assert restarted.wanted_weights("m") == WantedWeights("/new", 2)


def test_one_that_leaves_for_good_is_not_waited_for():
    controller, (a, b) = make_fleet()
    controller.update_weights("m", "/new", 600.0, 1.0)
    assert renewed(controller, 1.1, a) == ["a"]
    controller.drain("a", 1.2)
    assert renewed(controller, 1.3, a) == []
    controller.declare_dead("a", 2.0)
    controller.tick(2.1)
    assert renewed(controller, 2.2, b) == ["b"]


def test_an_unknown_model_has_no_weights_and_no_cache():
    controller, _ = make_fleet()
    with pytest.raises(ModelNotFound):
        controller.update_weights("x", "/new", 600.0, 1.0)
    with pytest.raises(ModelNotFound):
        controller.order_reset("x")


def test_a_reset_is_done_when_every_replica_says_so():
    controller, (a, _) = make_fleet()
    order = controller.order_reset("")
    assert tell(controller, a, 1.0).reset_order == order
    a.epoch += 1
    tell(controller, a, 1.1, reset_order=order, reset_blocks=5)
    assert controller.resets(order) == ((CacheReset("a", 5, 1),), ("b",))
    controller.declare_dead("b", 2.0)
    join(controller, make_info("b", "next"), 3.0)
    assert controller.resets(order) == ((CacheReset("a", 5, 1),), ()), "a new one has no cache"
