"""What a simulation run says: the JSON row, the table and the plots. Runs nothing."""

# pyright: reportUnknownMemberType=false
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TypedDict

from rich.table import Table

from .measurements import Measurements
from .replay_replica import percentile
from .tables import make_table

_COLUMNS = ("hit", "of ideal", "TTFT mean", "p50", "p99", "max", "goodput", "refused", "us")


class SimulationRow(TypedDict):
    """One policy's run. hit_rate and ideal_fraction are shares, goodput is requests per second
    that met the objectives, imbalance the busiest replica's prefill work over the mean."""

    trace: str
    policy: str
    replicas: int
    blocks: int
    block_size: int
    load: float
    requests: int
    hit_rate: float
    ideal_fraction: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    ttft_max_s: float
    tpot_p99_s: float
    goodput: float
    slo_share: float
    refused: int
    expired: int
    refusals: int
    first_retry_success: float | None
    imbalance: float
    preemptions: int
    restarts: int
    decision_us_mean: float
    decision_us_p99: float
    report_us_mean: float
    tenant_block_s: dict[str, float]
    transfers: int
    transfers_failed: int
    transferred_tokens: int


def make_row(
    measured: Measurements,
    *,
    trace: str,
    policy: str,
    replicas: int,
    blocks: int,
    block_size: int,
    load: float,
    ideal_hit_rate: float,
    slo_ttft_s: float,
    slo_tpot_s: float,
) -> SimulationRow:
    """The figures of one run."""
    ttft, tpot = measured.ttft_s, measured.tpot_s
    total = len(ttft) + measured.refused + measured.expired
    met = sum(
        first <= slo_ttft_s and each <= slo_tpot_s for first, each in zip(ttft, tpot, strict=True)
    )
    hit_rate = measured.hit_tokens / max(1, measured.prompt_tokens)
    computed = list(measured.computed_tokens.values())
    return SimulationRow(
        trace=trace,
        policy=policy,
        replicas=replicas,
        blocks=blocks,
        block_size=block_size,
        load=load,
        requests=total,
        hit_rate=hit_rate,
        ideal_fraction=hit_rate / ideal_hit_rate if ideal_hit_rate else 0.0,
        ttft_mean_s=fmean(ttft) if ttft else 0.0,
        ttft_p50_s=percentile(ttft, 0.5),
        ttft_p99_s=percentile(ttft, 0.99),
        ttft_max_s=max(ttft, default=0.0),
        tpot_p99_s=percentile(tpot, 0.99),
        goodput=met / max(measured.duration_s, 1e-9),
        slo_share=met / max(1, total),
        refused=measured.refused,
        expired=measured.expired,
        refusals=measured.refusals,
        first_retry_success=(
            measured.first_retries_served / measured.first_retries
            if measured.first_retries
            else None
        ),
        imbalance=max(computed) / max(fmean(computed), 1e-9) if computed else 1.0,
        preemptions=measured.preemptions,
        restarts=measured.restarts,
        decision_us_mean=fmean(measured.decision_us) if measured.decision_us else 0.0,
        decision_us_p99=percentile(measured.decision_us, 0.99),
        report_us_mean=fmean(measured.report_us) if measured.report_us else 0.0,
        tenant_block_s=measured.tenant_block_s,
        transfers=measured.transfers,
        transfers_failed=measured.transfers_failed,
        transferred_tokens=measured.transferred_tokens,
    )


def simulation_table(rows: Sequence[SimulationRow]) -> Table:
    """One line a run."""
    table = make_table(("policy", *_COLUMNS))
    for row in rows:
        table.add_row(
            row["policy"],
            f"{row['hit_rate']:.1%}",
            f"{row['ideal_fraction']:.1%}",
            f"{row['ttft_mean_s']:.3f} s",
            f"{row['ttft_p50_s']:.3f} s",
            f"{row['ttft_p99_s']:.2f} s",
            f"{row['ttft_max_s']:.2f} s",
            f"{row['goodput']:.2f}/s",
            f"{row['refused'] + row['expired']:,}",
            f"{row['decision_us_mean']:.0f}",
        )
    return table


def write_rows(rows: Sequence[SimulationRow], path: Path) -> None:
    """The rows as a JSON list."""
    path.write_text(json.dumps(list(rows), indent=2) + "\n", encoding="utf-8")


def write_plots(runs: Sequence[tuple[SimulationRow, Measurements]], path: Path) -> None:
    """TTFT distributions, means and hit rates of all runs in one PNG; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    ttft, means, hits = figure.subplots(1, 3)
    for row, measured in runs:
        values = sorted(measured.ttft_s)
        shares = [(place + 1) / len(values) for place in range(len(values))]
        ttft.plot(values, shares, label=row["policy"], linewidth=1)
    ttft.set_xscale("log")
    ttft.set_xlabel("TTFT, s")
    ttft.set_ylabel("share of requests")
    ttft.legend(fontsize=7)
    names = [row["policy"] for row, _ in runs]
    means.barh(names, [row["ttft_mean_s"] for row, _ in runs])
    means.set_xlabel("mean TTFT, s")
    hits.barh(names, [100 * row["hit_rate"] for row, _ in runs])
    hits.set_xlabel("hit rate, %")
    for axes in (means, hits):
        axes.invert_yaxis()
    first = runs[0][0]
    figure.suptitle(
        f"{first['trace']}, {first['replicas']} replicas of {first['blocks']} blocks of "
        f"{first['block_size']}, load {first['load']:g}"
    )
    figure.savefig(path, dpi=120)
