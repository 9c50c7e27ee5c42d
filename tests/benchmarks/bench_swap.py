"""Bandwidth between the two block tiers, beside one contiguous copy of the same size.

Whole pools of at least 256 MB go to the host and back as blocks in random order, by the copy thread
that a worker has; the reference is one copy of so many bytes between two arrays, by one thread too.
Both are timed in turn, the median is reported, in GB/s. Then, for a model of random weights:
what a token costs to swap both ways, what it costs to compute anew, and the rate of prefill at
which both would cost the same.

    python tests/benchmarks/bench_swap.py [--megabytes 256] [--repeats 9] [--json FILE]
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from pagefleet.workers.openmp import WAITS

os.environ.update(WAITS)

import numpy as np
import torch
from benchmark_report import Row, print_rows, write_json

from pagefleet.kernels.select import select_backend
from pagefleet.scheduler.output import CopyJob, CopyKind
from pagefleet.workers.block_storage import BlockLayout, BlockStorage
from pagefleet.workers.config import WorkerConfig
from pagefleet.workers.model_runner import ModelRunner

sys.path.append(str(Path(__file__).parents[1]))
from factories import LlamaShape, make_llama

BLOCK_SIZE = 16
SHAPE = LlamaShape(
    hidden_size=256, intermediate_size=768, num_layers=16, num_heads=4, num_kv_heads=4, head_dim=64
)
KIB = 2**10
BLOCK_KIB = (512, 1024, 2048)
DIRECTIONS = (CopyKind.STORE, CopyKind.LOAD)
_PAUSE_S = 2e-4  # a thread that asks without a pause would take its core from the copy


def make_storage(block_kib: int, num_bytes: int) -> BlockStorage:
    """Both pools of so many bytes, every page of them touched."""
    num_layers = SHAPE.num_layers * block_kib // BLOCK_KIB[0]
    layout = BlockLayout(num_layers, BLOCK_SIZE, SHAPE.num_kv_heads, SHAPE.head_dim, torch.float32)
    assert layout.num_bytes == block_kib * KIB, f"{layout} has {layout.num_bytes} bytes"
    device = torch.device("cpu")
    count = num_bytes // layout.num_bytes
    backend = select_backend(device, torch.float32, deterministic=False)
    storage = BlockStorage(layout, count, count, device, backend)
    storage.pool.fill_(1.0)
    storage.host_pool.fill_(2.0)
    return storage


def swap_s(storage: BlockStorage, kind: CopyKind, generator: np.random.Generator) -> float:
    """Seconds until every block has gone from one tier to the other, ids in random order."""
    sources, targets = (
        generator.permutation(storage.num_blocks).astype(np.int32) for _ in range(2)
    )
    begin = time.perf_counter()
    storage.submit((CopyJob(0, kind, sources, targets),))
    while not storage.poll():
        time.sleep(_PAUSE_S)
    return time.perf_counter() - begin


def measure(block_kib: int, num_bytes: int, repeats: int) -> tuple[dict[CopyKind, float], float]:
    """GB/s of each direction, and of the reference."""
    storage = make_storage(block_kib, num_bytes)
    source = np.ones(num_bytes, dtype=np.uint8)
    target = np.zeros(num_bytes, dtype=np.uint8)
    generator = np.random.default_rng(0)
    times: dict[CopyKind, list[float]] = {kind: [] for kind in DIRECTIONS}
    reference: list[float] = []
    for _ in range(repeats + 1):  # the first is a warm-up
        for kind in DIRECTIONS:
            times[kind].append(swap_s(storage, kind, generator))
        begin = time.perf_counter()
        np.copyto(target, source)
        reference.append(time.perf_counter() - begin)
    storage.close()
    size = num_bytes / 1e9
    swapped = {kind: size / statistics.median(found[1:]) for kind, found in times.items()}
    return swapped, size / statistics.median(reference[1:])


def break_even(bandwidth: dict[CopyKind, float]) -> None:
    """Print it for the model of SHAPE. bandwidth: GB/s of blocks of its size."""
    with tempfile.TemporaryDirectory() as folder:
        make_llama(Path(folder), SHAPE)
        config = WorkerConfig(
            folder, num_blocks=64, block_size=BLOCK_SIZE, device="cpu", num_threads=1
        )
        runner = ModelRunner.load(config)
        rate = runner.measure().prefill_tokens_per_s
        token_bytes = runner.storage.layout.num_bytes / BLOCK_SIZE
        runner.close()
    swap_us = sum(token_bytes / speed / 1e3 for speed in bandwidth.values())
    print(f"\na token of {token_bytes / KIB:.0f} KiB: {swap_us:.1f} us to swap out and in", end="")
    print(f", {1e6 / rate:.1f} us to compute anew at {rate:,.0f} tokens/s")
    cheaper = "swap" if swap_us < 1e6 / rate else "recompute"
    print(f"break-even: {1e6 / swap_us:,.0f} tokens/s of prefill; here {cheaper} is cheaper")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    found: dict[int, dict[CopyKind, float]] = {}
    for block_kib in BLOCK_KIB:
        swapped, reference = measure(block_kib, options.megabytes * 2**20, options.repeats)
        found[block_kib] = swapped
        rows += [
            Row(f"{kind.value} {block_kib} KiB", "bandwidth", speed, reference, "one copy")
            for kind, speed in swapped.items()
        ]
    print_rows("swap", rows)
    break_even(found[BLOCK_KIB[0]])
    if options.json:
        write_json(options.json, "swap", rows)


if __name__ == "__main__":
    main()
