"""Draining in the controller's books: who may still get leases, and what leaders are told."""

from cluster_factories import join, make_controller, make_info, make_request, tell

from pagefleet.protos.messages import Lease, Refused, ReplicaState, ReportReply, Ticket


def test_a_draining_replica_gets_no_leases():
    controller = make_controller()
    first, second = (join(controller, make_info(name)) for name in ("r0", "r1"))
    assert controller.drain("r0", 1.0)
    for _ in range(10):
        lease = controller.reserve(make_request(), 1.0)
        assert isinstance(lease, Lease)
        assert lease.replica_id == "r1"
        second.accept(lease)
    assert tell(controller, second, 2.0) == ReportReply()
    assert tell(controller, first, 2.0).draining
    assert not controller.drain("nobody", 2.0)


def test_the_leader_is_told_what_is_left_of_its_time():
    controller = make_controller()
    replica = join(controller, make_info("r0"))
    controller.drain("r0", 10.0, drain_s=30.0)
    assert tell(controller, replica, 12.0).drain_s == 28.0
    controller.drain("r0", 20.0, drain_s=60.0)
    assert tell(controller, replica, 21.0).drain_s == 19.0, "a later order gives no more time"
    controller.drain("r0", 22.0, drain_s=5.0)
    assert tell(controller, replica, 23.0).drain_s == 4.0
    assert tell(controller, replica, 60.0).drain_s == 0.0


def test_leases_given_before_run_to_their_end():
    controller = make_controller()
    replica = join(controller, make_info("r0"))
    lease = controller.reserve(make_request(), 1.0)
    assert isinstance(lease, Lease)
    controller.drain("r0", 1.0)
    replica.accept(lease)
    tell(controller, replica, 2.0)
    (status,) = controller.cluster_state(2.0).replicas
    assert (status.state, status.leased_blocks) == (ReplicaState.DRAINING, lease.num_blocks)
    replica.finish(lease.lease_id)
    tell(controller, replica, 3.0)
    (status,) = controller.cluster_state(3.0).replicas
    assert status.leased_blocks == 0
    controller.check_integrity()


def test_a_restarted_controller_learns_who_drains():
    info = make_info("r0")
    controller = make_controller(seed=1)
    replica = join(controller, info)
    assert tell(controller, replica, 1.0, draining=True) == ReportReply(), "the leader knows"
    (status,) = controller.cluster_state(1.0).replicas
    assert status.state is ReplicaState.DRAINING
    assert isinstance(controller.reserve(make_request(), 1.0), Ticket)


def test_the_next_incarnation_drains_too_unless_it_is_wanted():
    controller = make_controller()
    join(controller, make_info("r0", incarnation="first"))
    controller.drain("r0", 0.0)
    controller.declare_dead("r0", 1.0)
    join(controller, make_info("r0", incarnation="second"), 2.0)
    (status,) = controller.cluster_state(2.0).replicas
    assert status.state is ReplicaState.DRAINING
    controller.declare_dead("r0", 3.0)
    assert not controller.drain("r0", 3.0, draining=False)
    join(controller, make_info("r0", incarnation="third"), 4.0)
    (status,) = controller.cluster_state(4.0).replicas
    assert status.state is ReplicaState.READY


def test_what_waits_for_a_model_that_nobody_serves_any_more_is_refused():
    """Not before a replica has had the time to come back."""
    controller = make_controller()
    join(controller, make_info("r0"), 0.0)
    controller.tick(0.5)
    controller.drain("r0", 1.0)
    assert isinstance(controller.reserve(make_request(request_key="k"), 1.0), Ticket)
    controller.declare_dead("r0", 5.0)
    for now in (6.0, 10.0):
        controller.tick(now)
        assert controller.poll_grants("g", now) == ()
    controller.tick(11.0)
    (refused,) = controller.poll_grants("g", 11.0)
    assert isinstance(refused, Refused)
    assert (refused.request_key, refused.error) == ("k", "Unavailable")
    assert refused.retry_after_s is not None
    controller.check_integrity()


def test_what_waits_goes_on_when_a_replica_comes_back_in_time():
    controller = make_controller()
    join(controller, make_info("r0", incarnation="first"), 0.0)
    controller.tick(0.5)
    controller.drain("r0", 1.0)
    assert isinstance(controller.reserve(make_request(), 1.0), Ticket)
    controller.tick(9.0)
    join(controller, make_info("r1"), 9.5)
    controller.tick(11.0)
    (lease,) = controller.poll_grants("g", 11.0)
    assert isinstance(lease, Lease)
    assert lease.replica_id == "r1"
