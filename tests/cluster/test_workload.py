"""Traces and synthetic workloads."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from pagefleet.cluster.workload import (
    SyntheticSpec,
    TraceRequest,
    Workload,
    load_trace,
    synthetic,
)


def write_trace(path: Path, rows: list[dict[str, object]]) -> Path:
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def test_pieces_stand_for_their_tokens_and_the_last_may_be_partial() -> None:
    request = TraceRequest(0.0, 1100, 5, ((7, 1), (20, 2)))
    prompt = request.prompt()
    assert len(prompt) == 1100
    assert prompt[:512].tolist() == list(range(7 * 512, 8 * 512))
    assert prompt[512:1024].tolist() == list(range(20 * 512, 21 * 512))


def test_equal_pieces_give_equal_tokens(tmp_path: Path) -> None:
    rows = [
        {"t": 0, "in": 600, "out": 1, "h": [[3, 2]]},
        {"t": 100, "in": 1000, "out": 1, "h": [[3, 1], [9, 1]]},
    ]
    first, second = load_trace(write_trace(tmp_path / "t.jsonl.gz", rows)).requests
    assert np.array_equal(first.prompt()[:512], second.prompt()[:512])
    assert not np.array_equal(first.prompt()[512:600], second.prompt()[512:600])


def test_rows_without_pieces_share_nothing(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"t": 50 * n, "in": 700, "out": 1} for n in range(3)]
    workload = load_trace(write_trace(tmp_path / "t.jsonl.gz", rows))
    assert workload.ideal_hit_rate() == 0.0


def test_huge_piece_ids_are_renumbered(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"t": 0, "in": 600, "out": 1, "h": [[10**12, 2]]},
        {"t": 70, "in": 600, "out": 1, "h": [[10**12, 2]]},
    ]
    workload = load_trace(write_trace(tmp_path / "t.jsonl.gz", rows))
    assert workload.ideal_hit_rate() == pytest.approx(599 / 1200)


def test_three_second_steps_are_smeared_and_others_are_not(tmp_path: Path) -> None:
    stepped: list[dict[str, object]] = [
        {"t": 3000 * (n // 5), "in": 9, "out": 1} for n in range(20)
    ]
    arrivals = [
        request.arrival_s
        for request in load_trace(write_trace(tmp_path / "a.gz", stepped)).requests
    ]
    assert arrivals == sorted(arrivals) and len(set(arrivals)) == 20
    assert all(3 * (n // 5) <= at < 3 * (n // 5) + 3 for n, at in enumerate(arrivals))
    exact: list[dict[str, object]] = [
        {"t": 1234, "in": 9, "out": 1},
        {"t": 1999, "in": 9, "out": 1},
    ]
    requests = load_trace(write_trace(tmp_path / "b.gz", exact)).requests
    assert [request.arrival_s for request in requests] == [1.234, 1.999]


def test_the_rate_is_set_by_compressing_time() -> None:
    requests = tuple(TraceRequest(float(n), 1000, 1, ((2 * n, 2),)) for n in range(11))
    faster = Workload("w", requests).at_rate(5500.0)
    assert faster.duration_s == pytest.approx(2.0)
    assert faster.prompt_tokens_per_s == pytest.approx(5500.0)


def test_an_empty_trace_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    with pytest.raises(ValueError, match="no request"):
        load_trace(path)


def test_synthetic_conversations_share_prefixes_and_repeat_by_seed() -> None:
    spec = SyntheticSpec(num_requests=200, tenants=("a", "b"))
    workload = synthetic(spec)
    assert len(workload.requests) == 200
    assert workload.ideal_hit_rate() > 0.3
    assert synthetic(spec) == workload
    assert {request.tenant for request in workload.requests} == {"a", "b"}
