"""(a) Every kernel of every GPU backend against its plain-torch twin in float32, at odd sizes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from attention_factories import Heads, PagedStep, make_cos_sin, make_step
from torch import Tensor

from pagefleet.kernels.reference import ReferenceBackend
from pagefleet.kernels.sampling import DrawParams, apply_filters, softmax_weights
from pagefleet.kernels.triton_backend import TritonBackend

REFERENCE = ReferenceBackend()
MIXED = ([1, 33, 700, 2049, 19, 160, 5, 400], [1, 1, 1, 1, 17, 160, 2, 100])
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
FP8 = torch.float8_e4m3fn
WINDOWS = [(None, None), (129, None), (None, 30.0), (40, 3.0)]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far a kernel is from its twin, in units of its dtype's tolerance: at most 1 is right."""

    case: str
    error: float


def compare(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """The greatest difference over tolerance * (1 + size); NaN anywhere is infinitely far."""
    actual, expected = actual.float(), expected.float()
    error = (actual - expected).abs() / (TOLERANCES[dtype] * (1 + expected.abs()))
    return float(torch.nan_to_num(error, nan=float("inf")).max())


@dataclass(frozen=True, slots=True)
class Suite:
    """Which shapes a backend is asked for. is_small: for a rehearsal in an interpreter."""

    backend: TritonBackend
    dtype: torch.dtype
    heads: tuple[Heads, ...]
    device: str
    with_windows: bool = True
    with_fp8: bool = True
    is_small: bool = False

    def run(self) -> Iterator[Comparison]:
        for heads in self.heads:
            for block_size in (16,) if self.is_small else (16, 1):
                yield from self._attention(heads, block_size)
            yield self._rope(heads, heads.head_dim, self.dtype)
            if self.with_fp8 and not self.is_small:  # the interpreter rounds some of them down
                yield self._rope(heads, heads.head_dim, FP8)
        yield self._rope(self.heads[0], 0, self.dtype)
        yield from self._rows()
        yield self._copies()
        yield self._filters()

    @property
    def _lens(self) -> tuple[list[int], list[int]]:
        return ([1, 33, 20, 5], [1, 1, 7, 2]) if self.is_small else MIXED

    def _name(self, kernel: str, heads: Heads | None = None, more: str = "") -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        shape = "" if heads is None else f" {heads.num_heads}/{heads.num_kv_heads}x{heads.head_dim}"
        return f"{self.backend.name} {dtype} {kernel}{shape}{more}"

    def _attention(self, heads: Heads, block_size: int) -> Iterator[Comparison]:
        kv_dtypes = [self.dtype, FP8] if self.with_fp8 else [self.dtype]
        windows = WINDOWS if self.with_windows else WINDOWS[:1]
        for kv_dtype in kv_dtypes:
            step = make_step(
                heads, block_size, *self._lens, dtype=self.dtype, kv_dtype=kv_dtype,
                device=self.device,
            )  # fmt: skip
            for window, soft_cap in windows:
                arguments = (step.metadata, heads.head_dim**-0.5, window, soft_cap)
                found = self.backend.attention(step.q, step.layer, *arguments)
                wide = step.layer.float()
                expected = REFERENCE.attention(step.q.float(), wide, *arguments)
                more = f" block {block_size} window {window} cap {soft_cap}"
                more += " fp8" if kv_dtype is FP8 else ""
                error = compare(found, expected, self.dtype)
                yield Comparison(self._name("attention", heads, more), error)

    def _rope(self, heads: Heads, rotary_dim: int, kv_dtype: torch.dtype) -> Comparison:
        step = make_step(
            heads, 16, *self._lens, dtype=self.dtype, kv_dtype=kv_dtype, device=self.device
        )
        cos_sin = make_cos_sin(4096, rotary_dim, self.device)
        errors: list[float] = []
        pools = [step.pool.clone(), step.pool.clone()]
        counts = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
        turned: list[Tensor] = []
        for backend, pool in zip((self.backend, REFERENCE), pools, strict=True):
            fused = torch.cat([step.q, step.k * 3, step.v], dim=1)
            q, k, v = fused.split(counts, dim=1)
            turned.append(
                backend.rope_and_cache(q, k, v, cos_sin, pool[:, 1], step.metadata).clone()
            )
        errors.append(compare(*turned, self.dtype))
        # A cache of fp8 may round the other way; one place of its mantissa is an eighth.
        written, expected = (pool.float().nan_to_num(nan=9.0) for pool in pools)
        near = 0.13 if kv_dtype is FP8 else TOLERANCES[self.dtype]
        errors.append(float(((written - expected).abs() / (near * (1 + expected.abs()))).max()))
        more = f" rotary {rotary_dim}" + (" fp8" if kv_dtype is FP8 else "")
        return Comparison(self._name("rope and cache", heads, more), max(errors))

    def _rows(self) -> Iterator[Comparison]:
        for rows, width in [(3, 64)] if self.is_small else [(1, 128), (7, 576), (300, 4096)]:
            x, residual = (
                torch.randn(rows, width, device=self.device).to(self.dtype) for _ in range(2)
            )
            weight = torch.rand(width, device=self.device).to(self.dtype)
            wide = REFERENCE.rms_norm(x.float(), weight.float(), 1e-5)
            name = self._name("norm", more=f" {rows}x{width}")
            found = self.backend.rms_norm(x, weight, 1e-5)
            yield Comparison(name, compare(found, wide, self.dtype))
            total = residual.float() + x.float()
            found = self.backend.add_rms_norm(x.clone(), residual, weight, 1e-5)
            expected = REFERENCE.rms_norm(total, weight.float(), 1e-5)
            errors = [compare(found, expected, self.dtype), compare(residual, total, self.dtype)]
            yield Comparison(self._name("add norm", more=f" {rows}x{width}"), max(errors))
            pairs: list[tuple[str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
                ("silu", self.backend.silu_and_mul, REFERENCE.silu_and_mul),
                ("gelu", self.backend.gelu_tanh_and_mul, REFERENCE.gelu_tanh_and_mul),
            ]
            for kernel, ours, theirs in pairs:
                error = compare(ours(x), theirs(x.float()), self.dtype)
                yield Comparison(self._name(kernel, more=f" {rows}x{width}"), error)

    def _copies(self) -> Comparison:
        pool = torch.randn(40, 3, 2, 16, 3, 24, device=self.device).to(self.dtype)
        expected = pool.clone()
        numbers = torch.randperm(40, device=self.device)
        arguments = numbers[:17], numbers[17:34], torch.arange(17, device=self.device) % 17
        self.backend.copy_slots(pool, *arguments)
        REFERENCE.copy_slots(expected, *arguments)
        return Comparison(self._name("copy on write"), 0.0 if torch.equal(pool, expected) else 99.0)

    def _filters(self) -> Comparison:
        """What may be drawn, and how likely; on the CPU by the filters of borders."""
        vocab_size, count = (500 if self.is_small else 30_011), 9
        logits = 3 * torch.randn(count, vocab_size, device=self.device)
        columns = {
            "temperature": torch.tensor([0.5, 1.0, 2.0] * 3),
            "top_k": torch.tensor([0, 5, 1, 40, 0, 300, 0, 0, 50]),
            "top_p": torch.tensor([1.0, 1.0, 0.5, 0.9, 0.2, 0.99, 0.7, 1.0, 0.95]),
            "min_p": torch.tensor([0.0] * 6 + [0.1, 0.01, 0.5]),
            "uniforms": torch.zeros(count),
        }
        params = DrawParams(**{name: column.to(self.device) for name, column in columns.items()})
        found = self.backend.filtered_weights(logits, params).cpu()
        expected = softmax_weights(logits.cpu(), columns["temperature"])
        apply_filters(expected, columns["top_k"], columns["top_p"], columns["min_p"])
        shares = [weights / weights.sum(-1, keepdim=True) for weights in (found, expected)]
        # Sums in another order may move a border by one: what differs may weigh next to nothing.
        error = float((shares[0] - shares[1]).abs().sum(-1).max()) / 1e-3
        return Comparison(self._name("filters"), error)


def check_determinism(device: str, is_small: bool = False) -> Comparison:
    """A chunk's attention is bitwise that of the whole prompt, whatever is beside it."""
    backend, heads = TritonBackend(deterministic=True), Heads(8, 2, 16 if is_small else 128)
    length = 70 if is_small else 1000
    whole = make_step(heads, 16, [length], [length], device=device)
    scale = heads.head_dim**-0.5
    expected = backend.attention(whole.q, whole.layer, whole.metadata, scale)
    worst = 0.0
    for begin, end in [(0, 1), (7, length // 2), (length - 1, length)]:
        beside = make_step(heads, 16, [20, end], [1, end - begin], device=device)
        part = PagedStep(
            beside.metadata,
            torch.cat([beside.pool, whole.pool]),
            torch.cat([beside.q[:1], whole.q[begin:end]]),
            beside.k,
            beside.v,
        )
        table = whole.metadata.block_tables[0, : -(-end // 16)] + len(beside.pool)
        part.metadata.block_tables[1, : len(table)] = table
        out = backend.attention(part.q, part.layer, part.metadata, scale)[1:]
        worst = max(worst, 0.0 if torch.equal(out, expected[begin:end]) else 99.0)
    return Comparison("triton deterministic attention by chunks", worst)
