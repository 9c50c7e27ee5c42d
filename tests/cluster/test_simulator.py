"""The simulated cluster: determinism, the cost model by hand, faults, overload and fairness."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from statistics import fmean

import pytest
from rich.console import Console

from pagefleet.cluster.admission import AdmissionConfig
from pagefleet.cluster.config import CommandError
from pagefleet.cluster.measurements import Measurements
from pagefleet.cluster.policies import POLICY_NAMES
from pagefleet.cluster.replay_replica import ReplayCost
from pagefleet.cluster.simulate_command import (
    SimulationOptions,
    parse_fault,
    run_simulation,
    simulate,
)
from pagefleet.cluster.simulation_spec import (
    ClusterSpec,
    Fault,
    FaultKind,
    SimulationSpec,
    TransferCost,
)
from pagefleet.cluster.simulator import Simulation, with_load
from pagefleet.cluster.stepped_replica import SteppedReplica
from pagefleet.cluster.workload import SyntheticSpec, TraceRequest, Workload, synthetic


def make_workload(*rows: tuple[float, int, int, int]) -> Workload:
    """(arrival, prompt tokens, output tokens, first piece) each."""
    requests = tuple(
        TraceRequest(at, tokens, output, ((first, -(-tokens // 512)),))
        for at, tokens, output, first in rows
    )
    return Workload("by hand", requests)


def run(
    workload: Workload, cluster: ClusterSpec, *, check: bool = True, **fields: object
) -> Measurements:
    spec = SimulationSpec(cluster, check=check, **fields)  # pyright: ignore
    return Simulation(spec, workload).run()


def conversations(num_requests: int) -> Workload:
    return synthetic(SyntheticSpec(num_requests, seed=3))


SMALL = ClusterSpec(3, 60, 512, ReplayCost(max_running=8))


def test_the_replay_model_by_hand() -> None:
    workload = make_workload((0.0, 4000, 10, 0), (0.01, 4000, 10, 0), (10.0, 4000, 10, 0))
    measured = run(workload, ClusterSpec(1, 100))
    first = 0.005 + 4000 / 40_000
    # The second waits for the first's prefill, then hits 7 full blocks of its prompt.
    hit = 0.005 + (4000 - 7 * 512) / 40_000
    assert sorted(measured.ttft_s) == pytest.approx(sorted([first, first - 0.01 + hit, hit]))
    assert measured.hit_tokens == 2 * 7 * 512
    assert fmean(measured.tpot_s) == pytest.approx(0.020)


def test_a_request_waits_until_its_blocks_fit() -> None:
    workload = make_workload((0.0, 5120, 100, 0), (0.1, 5120, 100, 100))
    measured = run(workload, ClusterSpec(1, 12))
    prefill = 0.005 + 5120 / 40_000
    assert max(measured.ttft_s) == pytest.approx(prefill + 2.0 - 0.1 + prefill)


def hot_prefix_on_a_busy_replica() -> Workload:
    """20 blocks that one replica has; it is busy for a second when they are asked for again."""
    size = 512
    pieces = [((0, 20),), ((0, 20), (500, 80)), ((0, 20), (900, 2))]
    times = (0.0, 10.0, 10.01)
    return Workload(
        "by hand",
        tuple(
            TraceRequest(at, size * sum(count for _, count in run), 10, run)
            for at, run in zip(times, pieces, strict=True)
        ),
    )


@pytest.mark.parametrize(("bytes_per_s", "is_copied"), [(None, False), (100e9, True), (1e9, False)])
def test_a_hot_prefix_is_copied_where_that_is_cheaper(
    bytes_per_s: float | None, is_copied: bool
) -> None:
    transfer = None if bytes_per_s is None else TransferCost(bytes_per_s)
    workload = hot_prefix_on_a_busy_replica()
    measured = run(workload, ClusterSpec(2, 200), transfer=transfer)
    assert (measured.finished, measured.transfers_failed) == (3, 0)
    assert measured.transfers == is_copied
    copied_s = 0.005 + 20 * 512 * 128 * 1024 / 100e9
    last = copied_s + 0.005 + 2 * 512 / 40_000 if is_copied else 0.005 + 22 * 512 / 40_000
    assert min(measured.ttft_s) == pytest.approx(min(last, 0.005 + 20 * 512 / 40_000))
    assert measured.transferred_tokens == (20 * 512 if is_copied else 0)


def test_a_source_that_froze_costs_a_recompute() -> None:
    workload = hot_prefix_on_a_busy_replica()
    faults = tuple(Fault(FaultKind.FREEZE, 10.005, replica, 3.0) for replica in (0, 1))
    measured = run(workload, ClusterSpec(2, 200), transfer=TransferCost(100e9), faults=faults)
    assert measured.finished == 3


def test_copying_needs_a_cost_model_that_has_it() -> None:
    with pytest.raises(CommandError, match="transfer-bandwidth"):
        run_simulation(SimulationOptions("synthetic", cost_model="steps", transfer_bytes_per_s=1e9))


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_policy_serves_everything(policy: str) -> None:
    workload = with_load(conversations(40), SMALL, 0.8)
    measured = run(workload, SMALL, policy=policy)
    assert (measured.finished, measured.refused, measured.expired) == (40, 0, 0)
    assert measured.hit_tokens > 0


def test_a_run_is_repeatable() -> None:
    workload = with_load(conversations(60), SMALL, 1.0)
    first, second = run(workload, SMALL), run(workload, SMALL)
    assert first.ttft_s == second.ttft_s and first.hit_tokens == second.hit_tokens


def test_the_default_beats_binding_on_arrival_when_blocks_are_scarce() -> None:
    cluster = ClusterSpec(4, 60, 512, ReplayCost(max_running=16))
    workload = with_load(conversations(400), cluster, 1.0)
    default = fmean(run(workload, cluster, check=False).ttft_s)
    others = [
        fmean(run(workload, cluster, check=False, policy=policy).ttft_s)
        for policy in ("round-robin", "min-ttft", "llmd")
    ]
    assert default < min(others)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(FaultKind.CRASH, 3.0, 0, 4.0),
        Fault(FaultKind.FREEZE, 3.0, 1, 3.0),
        Fault(FaultKind.FREEZE, 3.0, 1, 60.0),
        Fault(FaultKind.LOSE_REPORTS, 2.0, 2, 2.0),
        Fault(FaultKind.LOSE_REPORTS, 2.0, 2, 30.0),
        Fault(FaultKind.DELAY_REPORTS, 1.0, 0, 0.5),
    ],
)
@pytest.mark.parametrize("policy", ["default", "llmd"])
def test_every_request_survives_a_fault(fault: Fault, policy: str) -> None:
    workload = with_load(conversations(60), SMALL, 0.4)
    measured = run(workload, SMALL, policy=policy, faults=(fault,))
    assert (measured.finished, measured.refused) == (60, 0)


def overload() -> tuple[Workload, ClusterSpec]:
    cluster = ClusterSpec(2, 100, 512, ReplayCost(max_running=16))
    workload = conversations(300)
    return with_load(workload, cluster, 4.0), cluster


def test_a_bounded_queue_refuses_with_appointments_that_are_kept() -> None:
    workload, cluster = overload()
    admission = AdmissionConfig(max_queue_s=2.0)
    measured = run(workload, cluster, admission=admission, max_retries=20, check=False)
    assert measured.refusals > 50
    assert measured.finished + measured.refused == 300
    assert measured.first_retries_served >= 0.8 * measured.first_retries > 0


def test_deadlines_expire_in_the_queue_and_never_run() -> None:
    workload, cluster = overload()
    measured = run(workload, cluster, deadline_s=1.0, check=False)
    assert measured.expired > 0 and measured.finished + measured.expired == 300
    assert max(measured.ttft_s) < 2.0


def test_a_cluster_of_a_thousand_replicas() -> None:
    cluster = ClusterSpec(1000, 100)
    workload = with_load(conversations(150), cluster, 0.2)
    spec = SimulationSpec(cluster)
    assert Simulation(spec, workload).run().finished == 150


def test_the_steps_model_runs_the_real_scheduler() -> None:
    cluster = ClusterSpec(2, 64, 64, ReplayCost(max_running=8), max_context=8192)
    workload = make_workload(*((0.3 * n, 1000 + 37 * n, 20 + n, 2 * (n % 3)) for n in range(12)))
    for policy in ("default", "min-ttft"):
        spec = SimulationSpec(cluster, policy, report_interval_s=0.05, check=True)
        measured = Simulation(spec, workload, SteppedReplica).run()
        assert (measured.finished, measured.refused) == (12, 0)
        assert measured.hit_tokens > 0
        assert min(measured.tpot_s) == pytest.approx(0.020, rel=0.1)


def test_the_command_writes_rows_and_a_plot(tmp_path: Path) -> None:
    options = SimulationOptions(
        "synthetic",
        ("default", "llmd"),
        replicas=3,
        blocks=200,
        synthetic=SyntheticSpec(60),
        faults=(parse_fault("crash:0:2:3"),),
    )
    console = Console(file=StringIO(), width=120)
    rows_file, plot = tmp_path / "rows.json", tmp_path / "plot.png"
    simulate(options, console=console, json_file=rows_file, png=plot)
    rows = json.loads(rows_file.read_text())
    assert [row["policy"] for row in rows] == ["default", "llmd"]
    assert rows[0].keys() >= {
        "trace", "policy", "replicas", "blocks", "block_size", "load", "hit_rate",
        "ideal_fraction", "ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "ttft_max_s", "tpot_p99_s",
        "goodput", "refused", "imbalance", "preemptions", "decision_us_mean", "decision_us_p99",
    }  # fmt: skip
    assert 0 < rows[0]["hit_rate"] <= 1 and rows[0]["restarts"] == 1
    assert plot.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"trace": "nowhere"}, "no trace"),
        ({"policies": ("nobody",)}, "nobody"),
        ({"cost_model": "guess"}, "cost model"),
        ({"faults": (Fault(FaultKind.CRASH, 1.0, 9, 1.0),)}, "no replica 9"),
    ],
)
def test_the_command_says_what_is_wrong(fields: dict[str, object], problem: str) -> None:
    options = replace(SimulationOptions("synthetic"), **fields)  # pyright: ignore
    with pytest.raises(CommandError, match=problem):
        run_simulation(options)


def test_faults_are_written_as_kind_replica_time_and_duration() -> None:
    assert parse_fault("freeze:2:30:7.5") == Fault(FaultKind.FREEZE, 30.0, 2, 7.5)
    with pytest.raises(CommandError, match="KIND"):
        parse_fault("explode:1:2:3")
