"""Five times the load for a minute, then half: goodput, hints, appointments, shares, preemptions.

    python tests/benchmarks/bench_overload.py [--json FILE]

The runs of `tests/cluster/test_overload.py`, on a virtual clock: the machine does not matter. There
is no reference; in its place stands what each figure has to be.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmark_report import Row, print_rows, write_json
from overload import Overload, run_overload, run_preemptions

from pagefleet.protos.messages import AdmissionClass

_SEEDS = range(10)
_GOALS = {AdmissionClass.GUARANTEED: f"0, in {len(_SEEDS)} runs"}


def rows_of(overload: Overload) -> list[Row]:
    """One row a figure."""
    case = f"{overload.heavy:.0%} from one tenant"
    hinted = overload.num_hints / overload.num_refusals
    figures = (
        ("goodput, overload", overload.goodput_overload, "0.95 of that at capacity, at least"),
        ("goodput, after", overload.goodput_after, "0.95 of that at capacity, at least"),
        ("told when", hinted, f"1 of {overload.num_refusals:,} refusals"),
        ("kept, served", overload.kept, f"0.8 of {overload.num_appointments:,}, at least"),
        ("its share", overload.heavy_share, "0.55 of block-seconds, at most"),
        ("never served", float(overload.num_unserved), "0"),
        ("left waiting", float(overload.num_left), "0, at the end"),
    )
    return [Row(case, metric, figure, None, goal) for metric, figure, goal in figures]


def preemption_rows() -> list[Row]:
    """Preemptions of each class, where blocks are short."""
    totals = dict.fromkeys(AdmissionClass, 0)
    for seed in _SEEDS:
        for admission_class, count in run_preemptions(seed).items():
            totals[admission_class] += count
    return [
        Row(each.name.lower(), "preemptions", float(count), None, _GOALS.get(each, "-"))
        for each, count in totals.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [row for heavy in (0.5, 0.8) for row in rows_of(run_overload(heavy))]
    rows += preemption_rows()
    print_rows("overload", rows)
    if options.json is not None:
        write_json(options.json, "overload", rows)


if __name__ == "__main__":
    main()
