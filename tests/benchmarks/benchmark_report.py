"""How every benchmark reports: ours and the reference side by side, as a table and as JSON."""

import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

LARGER_IS_BETTER = {"tokens_per_s", "bandwidth", "requests_per_s", "hit_rate", "ratio"}


@dataclass(frozen=True, slots=True)
class Row:
    """One case and metric. `reference` None = it cannot run here. ratio > 1: ours is better."""

    case: str
    metric: str
    ours: float
    reference: float | None
    reference_name: str

    @property
    def ratio(self) -> float | None:
        if not self.reference:
            return None
        ratio = self.ours / self.reference
        return ratio if self.metric in LARGER_IS_BETTER else 1 / ratio


def print_rows(benchmark: str, rows: list[Row]) -> None:
    print(f"\n{benchmark} on {machine()}")
    print(f"{'case':<20}{'metric':<16}{'ours':>12}{'reference':>12}{'ratio':>8}  reference is")
    for row in rows:
        reference = "-" if row.reference is None else f"{row.reference:,.2f}"
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        print(
            f"{row.case:<20}{row.metric:<16}{row.ours:>12,.2f}{reference:>12}{ratio:>8}"
            f"  {row.reference_name}"
        )


def write_json(path: Path, benchmark: str, rows: list[Row]) -> None:
    report = {
        "benchmark": benchmark,
        "machine": machine(),
        "rows": [asdict(row) | {"ratio": row.ratio} for row in rows],
    }
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def markdown_table(report: dict[str, object]) -> str:
    """A kept JSON report as RESULTS.md shows it: the command, the machine, a row a case."""
    load = report.get("load_before")
    busy = "" if load is None else f", load average {load} before it began"
    lines = [
        f"`{report.get('command', report['benchmark'])}`, {report['machine']}{busy}.",
        "",
        "| case | metric | ours | reference | ratio | reference is |",
        "|---|---|---|---|---|---|",
    ]
    rows = cast("list[dict[str, float | str | None]]", report["rows"])
    for row in rows:
        ours, reference, ratio = (_short(row[key]) for key in ("ours", "reference", "ratio"))
        lines.append(
            f"| {row['case']} | {row['metric']} | {ours} | {reference} | {ratio} "
            f"| {row['reference_name']} |"
        )
    return "\n".join(lines) + "\n"


def _short(value: float | str | None) -> str:
    """Three digits, as runs differ in the third."""
    if value is None:
        return "-"
    number = float(value)
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def machine() -> str:
    return f"{_cpu_name()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
