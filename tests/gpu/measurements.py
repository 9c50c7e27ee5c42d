"""(d) How fast it is, as shares of what the same machine was measured to do just before."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from attention_factories import Heads
from factories import LlamaShape
from model_driver import GREEDY, HandWritten

from pagefleet.kernels.backend import KernelBackend
from pagefleet.kernels.metadata import AttentionMetadata, HostLayout
from pagefleet.scheduler.output import CopyJob, CopyKind, SchedulerOutput
from pagefleet.workers.block_storage import BlockLayout, BlockStorage
from pagefleet.workers.model_runner import ModelRunner

from .clock import Clock, Finding
from .model_checks import load
from .random_models import num_parameters


@dataclass(frozen=True, slots=True)
class Peaks:
    """What the machine does. copy: bytes read and written per second on the device; to_host,
    to_device: bytes per second over PCIe; flops: of a bfloat16 product."""

    copy: float
    to_host: float
    to_device: float
    flops: float

    def findings(self) -> Iterator[Finding]:
        yield Finding("machine", "device copy, read and written", self.copy / 1e9, "GB/s")
        yield Finding("machine", "device to pinned host", self.to_host / 1e9, "GB/s")
        yield Finding("machine", "pinned host to device", self.to_device / 1e9, "GB/s")
        yield Finding("machine", "bfloat16 product", self.flops / 1e12, "TFLOP/s")


LLAMA_HEADS = Heads(32, 8, 128)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured. A rehearsal has small ones."""

    copy_bytes: int = 2**32
    host_bytes: int = 2**29
    product: int = 8192
    heads: Heads = LLAMA_HEADS
    context: int = 4096
    batch: int = 64
    batches: tuple[int, ...] = (1, 32, 128)
    step_context: int = 1024
    prompt: int = 4096
    block_size: int = 16


REHEARSAL = Sizes(2**16, 2**14, 64, Heads(4, 2, 16), 40, 3, (1, 4), 20, 64)


