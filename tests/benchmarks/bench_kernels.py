"""The compiled CPU kernels beside the machine's own limits and torch, measured in the same run.

Ours and the reference take turns; each reports the median of its repeats, since the fastest of one
may have met a quiet moment of a shared machine that the other did not. With one thread the clock is
the thread's CPU time, so a busy machine does not count; with more it is the wall clock.

Cases: dec BATCHxCONTEXT HEADS/KV_HEADSxHEAD_DIM, pre QUERIES/CONTEXT likewise; INPUTS x WEIGHTS
ROWSxOUTxIN; weights: all products of one token; draw ROWS: filters and the draw.

Yardsticks:
    bandwidth   the better of a sum of the whole pool in order and one in the order of its blocks,
                and the latter alone, which says what so short runs of memory allow at all
    gemm        torch's float32 product of 512 rows; `us` beside it is the time at that rate

    python tests/benchmarks/bench_kernels.py [--threads 1] [--repeats 8] [--only WORD] [--json FILE]
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pagefleet.workers.openmp import WAITS

os.environ.update(WAITS)

import torch
import torch.nn.functional as F
from benchmark_report import Row, print_rows, write_json
from torch import Tensor

from pagefleet.kernels import cpu_library, cpu_memory, sampling
from pagefleet.kernels.backend import LinearWeight
from pagefleet.kernels.cpu import CpuBackend
from pagefleet.kernels.metadata import AttentionMetadata
from pagefleet.kernels.reference import ReferenceBackend
from pagefleet.kernels.sampling import DrawParams

BLOCK_SIZE = 16
COLD_BYTES = 3 << 28  # what is read per repeat, well past the caches
HEADS = [(8, 2, 64), (32, 8, 128)]
DECODES = [(16, 1024), (16, 8192), (1, 32768)]
PREFILLS = [(512, 512), (2048, 2048), (512, 4096)]
LINEARS = [(4096, 1024), (1024, 3072)]
ROWS = [1, 4, 16, 64, 512]
QWEN_06B = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]  # one layer's products
QWEN_06B_VOCABULARY = (151936, 1024)
FILTERED = (32, 49152)  # rows, vocabulary


@dataclass(frozen=True, slots=True)
class Bench:
    """How to measure: the clock that fits the number of threads, and how often."""

    threads: int
    repeats: int

    def time(self, *calls: Callable[[], object]) -> list[float]:
        """Seconds of the median repeat of each call, taken in turns."""
        clock = time.thread_time if self.threads == 1 else time.perf_counter
        taken: list[list[float]] = [[] for _ in calls]
        for _ in range(self.repeats):
            for seconds, call in zip(taken, calls, strict=True):
                begin = clock()
                call()
                seconds.append(clock() - begin)
        return [statistics.median(seconds) for seconds in taken]

    def backend(self, weight_dtype: torch.dtype | None = None) -> CpuBackend:
        return CpuBackend(num_threads=self.threads, weight_dtype=weight_dtype)


def make_metadata(context_len: int, query_len: int, batch: int) -> AttentionMetadata:
    """`batch` equal sequences over blocks in random order."""
    num_blocks = -(-context_len // BLOCK_SIZE)
    tables = torch.randperm(batch * num_blocks, dtype=torch.int32).view(batch, num_blocks)
    unused = torch.zeros(1, dtype=torch.int64)
    return AttentionMetadata(
        query_starts=torch.arange(batch + 1, dtype=torch.int32) * query_len,
        context_lens=torch.full((batch,), context_len, dtype=torch.int32),
        block_tables=tables,
        positions=unused,
        slots=unused,
        num_decodes=batch if query_len == 1 else 0,
        max_query_len=query_len,
        max_context_len=context_len,
    )


def decode_rows(bench: Bench) -> Iterator[Row]:
    backend = bench.backend()
    for num_heads, kv_heads, head_dim in HEADS:
        for batch, context_len in DECODES:
            metadata = make_metadata(context_len, 1, batch)
            layer_bytes = 2 * batch * context_len * kv_heads * head_dim * 4
            num_layers = -(-COLD_BYTES // layer_bytes)
            shape = (batch * context_len // BLOCK_SIZE, num_layers, 2, BLOCK_SIZE)
            pool = torch.empty(*shape, kv_heads, head_dim)
            cpu_memory.advise_huge_pages(pool)
            pool.fill_(0.5)
            q = torch.randn(batch, num_heads, head_dim)
            plane = 2 * BLOCK_SIZE * kv_heads * head_dim
            blocks = metadata.block_tables.flatten().long() * num_layers
            in_blocks = torch.cat([(blocks + layer) * plane for layer in range(num_layers)])
            in_order = torch.arange(in_blocks.shape[0]) * plane

            def attend(
                q: Tensor = q, pool: Tensor = pool, metadata: AttentionMetadata = metadata
            ) -> None:
                for layer in range(pool.shape[1]):
                    backend.attention(q, pool[:, layer], metadata, 0.1)

            def read(order: Tensor, pool: Tensor = pool, plane: int = plane) -> Callable[[], float]:
                return lambda: cpu_memory.sum_blocks(pool, order, plane, bench.threads)

            ours, *sums = bench.time(attend, read(in_order), read(in_blocks))
            gigabytes = pool.numel() * 4 / 1e9
            case = f"dec {batch}x{context_len // 1024}k {num_heads}/{kv_heads}x{head_dim}"
            rate = gigabytes / ours
            yield Row(case, "bandwidth", rate, gigabytes / min(sums), "sum of the pool")
            yield Row(case, "bandwidth", rate, gigabytes / sums[1], "sum by blocks")


GEMM_FLOPS = 2 * 512 * 1024 * 4096


def gemm_yardstick() -> Callable[[], object]:
    x, weight = torch.randn(512, 1024), torch.randn(4096, 1024)
    return lambda: F.linear(x, weight)


def prefill_rows(bench: Bench) -> Iterator[Row]:
    backend = bench.backend()
    for num_heads, kv_heads, head_dim in HEADS:
        for query_len, context_len in PREFILLS:
            metadata = make_metadata(context_len, query_len, 1)
            layer = torch.randn(context_len // BLOCK_SIZE, 2, BLOCK_SIZE, kv_heads, head_dim)
            q = torch.randn(query_len, num_heads, head_dim)

            def attend(
                q: Tensor = q, layer: Tensor = layer, metadata: AttentionMetadata = metadata
            ) -> Tensor:
                return backend.attention(q, layer, metadata, 0.1)

            ours, gemm = bench.time(attend, gemm_yardstick())
            visible = sum(range(context_len - query_len + 1, context_len + 1))
            flops = 4 * head_dim * num_heads * visible
            case = f"pre {query_len}/{context_len} {num_heads}/{kv_heads}x{head_dim}"
            yield Row(case, "us", ours * 1e6, gemm * flops / GEMM_FLOPS * 1e6, "gemm, 512 rows")


@dataclass(frozen=True, slots=True)
class Products:
    """One kind of weights: how inputs and weights come, and how weights are stored."""

    name: str
    inputs: torch.dtype
    weights: torch.dtype

    def calls(self, bench: Bench, x: Tensor, weight: Tensor, count: int) -> Callable[[], object]:
        """`count` products, each with a copy of its own."""
        backend = bench.backend(self.weights)
        given = weight.to(torch.float32 if self.weights == torch.int8 else self.weights)
        packed: list[LinearWeight] = [backend.pack_linear(given) for _ in range(count)]
        inputs = x.to(self.inputs)
        return lambda: [backend.linear(inputs, copy) for copy in packed]


PRODUCTS = (
    Products("f32", torch.float32, torch.float32),
    Products("f32 x bf16", torch.float32, torch.bfloat16),
    Products("f32 x i8", torch.float32, torch.int8),
    Products("bf16", torch.bfloat16, torch.bfloat16),
)


def torch_products(x: Tensor, weight: Tensor, count: int) -> Callable[[], object]:
    plain = [weight.clone() for _ in range(count)]
    return lambda: [F.linear(x, copy) for copy in plain]


def linear_rows(bench: Bench) -> Iterator[Row]:
    """Few rows read cold weights: several copies take turns."""
    for out_features, in_features in LINEARS:
        size = out_features * in_features
        weight = torch.randn(out_features, in_features)
        for rows in ROWS:
            count = max(1, (1 << 26) // size) if rows <= 16 else 1
            x = torch.randn(rows, in_features)
            *times, plain, half, gemm = bench.time(
                *(kind.calls(bench, x, weight, count) for kind in PRODUCTS),
                torch_products(x, weight, count),
                torch_products(x.bfloat16(), weight.bfloat16(), count),
                gemm_yardstick(),
            )
            scale = 1e6 / count
            at_rate = gemm * 2 * rows * size / GEMM_FLOPS * count
            for kind, ours in zip(PRODUCTS, times, strict=True):
                case = f"{kind.name} {rows}x{out_features}x{in_features}"
                yield Row(case, "us", ours * scale, plain * scale, "torch float32")
                if kind.weights == torch.bfloat16:
                    yield Row(case, "us", ours * scale, half * scale, "torch bfloat16")
                if kind.weights != torch.float32:
                    yield Row(case, "us", ours * scale, times[0] * scale, "our float32")
                if rows >= 16:
                    yield Row(case, "us", ours * scale, at_rate * scale, "gemm, 512 rows")


def batch_one_rows(bench: Bench) -> Iterator[Row]:
    """Every weight of a token of Qwen3-0.6B's shape, with a quarter of its layers."""
    shapes = [*QWEN_06B * 7, QWEN_06B_VOCABULARY]
    for name, stored, dtype in [
        ("f32", None, torch.float32),
        ("bf16", None, torch.bfloat16),
        ("i8", torch.int8, torch.float32),
    ]:
        backend = bench.backend(stored)
        packed = [backend.pack_linear(torch.randn(shape).to(dtype)) for shape in shapes]
        inputs = {width: torch.randn(1, width).to(dtype) for _, width in shapes}
        size = sum(n * k for n, k in shapes) * {"f32": 4, "bf16": 2, "i8": 1}[name]
        big = torch.empty(1 << 27)
        cpu_memory.advise_huge_pages(big)
        order = torch.arange(0, big.fill_(1).numel(), 1 << 14)

        def run(
            backend: CpuBackend = backend,
            packed: list[LinearWeight] = packed,
            inputs: dict[int, Tensor] = inputs,
        ) -> None:
            for weight in packed:
                backend.linear(inputs[weight.in_features], weight)

        def read(big: Tensor = big, order: Tensor = order) -> float:
            return cpu_memory.sum_blocks(big, order, 1 << 14, bench.threads)

        ours, reading = bench.time(run, read)
        reference = big.numel() * 4 / reading / 1e9
        yield Row(f"weights {name}", "bandwidth", size / ours / 1e9, reference, "sum")


