"""How many replicas a model needs; what the controller counts; requests held for the first."""

from dataclasses import replace

import pytest
from cluster_factories import (
    join,
    make_controller,
    make_info,
    make_request,
    tell,
)

from pagefleet.cluster.admission import AdmissionConfig
from pagefleet.cluster.autoscaling import (
    BlockDemand,
    block_demand,
    from_stats,
    newest,
    replicas_wanted,
    to_stats,
)
from pagefleet.cluster.controller import Controller
from pagefleet.protos.messages import AdmissionClass, Lease, Refused, Ticket

IDLE = BlockDemand(free_blocks=200.0, replica_blocks=100.0, num_replicas=2.0, startup_s=60.0)
BUSY = replace(IDLE, num_requests=4.0)
HOLDS = AdmissionConfig(hold_s=600.0)


def demand_of(controller: Controller, now: float, startup_s: float = 60.0) -> BlockDemand:
    pools = controller.pools_of("m")
    return block_demand(pools, now, startup_s=startup_s, epoch=1.0, sequence=1)


# The decision


@pytest.mark.parametrize(
    ("demand", "wanted"),
    [
        (IDLE, 0),
        (BUSY, 1),  # the last one stays while anybody runs
        (replace(BUSY, growth_blocks=80.0), 2),  # 120 spare, but a quarter more than one is asked
        (replace(BUSY, growth_blocks=70.0), 1),
        (replace(BUSY, queued_blocks=201.0), 3),
        (replace(BUSY, queued_blocks=301.0), 4),
        (replace(BUSY, queued_blocks=301.0, releasing_blocks=150.0), 2),  # they come in time
        (replace(BUSY, queued_blocks=150.0, growth_blocks=151.0), 4),
        (replace(BUSY, num_replicas=0.0, free_blocks=0.0, queued_blocks=130.0), 2),
        (BlockDemand(num_requests=1.0), 1),  # of a size that nobody has seen yet
        (replace(BUSY, queued_blocks=50.0, wait_s=61.0), 3),  # it is not blocks that it waits for
    ],
)
def test_the_number_follows_the_deficit(demand: BlockDemand, wanted: int) -> None:
    assert replicas_wanted(demand) == wanted


def test_the_latest_count_of_the_latest_controller_is_the_one() -> None:
    counts = [
        BlockDemand(epoch=2.0, sequence=1.0),
        BlockDemand(epoch=1.0, sequence=99.0),  # a frozen predecessor that woke up
        BlockDemand(epoch=2.0, sequence=5.0),
    ]
    assert newest(counts) == counts[2]
    assert newest([]) is None


def test_demands_travel_as_plain_floats() -> None:
    stats = to_stats({"org/a": BUSY, "b": IDLE})
    assert {type(value) for value in stats.values()} == {float}
    assert from_stats(stats | {"ongoing": 3.0, "x/unknown": 1.0}) == {"org/a": BUSY, "b": IDLE}


# What the controller counts


def test_growth_is_what_leases_may_still_take_and_the_queue_is_what_waits() -> None:
    controller = make_controller()
    replica = join(controller, make_info(startup_s=7.0))
    lease = controller.reserve(make_request(num_tokens=1280, max_tokens=160), 1.0)  # 90 blocks
    assert isinstance(lease, Lease)
    replica.accept(lease)
    replica.take(lease.lease_id, 80)
    tell(controller, replica, 1.1)
    assert isinstance(controller.reserve(make_request(num_tokens=320, max_tokens=16), 1.2), Ticket)
    demand = demand_of(controller, 1.2)
    assert demand == BlockDemand(
        epoch=1.0,
        sequence=1.0,
        queued_blocks=21.0,
        growth_blocks=10.0,
        free_blocks=20.0,
        releasing_blocks=demand.releasing_blocks,
        replica_blocks=100.0,
        num_requests=2.0,
        num_replicas=1.0,
        wait_s=demand.wait_s,
        startup_s=7.0,
    )
    # 90 end in 1.28 s of prefill and 160 tokens; who comes at this rate takes some of them
    assert demand.releasing_blocks == pytest.approx(90 - 7 * (90 + 21) / 30, rel=0.02)
    assert demand.deficit == 21 + 10 - 20 - demand.releasing_blocks


def test_what_ends_later_than_a_start_is_not_waited_for() -> None:
    controller = make_controller()
    join(controller, make_info())
    controller.reserve(make_request(num_tokens=64, max_tokens=1000), 1.0)  # 10 ms a token
    assert demand_of(controller, 1.0, startup_s=1.0).releasing_blocks == 0
    later = demand_of(controller, 1.0, startup_s=20.0)
    assert later.releasing_blocks == pytest.approx(67 - 20 * 67 / 30)