def measure_peaks(clock: Clock, sizes: Sizes) -> Peaks:
    device, on_gpu = clock.device, clock.device.type == "cuda"
    source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2 * sizes.copy_bytes / clock.best(lambda: target.copy_(source))
    host = torch.zeros(sizes.host_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    part = source[: sizes.host_bytes]
    to_host = sizes.host_bytes / clock.best(lambda: host.copy_(part, non_blocking=True))
    to_device = sizes.host_bytes / clock.best(lambda: part.copy_(host, non_blocking=True))
    dtype = torch.bfloat16 if on_gpu else torch.float32
    n = sizes.product
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    flops = 2 * n**3 / clock.best(lambda: a @ b)
    return Peaks(copy, to_host, to_device, flops)


def measure_decode_attention(
    backend: KernelBackend, clock: Clock, sizes: Sizes, peaks: Peaks, kv_dtype: torch.dtype
) -> Finding:
    """One layer at the full batch and context, over as many layers as the caches do not hold."""
    heads, block_size, device = sizes.heads, sizes.block_size, clock.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    per_row = -(-sizes.context // block_size)
    num_blocks = sizes.batch * per_row
    shape = (num_blocks, 2, 2, block_size, heads.num_kv_heads, heads.head_dim)
    pool = torch.zeros(shape, dtype=torch.uint8, device=device).to(kv_dtype)
    tables = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    tables = tables.reshape(sizes.batch, per_row)
    lens = np.full(sizes.batch, sizes.context, dtype=np.int32)
    host = HostLayout(np.arange(sizes.batch + 1, dtype=np.int32), lens, tables)
    last = lens.astype(np.int64) - 1
    metadata = AttentionMetadata(
        query_starts=torch.from_numpy(host.query_starts).to(device),
        context_lens=torch.from_numpy(lens).to(device),
        block_tables=torch.from_numpy(tables).to(device),
        positions=torch.from_numpy(last).to(device),
        slots=torch.from_numpy(tables[:, -1].astype(np.int64) * block_size).to(device),
        num_decodes=sizes.batch,
        max_query_len=1,
        max_context_len=sizes.context,
        host=host,
    )
    q = torch.randn(sizes.batch, heads.num_heads, heads.head_dim, device=device).to(dtype)
    scale = heads.head_dim**-0.5

    def both_layers() -> None:
        for layer in (0, 1):
            backend.attention(q, pool[:, layer], metadata, scale)

    seconds = clock.best(both_layers) / 2
    num_bytes = pool[:, 0].numel() * pool.element_size()
    name = f"{backend.name}, {str(kv_dtype).removeprefix('torch.')} cache"
    case = f"decode attention, batch {sizes.batch} x {sizes.context}, {name}"
    # Narrow caches are told, not judged: they are half the bytes at best.
    target = 0.8 if kv_dtype == dtype and backend.name == "flashinfer" else None
    share = num_bytes / seconds / peaks.copy
    return Finding("speed", case, share, "of copy", target, note=f"{seconds * 1e6:.0f} us")


def measure_copies(
    layout: BlockLayout, backend: KernelBackend, clock: Clock, sizes: Sizes, peaks: Peaks
) -> Iterator[Finding]:
    """Copy-on-write of 64 blocks in one launch, and swaps of scattered runs in each direction."""
    storage = BlockStorage(layout, 512, 256, clock.device, backend)
    storage.pool.view(torch.uint8).zero_()
    storage.host_pool.view(torch.uint8).zero_()
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(rng.permutation(512)[:128]).to(clock.device)
    slots = torch.full((64,), layout.block_size, device=clock.device)
    seconds = clock.best(lambda: backend.copy_slots(storage.pool, ids[:64], ids[64:], slots))
    rate = 2 * 64 * layout.num_bytes / seconds / peaks.copy
    flat = storage.pool[:64].clone()
    whole = clock.best(lambda: flat.copy_(storage.pool[64:128]))
    note = f"{seconds * 1e6:.0f} us; one copy of as many bytes {whole * 1e6:.0f} us"
    yield Finding("speed", "copy on write of 64 blocks", rate, "of copy", 0.8, note=note)
    yield Finding("speed", "the same against one copy", whole / seconds, "of it")
    runs = np.concatenate([np.arange(start, start + 4) for start in range(0, 256, 8)])
    for kind, peak in ((CopyKind.STORE, peaks.to_host), (CopyKind.LOAD, peaks.to_device)):
        yield _measure_swap(storage, kind, runs.astype(np.int32), peak)
    storage.close()


def _measure_swap(
    storage: BlockStorage, kind: CopyKind, blocks: np.ndarray, peak: float
) -> Finding:
    best = float("inf")
    for attempt in range(6):
        storage.submit((CopyJob(attempt, kind, blocks, blocks),))
        done = ()
        while not done:
            done = storage.poll()
        best = min(best, done[0].elapsed_s or float("inf"))
    rate = len(blocks) * storage.layout.num_bytes / best / peak
    note = f"{len(blocks)} blocks in runs of 4, {rate * peak / 1e9:.1f} GB/s"
    return Finding("speed", f"swap, {kind.value}", rate, "of peak", 0.9, note=note)


def measure_steps(
    folder: Path, shape: LlamaShape, clock: Clock, sizes: Sizes, peaks: Peaks, **settings: object
) -> Iterator[Finding]:
    """Whole steps of a model, sampling and read-back included."""
    most = max(sizes.batches)
    num_blocks = most * (-(-sizes.step_context // sizes.block_size) + 2)
    runner = load(
        folder,
        clock.device,
        max_num_sequences=most,
        max_num_batched_tokens=max(most, sizes.prompt),
        max_context=max(sizes.prompt, sizes.step_context) + 64,
        num_blocks=max(num_blocks, -(-sizes.prompt // sizes.block_size) + 2),
        block_size=sizes.block_size,
        **settings,
    )
    element = 2 if clock.device.type == "cuda" else 4
    weights = num_parameters(shape) * element
    token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * element
    for batch in sizes.batches:
        steps = DecodeSteps(runner, batch, sizes.step_context)
        seconds = clock.best(steps.run, repeats=4, inner=5)
        bytes_read = weights + batch * sizes.step_context * token
        products = 2 * num_parameters(shape) * batch
        roofline = max(bytes_read / peaks.copy, products / peaks.flops)
        case = f"decode step, batch {batch} at {sizes.step_context}, {runner.decoder.backend.name}"
        note = f"{seconds * 1e3:.2f} ms, {batch / seconds:.0f} tokens/s"
        yield Finding("speed", case, roofline / seconds, "of roofline", 0.7, note=note)
    if clock.device.type == "cuda":
        yield _count_waits(runner, sizes)
    yield _measure_prefill(runner, shape, clock, sizes, peaks)
    runner.close()


class DecodeSteps:
    """A batch in mid-decode: junk in its blocks, the last position computed again and again."""

    def __init__(self, runner: ModelRunner, batch: int, context: int) -> None:
        hand = HandWritten(runner)
        sampling = replace(GREEDY, max_tokens=1)
        new = [hand.row(row, [1] * context, sampling) for row in range(batch)]
        self._runner = runner
        self._batch = runner.batch
        self._output = hand.output(dict.fromkeys(range(batch), (context - 1, 1)))
        self._rows = self._output.rows
        runner.execute(replace(self._output, new_rows=tuple(new)))
        self._length = context

    def run(self) -> None:
        """The token that was sampled is forgotten again."""
        self._batch.num_tokens[self._rows] = self._length
        self._runner.execute(self._output)


def _count_waits(runner: ModelRunner, sizes: Sizes) -> Finding:
    """How often a decode step waits for the device: once, for its tokens."""
    steps = DecodeSteps(runner, min(sizes.batches[-1], 8), sizes.step_context)
    steps.run()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(4):
                steps.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(w.message) for w in caught if "synchroniz" in str(w.message)]
    return Finding(
        "speed", "waits for the device in a decode step", len(waits) / 4, "times", 1.0, at_most=True
    )


def _measure_prefill(
    runner: ModelRunner, shape: LlamaShape, clock: Clock, sizes: Sizes, peaks: Peaks
) -> Finding:
    hand, count = HandWritten(runner), sizes.prompt
    prompt = [token % 100 for token in range(count)]
    output: SchedulerOutput = hand.output({0: (0, count)}, [hand.row(0, prompt)])

    def prefill() -> None:
        runner.execute(output)

    seconds = clock.best(prefill, repeats=3, inner=1)
    # The head is multiplied by one row; attention sees half of the square.
    head = shape.vocab_size * shape.hidden_size
    products = 2 * (num_parameters(shape) - head) * count
    pairs = count * (count + 1) / 2
    attention = 4 * pairs * shape.num_layers * shape.num_heads * shape.head_dim
    share = (products + attention) / seconds / peaks.flops
    note = f"{seconds * 1e3:.1f} ms, {count / seconds:.0f} tokens/s"
    case = f"prefill of {count}, {runner.decoder.backend.name}"
    return Finding("speed", case, share, "of product", 0.55, note=note)