def small_rows(bench: Bench) -> Iterator[Row]:
    """What stands between the products, one layer of SmolLM2-135M's shape, 1 and 512 tokens."""
    ours, twin = bench.backend(), ReferenceBackend()
    weight = torch.rand(576)
    for rows in (1, 512):
        x, residual = torch.randn(rows, 576), torch.randn(rows, 576)
        gate_up = torch.randn(rows, 2 * 1536)
        pairs: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
            (
                "add and norm",
                lambda x=x, r=residual: ours.add_rms_norm(x, r, weight, 1e-5),
                lambda x=x, r=residual: twin.add_rms_norm(x, r, weight, 1e-5),
            ),
            (
                "silu and mul",
                lambda g=gate_up: ours.silu_and_mul(g),
                lambda g=gate_up: twin.silu_and_mul(g),
            ),
        ]
        for name, call, reference in pairs:
            many = [lambda c=c: [c() for _ in range(50)] for c in (call, reference)]
            first, second = bench.time(*many)
            yield Row(f"{name} {rows}", "us", first * 2e4, second * 2e4, "plain torch")


def filter_rows(bench: Bench) -> Iterator[Row]:
    """From logits to drawn tokens, filters and the draw."""
    backend = bench.backend()
    num_rows, vocab = FILTERED
    logits = torch.randn(num_rows, vocab) * 3
    for name, top_k, top_p in [
        ("all", 0, 1.0),
        ("top-k 50", 50, 1.0),
        ("top-p 0.9", 0, 0.9),
        ("both", 50, 0.9),
    ]:
        params = DrawParams(
            temperature=torch.ones(num_rows),
            top_k=torch.full((num_rows,), top_k),
            top_p=torch.full((num_rows,), top_p),
            min_p=torch.zeros(num_rows),
            uniforms=torch.rand(num_rows),
        )
        ours, plain = bench.time(
            lambda params=params: sampling.sample(logits, params, backend.filtered_weights),
            lambda params=params: sampling.sample(logits, params),
        )
        yield Row(f"draw {num_rows}, {name}", "us", ours * 1e6, plain * 1e6, "plain torch")


PARTS = {
    "decode": decode_rows,
    "prefill": prefill_rows,
    "linear": linear_rows,
    "weights": batch_one_rows,
    "small": small_rows,
    "filters": filter_rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--instruction-set", help="instead of the best one")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not cpu_library.is_available():
        raise SystemExit("the compiled kernels were not built")
    chosen = cpu_library.select_instruction_set(options.instruction_set)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    bench = Bench(options.threads, options.repeats)
    parts = [PARTS[options.only]] if options.only else list(PARTS.values())
    rows = [row for part in parts for row in part(bench)]
    title = f"kernels ({chosen}, {options.threads} threads)"
    print_rows(title, rows)
    if options.json:
        write_json(options.json, title, rows)


if __name__ == "__main__":
    main()
