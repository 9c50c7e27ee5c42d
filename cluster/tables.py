"""How the command line shows plans, allocator runs and benchmark results.

Knows rich and the value classes. Computes nothing.
"""

from collections.abc import Sequence
from dataclasses import fields

from rich.table import Table

from .allocators import AllocatorResult, MemorySplit
from .capacity_plan import CapacityPlan
from .config import format_bytes


def make_table(headers: Sequence[str]) -> Table:
    """A plain table: the first column to the left, numbers to the right."""
    table = Table(box=None, pad_edge=False)
    for place, header in enumerate(headers):
        table.add_column(header, justify="right" if place else "left", no_wrap=True)
    return table


def plan_table(plan: CapacityPlan) -> Table:
    """One row a block size; the recommended one is marked."""
    headers = ("block size", "bytes", "blocks", "slots", "needed", "waste", "", "held")
    table = make_table(headers)
    for size in plan.sizes:
        mark = " *" if size.block_size == plan.recommended_block_size else ""
        table.add_row(
            f"{size.block_size}{mark}",
            format_bytes(size.block_bytes),
            f"{size.num_blocks:,}",
            f"{size.num_slots:,}",
            f"{size.blocks_needed:,}",
            f"{size.waste_slots:,}",
            f"{size.waste_share:.1%}",
            f"{size.held} of {len(plan.lengths)}",
        )
    return table


def allocator_table(results: Sequence[AllocatorResult]) -> Table:
    """One row an allocator: where the memory is, and how many sequences it holds."""
    parts = [part.name for part in fields(MemorySplit)]
    table = make_table(("allocator", *parts, "held", "most", "preempted"))
    for result in results:
        shares = [f"{getattr(result.split, part):.1%}" for part in parts]
        table.add_row(
            result.allocator,
            *shares,
            f"{result.mean_held:.1f}",
            str(result.max_held),
            str(result.num_preempted),
        )
    return table
