"""The last decisions and their reasons, as the controller makes them."""

from cluster_factories import join, make_controller, make_hashes, make_info, make_request, tell

from pagefleet.cluster.decision_log import WATCHED_S
from pagefleet.protos.messages import Lease, Ticket

BIG = {"num_tokens": 1500, "max_tokens": 100}  # all 100 blocks


def test_tells_where_a_request_went_and_what_it_found() -> None:
    controller = make_controller()
    hashes = make_hashes(4)
    replica = join(controller, make_info("r0"))
    replica.store(*hashes)
    tell(controller, replica, 0.5)
    join(controller, make_info("r1"))
    request = make_request(route_hashes=hashes, request_id="mine", tenant="t")
    controller.reserve(request, 1.0)
    (decision,) = controller.watch(3.0).decisions
    assert (decision.decision, decision.replica_id) == ("grant", "r0")
    assert (decision.request_key, decision.request_id) == (request.request_key, "mine")
    assert (decision.tenant, decision.num_tokens, decision.hit_tokens) == ("t", 64, 63)
    assert (decision.lease_blocks, decision.age_s, decision.waited_s) == (5, 2.0, 0.0)
    assert decision.replicas == (), "nobody was watching"


def test_has_the_terms_of_the_chosen_and_the_best_other_while_someone_watches() -> None:
    controller = make_controller()
    for name in ("r0", "r1", "r2"):
        join(controller, make_info(name))
    controller.watch(1.0)
    request = make_request()
    expected = {cost.replica_id: cost for cost in controller.explain(request, 1.0).replicas}
    lease = controller.reserve(request, 1.0)
    assert isinstance(lease, Lease)
    (decision,) = controller.watch(1.0).decisions
    assert decision.replicas[0].replica_id == lease.replica_id
    assert len(decision.replicas) == 2
    assert all(cost == expected[cost.replica_id] for cost in decision.replicas)
    controller.reserve(make_request(), 1.0 + WATCHED_S)
    assert controller.watch(9.0).decisions[-1].replicas == ()


def test_works_out_the_terms_of_some_where_requests_come_in_crowds() -> None:
    controller = make_controller()
    join(controller, make_info(num_blocks=10_000))
    controller.watch(0.0)
    for number in range(100):
        controller.reserve(make_request(), number / 1000)
    with_costs = [bool(decision.replicas) for decision in controller.watch(0.1).decisions]
    assert sum(with_costs) == 2


def test_follows_a_request_from_wait_to_grant_and_to_expiry() -> None:
    controller = make_controller()
    replica = join(controller, make_info())
    lease = controller.reserve(make_request(**BIG), 0.0)
    assert isinstance(lease, Lease) and replica.accept(lease)
    tell(controller, replica, 0.1)
    for fields in ({}, {"deadline_s": 2.0}):
        assert isinstance(controller.reserve(make_request(**BIG, **fields), 1.0), Ticket)
    controller.tick(3.5)
    replica.finish(lease.lease_id)
    tell(controller, replica, 4.0)
    decisions = controller.watch(4.0).decisions
    kinds = [decision.decision for decision in decisions]
    assert kinds == ["grant", "wait", "wait", "expire", "grant"]
    assert [decision.number for decision in decisions] == [1, 2, 3, 4, 5]
    assert (decisions[3].waited_s, decisions[4].waited_s) == (2.5, 3.0)
    assert "deadline" in decisions[3].reason
    assert decisions[1].request_key == decisions[4].request_key


def test_tells_why_one_was_refused() -> None:
    controller = make_controller()
    join(controller, make_info())
    controller.reserve(make_request(num_tokens=5000), 0.0)
    (decision,) = controller.watch(0.0).decisions
    assert (decision.decision, decision.replica_id) == ("refuse", "")
    assert "context" in decision.reason


def test_is_bounded() -> None:
    controller = make_controller()
    join(controller, make_info(num_blocks=10_000))
    controller.watch(0.0)
    for _ in range(600):
        controller.reserve(make_request(num_tokens=5000), 0.0)
    decisions = controller.watch(0.0).decisions
    assert len(decisions) == 512 and decisions[-1].number == 600
