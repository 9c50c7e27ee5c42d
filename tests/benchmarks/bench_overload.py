"""Five times the load for a minute, then half: goodput, hints, appointments, shares, preemptions.

    python tests/benchmarks/bench_overload.py [--json FILE]

The runs of `tests/cluster/test_overload.py`, on a virtual clock: the machine does not matter. The
reference is what each figure has to reach, or may not exceed.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmark_report import Row, print_rows, write_json
from overload import Overload, run_overload, run_preemptions

from pagefleet.protos.messages import AdmissionClass

_SEEDS = range(10)


def rows_of(overload: Overload) -> list[Row]:
    """One row a figure."""
    case = f"{overload.heavy:.0%} from one tenant"
    hinted = overload.num_hints / overload.num_refusals
    return [
        Row(case, "goodput, overload", overload.goodput_overload, 0.95, "of that at capacity"),
        Row(case, "goodput, after", overload.goodput_after, 0.95, "of that at capacity"),
        Row(case, "with a hint", hinted, 1.0, f"of {overload.num_refusals:,} refusals"),
        Row(case, "served in time", overload.kept, 0.8, f"of {overload.num_appointments:,} kept"),
        Row(case, "its share", overload.heavy_share, 0.55, "of block-seconds, at most"),
        Row(case, "never served", float(overload.num_unserved), 0.0, "at most"),
    ]


def preemption_rows() -> list[Row]:
    """Preemptions of each class, where blocks are short."""
    totals = dict.fromkeys(AdmissionClass, 0)
    for seed in _SEEDS:
        for admission_class, count in run_preemptions(seed).items():
            totals[admission_class] += count
    return [
        Row(each.name.lower(), "preemptions", float(count), None, f"{len(_SEEDS)} runs")
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
