"""`pagefleet plan` and `pagefleet simulate --allocators`: arithmetic, shown or written as JSON.

Knows how the flags become the questions of `capacity_plan` and `allocators`.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from .allocators import ALLOCATORS, plot, read_lengths, replay
from .capacity_plan import BLOCK_SIZES, CapacityPlan, KVShape, block_table, make_plan, read_shape
from .config import CommandError, format_bytes
from .tables import allocator_table, plan_table


def resolve_shape(
    model: Path | None,
    num_layers: int | None,
    num_kv_heads: int | None,
    head_dim: int | None,
    dtype: str | None,
    tp: int,
) -> KVShape:
    """A checkpoint folder's shape, or one given number by number."""
    if model is not None:
        return read_shape(model, dtype, tp)
    if num_layers is None or num_kv_heads is None or head_dim is None:
        raise CommandError("give --model DIR, or --layers, --kv-heads and --head-dim")
    return KVShape(num_layers, num_kv_heads, head_dim, dtype or "bfloat16", tp)


def parse_numbers(text: str, flag: str) -> list[int]:
    """'7,11,10', or '1000x100' for 100 times 1000."""
    numbers: list[int] = []
    try:
        for part in text.split(","):
            number, _, times = part.partition("x")
            numbers += [int(number)] * (int(times) if times else 1)
    except ValueError as error:
        raise CommandError(f"{flag}: {text!r} is not a list like 7,11,10 or 1000x100") from error
    return numbers


def print_plan(
    shape: KVShape,
    pool_bytes: int,
    lengths: Sequence[int],
    block_sizes: Sequence[int] | None,
    *,
    as_json: bool,
    console: Console,
) -> None:
    """The table of block sizes, then one sequence's table at the recommended size."""
    plan = make_plan(shape, pool_bytes, lengths, block_sizes or BLOCK_SIZES)
    table = block_table(plan.bytes_per_token, max(lengths), plan.recommended_block_size)
    if as_json:
        longest = asdict(table) | {"payload_per_table_byte": table.payload_per_table_byte}
        console.print_json(data=asdict(plan) | {"longest_sequence": longest})
        return
    _print_shape(plan, console)
    console.print(plan_table(plan))
    console.print(
        f"* recommended. The longest sequence, {table.num_tokens:,} tokens, is "
        f"{table.num_blocks:,} blocks; its table takes {format_bytes(table.table_bytes)}, "
        f"1/{table.payload_per_table_byte:,.0f} of its {format_bytes(table.payload_bytes)} of KV.",
        highlight=False,
        soft_wrap=True,
    )


def _print_shape(plan: CapacityPlan, console: Console) -> None:
    shape = plan.shape
    num_tokens = plan.pool_bytes // plan.bytes_per_token
    console.print(
        f"{shape.num_layers} layers x {shape.num_kv_heads} KV heads x {shape.head_dim}, "
        f"{shape.dtype}, tp {shape.tp}: {format_bytes(plan.bytes_per_token)} per token and rank, "
        f"pool {format_bytes(plan.pool_bytes)} = {num_tokens:,} tokens",
        highlight=False,
        soft_wrap=True,
    )


def compare_allocators(
    trace: Path,
    *,
    num_slots: int,
    block_size: int,
    max_length: int,
    num_requests: int | None,
    png: Path | None,
    json_file: Path | None,
    console: Console,
) -> None:
    """Replay one trace of lengths through every allocator; a table, and a plot if asked for."""
    sequences = read_lengths(trace, num_requests)
    results = [replay(name, sequences, num_slots, block_size, max_length) for name in ALLOCATORS]
    console.print(allocator_table(results))
    if json_file is not None:
        rows = [
            {"trace": trace.name, "num_slots": num_slots, "block_size": block_size}
            | {"max_length": max_length}
            | asdict(result)
            for result in results
        ]
        json_file.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    if png is not None:
        plot(results, png)
        console.print(f"plot: {png}", highlight=False, soft_wrap=True)
