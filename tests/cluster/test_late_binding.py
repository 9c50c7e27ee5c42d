"""The default policy's choice: which request goes where, who waits, and who is held a replica."""

import numpy as np
import pytest
from cluster_factories import make_columns, make_request

from pagefleet.cluster.admission import Need
from pagefleet.cluster.binding_costs import Contenders
from pagefleet.cluster.fair_queue import FairQueue, WaitingRequest
from pagefleet.cluster.late_binding import LateBinding
from pagefleet.cluster.replica_view import ReplicaColumns


def make_queue(
    *hits: list[float], needs: list[int] | None = None, arrived: list[float] | None = None
) -> FairQueue:
    """One waiting request of 100 tokens per list of hits by slot."""
    queue = FairQueue()
    for number, row_hits in enumerate(hits):
        need = Need((needs or [10] * len(hits))[number], 10, 10.0)
        at = (arrived or [0.0] * len(hits))[number]
        request = make_request(request_key=f"q{number}", num_tokens=100)
        waiting = WaitingRequest(request, need, at, at, None, 0.0, duration_s=1.0)
        row = queue.add(waiting, len(row_hits))
        queue.hits[row, : len(row_hits)] = row_hits
    return queue


def choose(queue: FairQueue, columns: ReplicaColumns, now: float = 0.0) -> tuple[str, int] | None:
    pair = LateBinding().choose(queue, columns, now, lambda slot: [(now + 5.0, 100)])
    return None if pair is None else (queue.at(pair[0]).request.request_key, pair[1])


def test_the_least_prefill_goes_first_to_where_its_prefix_is() -> None:
    queue = make_queue([0.0, 0.0], [0.0, 80.0])
    assert choose(queue, make_columns(2)) == ("q1", 1)


def test_only_where_its_blocks_fit() -> None:
    columns = make_columns(2)
    columns.set_available(1, 9)
    assert choose(make_queue([0.0, 80.0]), columns) == ("q0", 0)
    columns.set_available(0, 9)
    assert choose(make_queue([0.0, 80.0]), columns) is None


def test_it_waits_for_a_busy_replica_that_would_still_be_sooner() -> None:
    columns = make_columns(2, work_end=[0.0, 0.05])
    assert choose(make_queue([0.0, 99.0]), columns) is None
    columns.work_end[1] = 5.0
    assert choose(make_queue([0.0, 99.0]), columns) == ("q0", 0)


def test_nobody_waits_for_long_for_a_replica_that_may_never_have_room() -> None:
    columns = make_columns(2)
    columns.set_available(1, 0)
    queue = make_queue([0.0, 99.0], arrived=[0.0])
    columns.work_end[1] = 4.05  # busy again and again
    assert choose(queue, columns, now=4.0) is None
    columns.work_end[1] = 5.15
    assert choose(queue, columns, now=5.1) == ("q0", 0)


def test_nothing_starts_where_another_prefill_runs() -> None:
    assert choose(make_queue([0.0]), make_columns(1, work_end=[1.0])) is None


def test_the_head_start_of_waiting_outgrows_any_prefix() -> None:
    queue = make_queue([0.0], [99.0], arrived=[0.0, 8.0])
    assert choose(queue, make_columns(1), now=8.0) == ("q0", 0)


def test_who_was_passed_over_for_long_gets_a_replica_held() -> None:
    queue = make_queue([0.0], [0.0], needs=[90, 5], arrived=[0.0, 59.9])
    columns = make_columns(1)
    columns.set_available(0, 50)
    # 5 s until its blocks are there: what ends before that may go first, nothing else.
    assert choose(queue, columns, now=60.0) == ("q1", 0)
    queue.durations[:] = 10.0
    assert choose(queue, columns, now=60.0) is None
    columns.set_available(0, 95)
    assert choose(queue, columns, now=60.0) == ("q0", 0)


@pytest.mark.parametrize("seed", range(20))
def test_a_newcomer_alone_goes_where_the_queue_would_send_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 12))
    columns = make_columns(
        count,
        work_end=(rng.random(count) * rng.integers(0, 2, count) * 0.2).tolist(),
        open=(rng.random(count) < 0.9).tolist(),
        load_token_s=[1e-5] * count,
    )
    for slot in range(count):
        columns.set_available(slot, int(rng.integers(0, 101)))
    hits = (100 * rng.random(count) * rng.integers(0, 2, count)).round()
    on_host = ((99 - hits) * rng.random(count) * rng.integers(0, 2, count)).round()
    queue = make_queue(hits.tolist())
    queue.has_host_hits = True
    queue.host_hits[0, :count] = on_host
    pair = LateBinding().choose(queue, columns, 0.0, lambda slot: [])
    newcomer = Contenders(100.0, 10, 1.0, hits, on_host)
    fits = columns.available[:count] >= 10
    slot = LateBinding().choose_newcomer(newcomer, fits, columns, 0.0)
    assert slot == (None if pair is None else pair[1])


def test_of_many_replicas_the_holder_and_the_emptiest_are_found() -> None:
    columns = make_columns(200)
    for slot in range(200):
        columns.set_available(slot, 50 if slot != 150 else 60)
    hits = [10.0] * 200
    hits[123] = 80.0
    assert choose(make_queue(hits), columns) == ("q0", 123)
    assert choose(make_queue([10.0] * 200), columns) == ("q0", 150)
