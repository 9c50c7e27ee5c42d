"""A decode step of the whole decoder with weights of each width, one row beside another.

Random weights, one step at a time, logits and the choice of the best id included; the scheduler is
not. Kinds take turns in one process and each reports its fastest step. With one thread the clock
is the thread's CPU time, so a busy machine does not count; with more it is the wall clock. The
references are the step with float32 weights, and the time that reading all weights once needs at
the bandwidth of a sum in order.

Kinds: float32; bf16 and int8 weights below float32 activations; "bf16 all", activations and cache
too.

    python tests/benchmarks/bench_decode.py [--shape smollm2 ...] [--rows 1] [--context 128]
        [--threads 1] [--steps 24] [--json FILE]
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pagefleet.workers.openmp import WAITS

os.environ.update(WAITS)
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from benchmark_report import Row, print_rows, write_json
from engine_workloads import SHAPES, Shape
from factories import LlamaShape, llama_config
from torch import Tensor

from pagefleet.kernels import cpu_library, cpu_memory
from pagefleet.kernels.cpu import CpuBackend
from pagefleet.kernels.metadata import AttentionMetadata
from pagefleet.kernels.quantized_weight import QuantizedWeight
from pagefleet.workers.models.config import DecoderConfig
from pagefleet.workers.models.config_fields import ConfigFields
from pagefleet.workers.models.decoder import Decoder
from pagefleet.workers.models.families import parse_config
from pagefleet.workers.models.weights import load_weights

BLOCK_SIZE = 16
READ_FLOATS, READ_BLOCK = 1 << 27, 1 << 14


@dataclass(frozen=True, slots=True)
class Kind:
    """dtype: of activations. weight_dtype: of linears; None = the same."""

    name: str
    dtype: torch.dtype
    weight_dtype: torch.dtype | None = None


KINDS = (
    Kind("float32", torch.float32),
    Kind("bf16 weights", torch.float32, torch.bfloat16),
    Kind("int8 weights", torch.float32, torch.int8),
    Kind("bf16 all", torch.bfloat16),
)


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """A `TensorSource` of what nobody trained."""

    dtype: torch.dtype

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Small enough that nothing overflows in any layer."""
        values = torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 0.02
        return values.to(self.dtype)

    def quantized(self, name: str, shape: tuple[int, ...]) -> QuantizedWeight | None:
        return None

    def skip(self, name: str) -> None:
        """Nothing is kept that could be dropped."""


def describe(shape: Shape) -> DecoderConfig:
    llama = LlamaShape(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position=1 << 15,
        tied=True,
    )
    return parse_config(ConfigFields(llama_config(llama), "a benchmark"), ConfigFields({}, ""))


def decode_metadata(num_rows: int, context: int) -> AttentionMetadata:
    """`num_rows` sequences of `context` tokens, the last of which is being decoded."""
    blocks = -(-context // BLOCK_SIZE)
    tables = torch.randperm(num_rows * blocks, dtype=torch.int32).view(num_rows, blocks)
    last = tables[:, -1].long() * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
    return AttentionMetadata(
        query_starts=torch.arange(num_rows + 1, dtype=torch.int32),
        context_lens=torch.full((num_rows,), context, dtype=torch.int32),
        block_tables=tables,
        positions=torch.full((num_rows,), context - 1),
        slots=last,
        num_decodes=num_rows,
        max_query_len=1,
        max_context_len=context,
    )


@dataclass(frozen=True, slots=True)
class Step:
    """One decode step, ready to run. num_bytes: of the weights that it reads."""

    decoder: Decoder
    num_bytes: int
    layers: list[Tensor]
    metadata: AttentionMetadata

    @classmethod
    def make(
        cls, config: DecoderConfig, kind: Kind, rows: int, context: int, threads: int
    ) -> "Step":
        backend = CpuBackend(num_threads=threads, weight_dtype=kind.weight_dtype)
        weights = load_weights(config, RandomWeights(kind.dtype), backend)
        metadata = decode_metadata(rows, context)
        shape = (metadata.block_tables.numel(), config.num_layers, 2, BLOCK_SIZE)
        pool = torch.zeros(*shape, config.num_kv_heads, config.head_dim, dtype=kind.dtype)
        layers = [pool[:, layer] for layer in range(config.num_layers)]
        return cls(Decoder(config, weights, backend, context), weights.num_bytes, layers, metadata)

    def run(self) -> None:
        # As each step of a replica has them: made anew.
        metadata = replace(self.metadata)
        ids = torch.ones(metadata.query_starts.shape[0] - 1, dtype=torch.int64)
        hidden = self.decoder.forward(ids, self.layers, metadata, None)
        logits = self.decoder.logits(hidden)
        assert logits is not None
        logits.argmax(1)


def fastest(calls: list[Callable[[], object]], steps: int, threads: int) -> list[float]:
    """Seconds of the fastest run of each call, taken in turns."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    best = [float("inf")] * len(calls)
    for _ in range(steps):
        for index, call in enumerate(calls):
            began = clock()
            call()
            best[index] = min(best[index], clock() - began)
    return best


def compare_kinds(name: str, options: argparse.Namespace) -> list[Row]:
    config = describe(SHAPES[name])
    arguments = (options.rows, options.context, options.threads)
    with torch.inference_mode():
        steps = [Step.make(config, kind, *arguments) for kind in KINDS]
        data = torch.ones(READ_FLOATS)
        cpu_memory.advise_huge_pages(data)
        order = torch.arange(0, READ_FLOATS, READ_BLOCK)

        def read() -> float:
            return cpu_memory.sum_blocks(data, order, READ_BLOCK, options.threads)

        *times, reading = fastest([*(s.run for s in steps), read], options.steps, options.threads)
    bandwidth = READ_FLOATS * 4 / reading
    rows: list[Row] = []
    for kind, step, seconds in zip(KINDS, steps, times, strict=True):
        case = f"{name} {kind.name}"
        rows.append(Row(case, "ms", seconds * 1e3, times[0] * 1e3, "float32"))
        at_best = step.num_bytes / bandwidth * 1e3
        rows.append(Row(case, "ms", seconds * 1e3, at_best, "weight bytes / bandwidth"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not cpu_library.is_available():
        raise SystemExit("the compiled kernels were not built")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = [row for name in options.shape for row in compare_kinds(name, options)]
    title = f"decode step, {options.rows} rows, {options.threads} threads"
    print_rows(f"{title} ({cpu_library.select_instruction_set()})", rows)
    if options.json:
        write_json(options.json, title, rows)


if __name__ == "__main__":
    main()
