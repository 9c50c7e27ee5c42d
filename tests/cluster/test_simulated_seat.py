"""Incarnations of one seat, and what becomes of a copy between two."""

import pytest

from pagefleet.cluster.replay_replica import ReplayReplica, make_request
from pagefleet.cluster.simulated_seat import Seat
from pagefleet.cluster.simulation_spec import ClusterSpec, SimulationSpec, TransferCost
from pagefleet.cluster.workload import TraceRequest
from pagefleet.protos.messages import CacheIdentity, Lease, PrefixTransfer, TransferPeer
from pagefleet.scheduler.block_hash import root_hash

IDENTITY = CacheIdentity("simulated", 1, "bfloat16", 512)
COST = TransferCost(bytes_per_s=5_000_000.0, kv_bytes_per_token=1000, overhead_s=0.5)
SPEC = SimulationSpec(ClusterSpec(2, 100), transfer=COST)
REQUEST = make_request("q", TraceRequest(0.0, 4096, 1, ((0, 8),)), root_hash(IDENTITY), 512)


def make_seat(number: int) -> Seat:
    seat = Seat(number)
    seat.begin(SPEC, IDENTITY, ReplayReplica)
    return seat


def fill(seat: Seat) -> None:
    """The seat's replica has computed the prompt of REQUEST: 7 blocks of use, as its last token is
    always computed."""
    assert seat.replica is not None
    request = make_request("fill", REQUEST.trace, root_hash(IDENTITY), 512)
    request.lease = Lease(1, "fill", 1, seat.name, "life-1", "", "", 9, 0, 10.0)
    assert seat.replica.submit(request, 0.0)
    now, finished = 0.0, []
    while not finished:
        happenings, finished = seat.replica.advance(now)
        now = max([now, *(happening.at for happening in happenings)])


def offer(seat: Seat, timeout_s: float = 5.0, incarnation: str = "life-1") -> PrefixTransfer:
    return PrefixTransfer(TransferPeer(seat.name, incarnation, (seat.name,)), 4096, timeout_s)


def test_incarnations_follow_one_another() -> None:
    seat = make_seat(3)
    seat.frozen_until = 9.0
    info = seat.begin(SPEC, IDENTITY, ReplayReplica)
    assert (info.replica_id, info.incarnation) == ("replica-3", "life-2")
    assert seat.frozen_until == 0.0
    assert info.block_bytes == 512_000 and info.actors == ("replica-3",)


def test_a_copy_takes_its_overhead_and_its_bytes_and_both_links() -> None:
    origin, seat = make_seat(0), make_seat(1)
    fill(origin)
    fetch, num_tokens = seat.fetch(REQUEST, offer(origin), origin, COST, 10.0)
    assert (fetch.num_blocks, num_tokens) == (7, 7 * 512)
    assert fetch.ready_at == 10.0 + 0.5 + 0.7168
    assert origin.link_busy_until == seat.link_busy_until == fetch.ready_at
    later, _ = make_seat(2).fetch(REQUEST, offer(origin), origin, COST, 10.0)
    assert later.ready_at == pytest.approx(fetch.ready_at + 0.5 + 0.7168)


def test_a_copy_fails_where_it_takes_too_long_or_its_source_is_not_what_it_was() -> None:
    origin, seat = make_seat(0), make_seat(1)
    fill(origin)
    slow, num_tokens = seat.fetch(REQUEST, offer(origin, timeout_s=1.0), origin, COST, 10.0)
    assert (slow.ready_at, slow.num_blocks, num_tokens) == (11.0, 0, 0)
    other = offer(origin, incarnation="life-9")
    assert seat.fetch(REQUEST, other, origin, COST, 10.0)[1] == 0
    origin.frozen_until = 11.0
    assert seat.fetch(REQUEST, offer(origin), origin, COST, 10.0)[1] == 0
    assert seat.fetch(REQUEST, offer(origin), origin, COST, 11.0)[1] == 7 * 512
