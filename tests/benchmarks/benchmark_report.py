"""How every benchmark reports: ours and the reference side by side, as a table and as JSON."""

import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

LARGER_IS_BETTER = {"tokens_per_s", "bandwidth", "requests_per_s", "hit_rate"}


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
