"""The default routing policy beside those of other systems, in the simulated cluster.

    python tests/benchmarks/bench_routing.py [--load 1.0] [--block-size 512] [--out DIR] …

Replays each trace through the real controller over N replicas of B blocks of 512 tokens (`replay`
cost model) once per policy. The default has one setting for all cells. Per cell it is compared
with the baseline of the best mean time to the first token, and with the best-hitting one.
Finished runs are kept in the folder --out: a second call goes on where the first one stopped.
"""

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmark_report import Row, machine, write_json
from routing_cells import Run, RunStore, run_all

from pagefleet.cluster.policies import POLICY_NAMES
from pagefleet.cluster.simulation_report import SimulationRow

TRACES = ("mooncake_conversation", "mooncake_toolagent_recon")
BASELINES = tuple(name for name in POLICY_NAMES if name != "default")
Cells = dict[str, dict[str, SimulationRow]]  # cell → policy → row


@dataclass(frozen=True, slots=True)
class Verdict:
    """The default policy in one cell beside its strongest rivals. best: of the least mean TTFT.
    worst_wait_s: the longest time to the first token under any policy that binds on arrival."""

    cell: str
    ours: SimulationRow
    best: SimulationRow
    best_hitting: SimulationRow
    worst_wait_s: float

    @property
    def mean(self) -> float:
        """Mean TTFT over that of the best baseline: less is better."""
        return self.ours["ttft_mean_s"] / self.best["ttft_mean_s"]

    @property
    def hits(self) -> float:
        """Hit rate over that of the best-hitting baseline: more is better."""
        return self.ours["hit_rate"] / max(self.best_hitting["hit_rate"], 1e-9)

    def failures(self) -> list[str]:
        """Which of the things that every cell must show it does not show."""
        ours, best = self.ours, self.best
        checks = {
            "mean": self.mean <= 1.03,
            "p99": ours["ttft_p99_s"] <= best["ttft_p99_s"],
            "max": ours["ttft_max_s"] <= self.worst_wait_s,
            "hits": self.hits >= 0.85,
            "refused": not ours["refused"] and not ours["expired"],
        }
        return [name for name, holds in checks.items() if not holds]

    def rows(self) -> list[Row]:
        """In the form of every benchmark."""
        ours, best, name = self.ours, self.best, self.best["policy"]
        kinds = (("mean", "ttft_mean_s"), ("p99", "ttft_p99_s"), ("max", "ttft_max_s"))
        rows = [
            Row(f"{self.cell}, {kind}", "ttft_ms", 1e3 * ours[key], 1e3 * best[key], name)
            for kind, key in kinds
        ]
        hitting = self.best_hitting
        rows.append(
            Row(self.cell, "hit_rate", ours["hit_rate"], hitting["hit_rate"], hitting["policy"])
        )
        return rows


def judge(cell: str, policies: dict[str, SimulationRow]) -> Verdict:
    baselines = [row for name, row in policies.items() if name != "default"]
    return Verdict(
        cell,
        policies["default"],
        min(baselines, key=lambda row: row["ttft_mean_s"]),
        max(baselines, key=lambda row: row["hit_rate"]),
        max(row["ttft_max_s"] for row in baselines),
    )


def print_cells(cells: Cells) -> None:
    """Hit rate, mean and p99 of every policy: one line a policy, one column a cell."""
    policies = list(next(iter(cells.values())))
    print("\nhit % / TTFT mean s / TTFT p99 s")
    for trace in dict.fromkeys(cell.partition(" ")[0] for cell in cells):
        own = [cell for cell in cells if cell.partition(" ")[0] == trace]
        print(f"\n{trace:<17}" + "".join(f"{cell.partition(' ')[2]:>22}" for cell in own))
        for policy in policies:
            figures = [_figures(cells[cell][policy]) for cell in own]
            print(f"{policy:<17}" + "".join(f"{text:>22}" for text in figures))


def _figures(row: SimulationRow) -> str:
    return f"{100 * row['hit_rate']:.1f} / {row['ttft_mean_s']:.2f} / {row['ttft_p99_s']:.2f}"


def print_verdicts(verdicts: list[Verdict]) -> None:
    print(f"\ndefault beside the best baseline of each cell, on {machine()}")
    print(
        f"{'cell':<27}{'mean s':>8}{'ratio':>7}{'p99 s':>14}{'max s':>14}{'hits':>7}  best, misses"
    )
    for verdict in verdicts:
        ours, best = verdict.ours, verdict.best
        print(
            f"{verdict.cell:<27}{ours['ttft_mean_s']:>8.3f}{verdict.mean:>7.2f}"
            f"{_beside(ours['ttft_p99_s'], best['ttft_p99_s']):>14}"
            f"{_beside(ours['ttft_max_s'], best['ttft_max_s'], verdict.worst_wait_s):>22}"
            f"{verdict.hits:>7.2f}  {best['policy']} {' '.join(verdict.failures())}"
        )
    means, hits = (geometric_mean(values) for values in _columns(verdicts))
    print(f"geometric mean of the ratios: mean TTFT {means:.3f}, hit rate {hits:.3f}")


