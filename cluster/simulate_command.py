"""`pagefleet simulate`: flags become simulation runs, runs become a table, JSON and a plot.

Knows which cost models there are and where traces may lie. Simulates nothing itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from .admission import AdmissionConfig
from .binding_costs import LateBindingConfig
from .config import CommandError
from .measurements import Measurements
from .policies import POLICY_NAMES
from .replay_replica import ReplayCost, ReplayReplica
from .simulated_seat import MakeReplica
from .simulation_report import (
    SimulationRow,
    make_row,
    simulation_table,
    write_plots,
    write_rows,
)
from .simulation_spec import ClusterSpec, Fault, FaultKind, SimulationSpec, TransferCost
from .simulator import Simulation, with_load
from .stepped_replica import SteppedReplica
from .workload import SyntheticSpec, Workload, load_trace, synthetic

SYNTHETIC = "synthetic"
COST_MODELS: dict[str, MakeReplica] = {"replay": ReplayReplica, "steps": SteppedReplica}
_REPORT_INTERVAL_S = {"replay": 0.0, "steps": 0.05}


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """One call of the command. trace: a file, or `synthetic`.

    replicas, blocks and block_size: of the simulated cluster. load: prompt tokens per second over
    what all replicas can prefill; None = as fast as the trace is. requests: only the first so
    many. cost_model: `replay` or `steps`; prefill_rate, prefill_overhead_s, token_s (per token, or
    per step) and max_running are its constants. transfer_bytes_per_s: at which replicas copy KV
    blocks from each other, of so many bytes per token; None = they do not; `replay` only.
    """

    trace: str
    policies: tuple[str, ...] = ("default",)
    replicas: int = 8
    blocks: int = 3906
    block_size: int = 512
    load: float | None = 1.0
    cost_model: str = "replay"
    prefill_rate: float = 40_000.0
    prefill_overhead_s: float = 0.005
    token_s: float = 0.020
    max_running: int = 64
    requests: int | None = None
    slo_ttft_s: float = 2.0
    slo_tpot_s: float = 0.050
    deadline_s: float | None = None
    max_queue_s: float | None = None
    max_retries: int = 3
    faults: tuple[Fault, ...] = ()
    seed: int = 0
    transfer_bytes_per_s: float | None = None
    kv_bytes_per_token: int = 128 * 1024
    synthetic: SyntheticSpec = field(default_factory=SyntheticSpec)
    late_binding: LateBindingConfig = field(default_factory=LateBindingConfig)


def parse_fault(text: str) -> Fault:
    """`kind:replica:at_s:duration_s`, like `crash:0:30:10`."""
    try:
        kind, replica, at_s, duration_s = text.split(":")
        return Fault(FaultKind(kind), float(at_s), int(replica), float(duration_s))
    except ValueError as error:
        kinds = ", ".join(FaultKind)
        raise CommandError(
            f"fault {text!r} is not KIND:REPLICA:AT:DURATION with KIND of {kinds}"
        ) from error


def run_simulation(
    options: SimulationOptions, progress: Callable[[str, int, int], None] | None = None
) -> list[SimulationRow]:
    """One row per policy. progress: told (policy, requests done, of how many)."""
    return [row for row, _ in run_with_measurements(options, progress)]


def run_with_measurements(
    options: SimulationOptions, progress: Callable[[str, int, int], None] | None = None
) -> list[tuple[SimulationRow, Measurements]]:
    """The rows with everything that was measured, for plots."""
    _check(options)
    workload, cluster = _workload(options), _cluster(options)
    if options.load is not None:
        workload = with_load(workload, cluster, options.load)
    ideal = workload.ideal_hit_rate()
    runs: list[tuple[SimulationRow, Measurements]] = []
    for policy in options.policies:
        measured = _run_policy(options, policy, workload, cluster, progress)
        row = make_row(
            measured,
            trace=workload.name,
            policy=policy,
            replicas=options.replicas,
            blocks=options.blocks,
            block_size=options.block_size,
            load=_load(options, workload, cluster),
            ideal_hit_rate=ideal,
            slo_ttft_s=options.slo_ttft_s,
            slo_tpot_s=options.slo_tpot_s,
        )
        runs.append((row, measured))
    return runs


def simulate(
    options: SimulationOptions,
    *,
    console: Console,
    json_file: Path | None = None,
    png: Path | None = None,
) -> None:
    """Run with a progress bar; print the table, write what was asked for."""
    with Progress(console=console, transient=True) as bars:
        tasks = {policy: bars.add_task(policy, total=None) for policy in options.policies}

        def advance(policy: str, done: int, total: int) -> None:
            bars.update(tasks[policy], completed=done, total=total)

        runs = run_with_measurements(options, advance)
    rows = [row for row, _ in runs]
    console.print(simulation_table(rows))
    if json_file is not None:
        write_rows(rows, json_file)
    if png is not None:
        write_plots(runs, png)
        console.print(f"plot: {png}", highlight=False, soft_wrap=True)


def _check(options: SimulationOptions) -> None:
    unknown = sorted(set(options.policies) - set(POLICY_NAMES))
    if unknown:
        raise CommandError(f"policy {unknown[0]!r} is not one of {', '.join(POLICY_NAMES)}")
    if options.cost_model not in COST_MODELS:
        known = ", ".join(COST_MODELS)
        raise CommandError(f"cost model {options.cost_model!r} is not one of {known}")
    if options.transfer_bytes_per_s is not None and options.cost_model != "replay":
        raise CommandError("--transfer-bandwidth needs --cost-model replay")
    for fault in options.faults:
        if not 0 <= fault.replica < options.replicas:
            raise CommandError(f"there is no replica {fault.replica} to fail")


def _workload(options: SimulationOptions) -> Workload:
    if options.trace == SYNTHETIC:
        workload = synthetic(options.synthetic)
    else:
        try:
            workload = load_trace(_find_trace(options.trace), seed=options.seed)
        except (ValueError, KeyError) as error:
            raise CommandError(f"{options.trace} is not a trace: {error}") from error
    if options.requests is not None:
        workload = Workload(workload.name, workload.requests[: options.requests])
    return workload


def _find_trace(name: str) -> Path:
    """A path, or the name of a trace in a `shared/traces` folder here or one level up."""
    candidates: Sequence[Path] = [Path(name)]
    for folder in (Path("shared/traces"), Path("../shared/traces")):
        candidates = [*candidates, folder / f"{name}.jsonl.gz", folder / name]
    for path in candidates:
        if path.is_file():
            return path
    raise CommandError(f"there is no trace {name!r}")


def _cluster(options: SimulationOptions) -> ClusterSpec:
    cost = ReplayCost(
        options.prefill_rate, options.prefill_overhead_s, options.token_s, options.max_running
    )
    return ClusterSpec(options.replicas, options.blocks, options.block_size, cost)


def _load(options: SimulationOptions, workload: Workload, cluster: ClusterSpec) -> float:
    if options.load is not None:
        return options.load
    capacity = cluster.num_replicas * cluster.cost.prefill_tokens_per_s
    return workload.prompt_tokens_per_s / capacity


def _run_policy(
    options: SimulationOptions,
    policy: str,
    workload: Workload,
    cluster: ClusterSpec,
    progress: Callable[[str, int, int], None] | None,
) -> Measurements:
    spec = SimulationSpec(
        cluster,
        policy,
        AdmissionConfig(
            max_queued_requests=1_000_000,
            max_queued_tokens=1 << 60,
            max_queue_s=options.max_queue_s,
        ),
        options.late_binding,
        options.faults,
        options.deadline_s,
        options.max_retries,
        report_interval_s=_REPORT_INTERVAL_S[options.cost_model],
        seed=options.seed,
        transfer=(
            None
            if options.transfer_bytes_per_s is None
            else TransferCost(options.transfer_bytes_per_s, options.kv_bytes_per_token)
        ),
    )
    done = 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        if progress is not None and (done % 64 == 0 or done == len(workload.requests)):
            progress(policy, done, len(workload.requests))

    return Simulation(spec, workload, COST_MODELS[options.cost_model], count).run()
