"""The small nouns: queue, ledger, victims, eviction list, route residency."""

import pytest
from scheduler_harness import make_request

from pagefleet.protos.messages import AdmissionClass
from pagefleet.scheduler.content import Content, Tier
from pagefleet.scheduler.eviction_list import EvictionList
from pagefleet.scheduler.lease_ledger import LeaseLedger
from pagefleet.scheduler.preemption import Candidate, VictimChoice
from pagefleet.scheduler.request import Request, Sequence
from pagefleet.scheduler.request_queue import RequestQueue
from pagefleet.scheduler.route_residency import RouteResidency


def make_sequence(arrival: int, **fields: object) -> Sequence:
    request = Request(make_request(**fields), arrival, 0.0, 4096, bytes(16))
    return Sequence(arrival, request, 0, ())


def test_queue_orders_by_class_priority_and_arrival():
    queue = RequestQueue()
    young = make_sequence(4, priority=5)
    sequences = [
        make_sequence(1, admission_class=AdmissionClass.BEST_EFFORT, priority=9),
        make_sequence(2),
        make_sequence(3),
        young,
        make_sequence(5, admission_class=AdmissionClass.GUARANTEED),
    ]
    for sequence in sequences:
        queue.add(sequence)
    queue.check_integrity()
    assert [s.request.arrival for s in queue] == [5, 4, 2, 3, 1]
    queue.remove(young)
    queue.add(young)  # as after a preemption
    assert [s.request.arrival for s in queue] == [5, 4, 2, 3, 1]
    assert queue.num_tokens == 25


def test_ledger_counts_only_guarantees_as_reserved():
    ledger = LeaseLedger()
    ledger.accept("a", 1, 10, is_guaranteed=True)
    ledger.accept("b", 2, 20, is_guaranteed=False)
    assert (ledger.num_reserved, ledger.num_unused) == (10, 30)
    assert ledger.reserved_for_others("a") == 0
    assert ledger.reserved_for_others("b") == 10
    ledger.set_remaining("a", 4)
    ledger.set_remaining("nobody", 4)
    assert ledger.reserved_for_others("b") == 4
    assert [(u.lease_id, u.remaining_blocks) for u in ledger.uses()] == [(1, 4), (2, 20)]
    ledger.check_integrity()
    ledger.close("a")
    ledger.close("a")
    assert ledger.num_reserved == 0
    assert ledger.take_finished() == (1,)
    assert ledger.take_finished() == ()


def candidate(row: int, **fields: object) -> Candidate:
    values = {"class_rank": 1, "priority": 0, "num_preemptions": 0, "cost_ms": 1.0, "arrival": row}
    return Candidate(row=row, **{**values, **fields})


@pytest.fixture
def choice() -> VictimChoice:
    tables = {1: [10, 11], 2: [20, 21], 3: [30, 31, 32, 33], 4: [40, 50], 5: [40, 51]}
    return VictimChoice(tables.__getitem__, lambda block: 2 if block == 40 else 1)


def rows(victims: list[Candidate]) -> list[int]:
    return [victim.row for victim in victims]


def test_victims_come_by_class_priority_and_cost(choice):
    assert rows(choice.choose([candidate(1), candidate(2, class_rank=2)], 1)) == [2]
    assert rows(choice.choose([candidate(1, priority=1), candidate(2, priority=2)], 1)) == [1]
    assert rows(choice.choose([candidate(1, cost_ms=9.0), candidate(2, cost_ms=3.0)], 1)) == [2]
    assert rows(choice.choose([candidate(1), candidate(2)], 1)) == [2]


def test_nobody_is_preempted_twice_before_others_once(choice):
    assert rows(choice.choose([candidate(1), candidate(2, num_preemptions=1)], 1)) == [1]


def test_victims_that_turn_out_unneeded_are_spared(choice):
    victims = choice.choose([candidate(1, cost_ms=1.0), candidate(3, cost_ms=2.0)], 4)
    assert rows(victims) == [3]


def test_shared_block_is_freed_with_its_last_holder(choice):
    assert choice.num_freed([candidate(4)]) == 1
    assert choice.num_freed([candidate(4), candidate(5)]) == 3
    assert rows(choice.choose([candidate(4), candidate(5)], 3)) == [5, 4]


def test_eviction_list_keeps_order_through_removals():
    idle = EvictionList(6)
    idle.append([3, 1, 4, 0])
    idle.append_first([5])
    idle.remove([4])
    assert list(idle) == [5, 3, 1, 0]
    assert 4 not in idle and 3 in idle
    assert idle.count([4, 3, 5, 2]) == 2
    assert idle.pop(2) == [5, 3]
    idle.append([4])
    idle.check_integrity()
    assert list(idle) == [1, 0, 4]
    assert idle.pop(3) == [1, 0, 4]
    idle.append_first([2, 3])
    assert list(idle) == [3, 2]
    idle.check_integrity()


def make_contents(count: int, *tiers: Tier) -> list[Content]:
    contents = [Content() for _ in range(count)]
    for content in contents:
        for tier in tiers:
            content.blocks[tier] = 0
    return contents


def test_stride_is_resident_where_all_its_blocks_are():
    routes = RouteResidency()
    contents = make_contents(2, Tier.DEVICE)
    contents[0].blocks[Tier.DEVICE] = None
    routes.add(b"a" * 16, contents)
    assert routes.take_events().stored_device == ()
    routes.arrived(contents[0], Tier.DEVICE)
    assert routes.take_events().stored_device == (b"a" * 16,)
    assert routes.digests == (int.from_bytes(b"a" * 16), 0)
    routes.left(contents[1], Tier.DEVICE)
    assert routes.take_events().removed_device == (b"a" * 16,)
    assert routes.digests == (0, 0)


def test_a_stride_is_reported_once_however_often_it_is_found():
    routes = RouteResidency()
    contents = make_contents(2, Tier.DEVICE)
    routes.add(b"a" * 16, contents)
    routes.add(b"a" * 16, contents)
    routes.take_events()
    assert routes.digests == (int.from_bytes(b"a" * 16), 0)


def test_what_came_and_went_between_reports_is_not_reported():
    routes = RouteResidency()
    contents = make_contents(1, Tier.DEVICE)
    routes.add(b"a" * 16, contents)
    routes.left(contents[0], Tier.DEVICE)
    events = routes.take_events()
    assert not events.stored_device and not events.removed_device


def test_retired_content_takes_its_strides_along():
    routes = RouteResidency()
    first, last = make_contents(2, Tier.DEVICE)
    routes.add(b"a" * 16, [last, first])
    routes.retire(last)
    assert not first.strides and last.strides is None


def test_snapshot_holds_everything_and_settles_the_events():
    routes = RouteResidency()
    routes.add(b"a" * 16, make_contents(1, Tier.DEVICE, Tier.HOST))
    snapshot = routes.snapshot()
    assert snapshot.stored_device == snapshot.stored_host == (b"a" * 16,)
    assert routes.take_events().stored_device == ()