def _columns(verdicts: list[Verdict]) -> tuple[list[float], list[float]]:
    return [verdict.mean for verdict in verdicts], [verdict.hits for verdict in verdicts]


def _beside(*values: float) -> str:
    return " / ".join(f"{value:.2f}" for value in values)


# Baselines as figures published for the same cost model name them.
PUBLISHED_NAMES = {
    "round-robin": "round_robin",
    "least-requests": "least_req",
    "power-of-two": "p2c",
    "consistent-hash": "chash_k2_b1.25",
    "ray-prefix": "ray_default",
    "sglang": "sglang_.3/64/1.5",
    "dynamo": "dynamo_default",
    "llmd": "llmd_precise_2:1:1",
    "lmetric": "lmetric",
    "min-ttft": "min_ttft",
}


def read_figures(path: Path) -> dict[tuple[str, str], tuple[float, float, float]]:
    """(cell, published name) → hit %, mean and p99, from Markdown tables of such figures."""
    figures: dict[tuple[str, str], tuple[float, float, float]] = {}
    trace, blocks, columns = "", "", [""]
    for line in path.read_text(encoding="utf-8").splitlines():
        heading = re.match(r"### (\w+) rho=1\.0 C=(\d+)", line)
        if heading:
            trace, blocks = heading.groups()
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if cells[0] == "policy":
            columns = [name.removeprefix("N=") for name in cells[1:]]
        elif blocks and len(cells) == 1 + len(columns) and cells[1].count("/") == 2:
            for column, text in zip(columns, cells[1:], strict=True):
                hit, mean, p99 = (float(part) for part in text.split("/"))
                figures[f"{trace} {blocks}x{column}", cells[0]] = hit, mean, p99
    return figures


def print_differences(cells: Cells, path: Path) -> None:
    """Which baselines land off the published figures: 1.5 points of hits, 15 % of mean TTFT."""
    figures = read_figures(path)
    print("\nbaselines off the figures given (hit % / mean s, ours beside them)")
    num_compared = 0
    for cell, policies in cells.items():
        for policy, row in policies.items():
            given = figures.get((cell, PUBLISHED_NAMES.get(policy, "")))
            if given is None:
                continue
            num_compared += 1
            hit, mean = 100 * row["hit_rate"], row["ttft_mean_s"]
            if abs(hit - given[0]) > 1.5 or abs(mean / given[1] - 1.0) > 0.15:
                off = f"{hit:.1f} / {mean:.2f} beside {given[0]} / {given[1]}"
                print(f"{cell:<27}{policy:<17}{off}  {mean / given[1] - 1.0:+.0%}")
    print(f"{num_compared} compared")


def find_traces(names: Iterable[str]) -> list[Path]:
    """Files by path, or by name in a `shared/traces` folder here or above."""
    found: list[Path] = []
    for name in names:
        candidates = [Path(name)]
        for folder in (Path("shared/traces"), Path("../shared/traces")):
            candidates += [folder / f"{name}.jsonl.gz", folder / name]
        path = next((each for each in candidates if each.is_file()), None)
        if path is None:
            sys.exit(f"there is no trace {name!r}")
        found.append(path)
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", nargs="+", default=TRACES, help="files or names")
    parser.add_argument("--replicas", nargs="+", type=int, default=(4, 8, 16))
    parser.add_argument("--blocks", nargs="+", type=int, default=(781, 3906), help="of 512 tokens")
    parser.add_argument("--block-size", type=int, default=512, help="pools keep their tokens")
    parser.add_argument("--load", type=float, default=1.0, help="0: as fast as the trace is")
    parser.add_argument("--requests", type=int, help="only the first so many of each trace")
    parser.add_argument("--policies", nargs="+", default=BASELINES, choices=BASELINES)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(tempfile.gettempdir()) / f"pagefleet-routing-{os.getuid()}",
        help="where finished runs are kept",
    )
    parser.add_argument("--figures", type=Path, help="Markdown of figures to compare with")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def make_runs(options: argparse.Namespace) -> list[Run]:
    return [
        Run(trace, replicas, blocks, options.block_size, options.load or None, requests, policy)
        for trace in find_traces(options.traces)
        for blocks in options.blocks
        for replicas in options.replicas
        for policy in ("default", *options.policies)
        for requests in (options.requests,)
    ]


def main() -> None:
    options = parse()
    runs = make_runs(options)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    )
    with bar:
        task = bar.add_task("simulating", total=len(runs))
        rows = run_all(runs, RunStore(options.out), options.processes, lambda: bar.advance(task))
    cells: Cells = {}
    for run in runs:
        cells.setdefault(run.cell, {})[run.policy] = rows[run]
    verdicts = [judge(cell, policies) for cell, policies in cells.items()]
    print_cells(cells)
    if options.figures is not None:
        print_differences(cells, options.figures)
    print_verdicts(verdicts)
    if options.json is not None:
        write_json(options.json, "routing", [row for each in verdicts for row in each.rows()])


if __name__ == "__main__":
    main()
