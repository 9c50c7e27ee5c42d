"""Simulated runs of routing policies, kept in a folder so that a benchmark can be resumed.

A run is a policy on a trace, replayed by a cluster. A result is found again only by the same
settings and the same code of the policy and the simulated replica. Judges nothing.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from pagefleet import cluster
from pagefleet.cluster.simulate_command import SimulationOptions, run_simulation
from pagefleet.cluster.simulation_report import SimulationRow

BLOCK_TOKENS = 512  # the unit in which cells state their pools

_EVERY_POLICY = (
    "replay_replica.py",
    "simulated_seat.py",
    "simulator.py",
    "measurements.py",
    "workload.py",
)
_DEFAULT = (
    "late_binding.py",
    "binding_costs.py",
    "fair_queue.py",
    "forecast.py",
    "grants.py",
    "model_pool.py",
)
_BASELINES = ("routing_baselines.py",)


@dataclass(frozen=True, slots=True)
class Run:
    """One policy in one cell. blocks: per replica, in units of 512 tokens whatever the size."""

    trace: Path
    replicas: int
    blocks: int
    block_size: int
    load: float | None
    requests: int | None
    policy: str

    @property
    def cell(self) -> str:
        """Where it runs, without the policy."""
        return f"{trace_name(self.trace)} {self.blocks}x{self.replicas}"

    def options(self) -> SimulationOptions:
        """What `pagefleet simulate` would be given."""
        return SimulationOptions(
            str(self.trace),
            (self.policy,),
            self.replicas,
            self.blocks * BLOCK_TOKENS // self.block_size,
            self.block_size,
            self.load,
            requests=self.requests,
        )


def trace_name(path: Path) -> str:
    """The name by which tables call a trace."""
    return path.name.removesuffix(".gz").removesuffix(".jsonl").removeprefix("mooncake_")


class RunStore:
    """Finished runs as one JSON file each in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def get(self, run: Run) -> SimulationRow | None:
        """The row of a finished run."""
        path = self._path(run)
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def put(self, run: Run, row: SimulationRow) -> None:
        """Keep it; a crash in the middle leaves nothing behind that looks finished."""
        path = self._path(run)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(row), encoding="utf-8")
        part.replace(path)

    def _path(self, run: Run) -> Path:
        settings = json.dumps(asdict(run) | {"trace": trace_name(run.trace)}, sort_keys=True)
        digest = hashlib.blake2b((settings + _code_digest(run.policy)).encode(), digest_size=8)
        return self._folder / f"{run.cell.replace(' ', '-')}-{run.policy}-{digest.hexdigest()}.json"


@cache  # of the code that this process runs, whatever is edited meanwhile
def _code_digest(policy: str) -> str:
    folder = Path(cluster.__file__).parent
    names = _EVERY_POLICY + (_DEFAULT if policy == "default" else _BASELINES)
    digest = hashlib.blake2b()
    for name in names:
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def _simulate(run: Run) -> SimulationRow:
    return run_simulation(run.options())[0]


def run_all(
    runs: Sequence[Run], store: RunStore, processes: int, done: Callable[[], None]
) -> dict[Run, SimulationRow]:
    """Every run's row, from the store or simulated now. done: called once for each run."""
    rows: dict[Run, SimulationRow] = {}
    missing: list[Run] = []
    for run in runs:
        row = store.get(run)
        if row is None:
            missing.append(run)
        else:
            rows[run] = row
            done()
    for run, row in zip(missing, _simulated(missing, processes), strict=True):
        store.put(run, row)
        rows[run] = row
        done()
    return rows


def _simulated(runs: list[Run], processes: int) -> Iterator[SimulationRow]:
    if processes == 1:
        yield from map(_simulate, runs)
        return
    with ProcessPoolExecutor(processes) as executor:
        yield from executor.map(_simulate, runs)