def test_where_as_much_comes_as_ends_nothing_is_released() -> None:
    """A steady stream of short requests: each takes the place of one that ends."""
    controller = make_controller()
    replica = join(controller, make_info())
    now = 0.0
    for _ in range(400):
        now += 0.1
        lease = controller.reserve(make_request(num_tokens=16, max_tokens=16), now)
        assert isinstance(lease, Lease)
        replica.accept(lease)
        tell(controller, replica, now)
        replica.finish(lease.lease_id)
    assert demand_of(controller, now, startup_s=10.0).releasing_blocks == 0.0


def test_what_was_preempted_at_a_replica_waits_for_blocks_too() -> None:
    controller = make_controller()
    replica = join(controller, make_info())
    tell(controller, replica, 1.0, num_waiting=3, waiting_prefill_tokens=1000)
    assert demand_of(controller, 1.0).queued_blocks == 63.0
    tell(controller, replica, 1.1, num_waiting=0, waiting_prefill_tokens=1000)
    assert demand_of(controller, 1.1).queued_blocks == 0.0, "a long prompt that has its blocks"


def test_a_draining_replica_counts_for_nothing() -> None:
    controller = make_controller()
    join(controller, make_info("a"))
    join(controller, make_info("b"))
    controller.drain("a", 1.0)
    demand = demand_of(controller, 1.0)
    assert (demand.num_replicas, demand.free_blocks) == (1.0, 100.0)


def test_c26_after_a_storm_of_cancels_the_target_is_the_least() -> None:
    """Nothing is counted by increments that a cancel could leave behind."""
    controller = make_controller()
    replica = join(controller, make_info())
    for number in range(200):
        answer = controller.reserve(
            make_request(request_key=f"s{number}", num_tokens=160, max_tokens=160), 1.0
        )
        if isinstance(answer, Lease) and number % 3:  # some reach their leader and are cancelled
            replica.accept(answer)
            replica.take(answer.lease_id, number % 7)
        if number % 5 == 0:
            tell(controller, replica, 1.0)
        controller.release(f"s{number}", 1, 1.0)
    for lease_id in list(replica.used):
        replica.finish(lease_id)
    tell(controller, replica, 2.0)
    controller.tick(20.0)
    tell(controller, replica, 20.0)
    demand = demand_of(controller, 20.0)
    assert (demand.num_requests, demand.queued_blocks, demand.growth_blocks) == (0.0, 0.0, 0.0)
    assert replicas_wanted(demand) == 0
    controller.check_integrity()


# Nobody is there


def test_with_no_replica_left_a_request_is_held_and_then_served() -> None:
    controller = make_controller(admission=HOLDS)
    join(controller, make_info("a"))
    controller.declare_dead("a", 1.0)
    (card,) = controller.model_cards()
    assert card.model == "m"
    assert isinstance(controller.reserve(make_request(request_key="q"), 100.0), Ticket)
    controller.heartbeat("g", 160.0)
    controller.tick(160.0)
    demand = demand_of(controller, 160.0)
    assert (demand.num_requests, demand.queued_blocks, demand.num_replicas) == (1.0, 5.0, 0.0)
    assert replicas_wanted(demand) == 1
    join(controller, make_info("b"), 170.0)
    (grant,) = controller.poll_grants("g", 170.0)
    assert isinstance(grant, Lease) and grant.replica_id == "b"
    controller.check_integrity()


def test_who_is_held_in_vain_is_told_and_others_go_on_waiting() -> None:
    controller = make_controller(admission=HOLDS)
    join(controller, make_info("a"))
    controller.declare_dead("a", 1.0)
    controller.tick(1.0)
    controller.reserve(make_request(request_key="early"), 100.0)
    controller.reserve(make_request(request_key="late"), 400.0)
    controller.heartbeat("g", 700.0)
    controller.tick(701.0)
    (refusal,) = controller.poll_grants("g", 701.0)
    assert isinstance(refusal, Refused)
    assert (refusal.request_key, refusal.error) == ("early", "Unavailable")
    assert demand_of(controller, 701.0).num_requests == 1.0


def test_without_replicas_on_demand_a_newcomer_is_refused_at_once() -> None:
    controller = make_controller()
    join(controller, make_info("a"))
    controller.declare_dead("a", 1.0)
    assert controller.model_cards() == ()
    answer = controller.reserve(make_request(), 2.0)
    assert isinstance(answer, Refused) and answer.error == "Unavailable"


@pytest.mark.parametrize("admission_class", list(AdmissionClass))
def test_a_held_request_must_fit_the_replicas_there_were(admission_class: AdmissionClass) -> None:
    controller = make_controller(admission=HOLDS)
    join(controller, make_info("a"))
    controller.declare_dead("a", 1.0)
    request = make_request(num_tokens=4000, max_tokens=10, admission_class=admission_class)
    answer = controller.reserve(request, 2.0)
    assert isinstance(answer, Refused) and answer.error == "InvalidArgument"
