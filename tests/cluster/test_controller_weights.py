"""Replicas of other weights under one name: who is asked, and what has begun."""

from dataclasses import replace

from cluster_factories import (
    IDENTITY,
    join,
    make_controller,
    make_info,
    make_request,
    tell,
)

from pagefleet.protos.messages import CacheIdentity, Lease, Refused, Ticket

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
