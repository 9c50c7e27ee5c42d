"""What a finished request adds to the means, and what one that never ran does not."""

import pytest

from pagefleet.cluster.measurements import Measurements
from pagefleet.cluster.replay_replica import SimulatedRequest, make_request
from pagefleet.cluster.workload import TraceRequest
from pagefleet.protos.messages import CacheIdentity
from pagefleet.scheduler.block_hash import root_hash

ROOT = root_hash(CacheIdentity("simulated", 1, "float32", 16))


def make_finished(first_token_s: float | None, **fields: object) -> SimulatedRequest:
    trace = TraceRequest(1.0, 100, 20, ((0, 1),), tenant="t")
    request = make_request("q", trace, ROOT, 16)
    request.first_token_s = first_token_s
    request.finished_s = None if first_token_s is None else first_token_s + 2.0
    for name, value in fields.items():
        setattr(request, name, value)
    return request


def test_times_hits_and_block_seconds_are_summed() -> None:
    measured = Measurements()
    for _ in range(2):
        measured.note_finished(make_finished(1.5, hit_tokens=32), 16)
    assert measured.finished == 2
    assert measured.ttft_s == [0.5, 0.5] and measured.tpot_s == pytest.approx([0.1, 0.1])
    assert (measured.hit_tokens, measured.prompt_tokens) == (64, 200)
    assert measured.tenant_block_s == {"t": pytest.approx(2 * 8 * 2.0)}  # 120 tokens: 8 blocks


def test_a_kept_appointment_counts_whether_it_was_served_or_not() -> None:
    measured = Measurements()
    measured.note_finished(make_finished(1.5, num_refusals=1, first_retry_served=True), 16)
    measured.note_finished(make_finished(None, num_refusals=2, first_retry_served=False), 16)
    measured.note_finished(make_finished(None, num_refusals=1, first_retry_served=None), 16)
    assert (measured.first_retries, measured.first_retries_served) == (2, 1)
    assert measured.finished == 1 and len(measured.ttft_s) == 1


def test_incarnations_of_one_replica_add_up() -> None:
    measured = Measurements()
    measured.note_ended("replica-0", 100, 1)
    measured.note_ended("replica-0", 50, 2)
    measured.note_ended("replica-1", 10, 0)
    assert measured.computed_tokens == {"replica-0": 150, "replica-1": 10}
    assert measured.preemptions == 3
