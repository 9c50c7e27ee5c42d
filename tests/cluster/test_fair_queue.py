"""Who waits and whose turn it is: rows, turns by block-seconds, and debts."""

import numpy as np
from cluster_factories import make_request

from pagefleet.cluster.admission import Need
from pagefleet.cluster.fair_queue import FairQueue, WaitingRequest
from pagefleet.cluster.prefix_transfer import Source


def add(queue: FairQueue, key: str, tenant: str = "", excluded: int = 0) -> WaitingRequest:
    request = make_request(request_key=key, tenant=tenant, num_tokens=64)
    waiting = WaitingRequest(
        request, Need(5, 16, 16.0), 0.0, 0.0, None, 0.0, duration_s=2.0, excluded=excluded
    )
    queue.add(waiting, 3)
    queue.check_integrity()
    return waiting


def tenants_in_turn(queue: FairQueue) -> set[str]:
    turn = queue.in_turn()
    rows = (queue.waiting if turn is None else turn).nonzero()[0]
    return {queue.at(int(row)).tenant for row in rows}


def test_rows_are_used_again_and_grow_as_they_must() -> None:
    queue = FairQueue()
    first = add(queue, "first")
    queue.hits[first.row, 1] = 7.0
    others = [add(queue, f"q{number}") for number in range(40)]
    assert queue.hits[first.row, 1] == 7.0 and queue.num_rows >= 41
    assert len({waiting.row for waiting in (first, *others)}) == 41
    assert [waiting.request.request_key for waiting in queue][:2] == ["first", "q0"]
    for waiting in others:
        queue.remove(waiting)
    queue.check_integrity()
    assert add(queue, "again").row in {waiting.row for waiting in others}
    assert queue.longest_waiting() is first and queue.num_tokens == 128


def test_nobody_is_barred_for_ever_by_what_was_in_a_slot() -> None:
    queue = FairQueue()
    waiting = add(queue, "q", excluded=0b101)
    every, available = slice(0, 3), np.array([9, 9, 4])
    assert queue.fitting(np.array([waiting.row]), every, available).tolist() == [
        [False, True, False]
    ]
    queue.admit_to(0)
    queue.admit_to(2)
    fits = queue.fitting(np.array([waiting.row]), every, available)
    assert fits.tolist() == [[True, True, False]], "the last has too few blocks"
    queue.shared[waiting.row, 2] = 1
    assert queue.fitting(np.array([waiting.row]), every, available).all()


def test_a_tenant_alone_is_always_in_turn() -> None:
    queue = FairQueue()
    add(queue, "q", "a")
    queue.charge("a", 1000.0)
    assert queue.in_turn() is None


def test_who_has_had_more_waits_for_those_who_have_had_less() -> None:
    queue = FairQueue()
    for number in range(4):
        add(queue, f"a{number}", "a")
        add(queue, f"b{number}", "b")
    queue.learn_cost(10.0)
    assert tenants_in_turn(queue) == {"a", "b"}
    queue.charge("a", 10.0)
    assert tenants_in_turn(queue) == {"b"}
    queue.charge("b", 12.0)
    assert tenants_in_turn(queue) == {"a"}


def test_turns_follow_block_seconds_not_requests() -> None:
    queue, had = FairQueue(), {"small": 0.0, "large": 0.0}
    for tenant in had:
        add(queue, tenant, tenant)
    for _ in range(300):
        tenant = min(tenants_in_turn(queue))
        cost = 1.0 if tenant == "small" else 9.0
        queue.charge(tenant, cost)
        queue.learn_cost(cost)
        had[tenant] += cost
    assert abs(had["small"] - had["large"]) < 20.0


def test_turns_are_not_saved_up_and_debts_are_small() -> None:
    queue = FairQueue()
    add(queue, "a", "a")
    saver = add(queue, "b", "b")
    tenants_in_turn(queue)  # both are owed a turn now
    queue.remove(saver)
    queue.charge("b", 1000.0)  # it took much more than it was thought to
    add(queue, "b again", "b")
    queue.charge("a", 3.0)
    assert tenants_in_turn(queue) == {"b"}, "of that debt no more than one turn was kept"


def test_the_work_that_waits_is_what_was_added() -> None:
    queue = FairQueue()
    first, second = add(queue, "a", "a"), add(queue, "b", "b")
    assert (queue.work.num_tokens, queue.work.block_seconds) == (128, 20.0)
    assert queue.work_of("a") == first.work and queue.num_waiting("b") == 1
    for waiting in (first, second):
        queue.remove(waiting)
    assert queue.work.num_tokens == queue.work.block_seconds == 0
    assert queue.tenants == set()


def test_a_source_is_kept_by_row() -> None:
    queue = FairQueue()
    waiting = add(queue, "q")
    queue.set_source(waiting.row, Source(2, 48.0))
    assert (queue.source_slots[waiting.row], queue.source_tokens[waiting.row]) == (2, 48.0)
