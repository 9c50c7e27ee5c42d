"""A plain-torch twin of the part of FlashInfer that our backend calls, for machines without a GPU.

It computes what FlashInfer's documentation says, from the arguments that FlashInfer gets, and
binds every call to the signature of the installed package where there is one. So it tells whether
our side asks for the right thing; whether FlashInfer answers, tests/gpu tells.
"""

import importlib.util
import inspect
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor


def installed() -> ModuleType | None:
    """FlashInfer itself, which can be imported without a GPU, or None where it is missing."""
    if importlib.util.find_spec("flashinfer") is None:
        return None
    import flashinfer
    import flashinfer.sampling

    return flashinfer


class FlashInferTwin:
    """`calls` counts each function that was called, and bound, by name."""

    def __init__(self, real: ModuleType | None = None) -> None:
        self.real = real
        self.calls: dict[str, int] = {}
        self.sampling = SamplingTwin(self)

    def note(self, name: str, function: Callable[..., object] | None, *args: object, **kwargs):
        """Raises TypeError where the real function would not take these arguments."""
        self.calls[name] = self.calls.get(name, 0) + 1
        if function is not None:
            inspect.signature(function).bind(*args, **kwargs)

    def _note(self, name: str, *args: object, **kwargs: object) -> None:
        self.note(name, getattr(self.real, name, None) if self.real else None, *args, **kwargs)

    def BatchDecodeWithPagedKVCacheWrapper(self, *args, **kwargs):
        self._note("BatchDecodeWithPagedKVCacheWrapper", *args, **kwargs)
        return WrapperTwin(self, "BatchDecodeWithPagedKVCacheWrapper", *args, **kwargs)

    def BatchPrefillWithPagedKVCacheWrapper(self, *args, **kwargs):
        self._note("BatchPrefillWithPagedKVCacheWrapper", *args, **kwargs)
        return WrapperTwin(self, "BatchPrefillWithPagedKVCacheWrapper", *args, **kwargs)

    def rmsnorm(self, *args, **kwargs) -> Tensor:
        self._note("rmsnorm", *args, **kwargs)
        return _norm(*args, **kwargs)

    def fused_add_rmsnorm(self, x: Tensor, residual: Tensor, *args, **kwargs) -> None:
        self._note("fused_add_rmsnorm", x, residual, *args, **kwargs)
        residual += x
        x.copy_(_norm(residual, *args, **kwargs))

    def silu_and_mul(self, *args, **kwargs) -> Tensor:
        self._note("silu_and_mul", *args, **kwargs)
        gate, up = args[0].float().chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up).to(args[0].dtype)

    def gelu_tanh_and_mul(self, *args, **kwargs) -> Tensor:
        self._note("gelu_tanh_and_mul", *args, **kwargs)
        gate, up = args[0].float().chunk(2, -1)
        return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(args[0].dtype)

    def apply_rope_with_cos_sin_cache_inplace(
        self, positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor
    ) -> None:
        self._note(
            "apply_rope_with_cos_sin_cache_inplace",
            *(positions, query, key, head_size, cos_sin_cache),
        )
        half = cos_sin_cache.shape[1] // 2
        cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, -1)
        for x in (query, key):
            heads = x.view(len(x), -1, head_size)
            first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
            heads[..., :half] = (first * cos - second * sin).to(x.dtype)
            heads[..., half : 2 * half] = (second * cos + first * sin).to(x.dtype)

    def append_paged_kv_cache(
        self,
        append_key: Tensor,
        append_value: Tensor,
        batch_indices: Tensor,
        positions: Tensor,
        paged_kv_cache: Tensor,
        kv_indices: Tensor,
        kv_indptr: Tensor,
        kv_last_page_len: Tensor,
    ) -> None:
        arguments = (append_key, append_value, batch_indices, positions, paged_kv_cache)
        self._note("append_paged_kv_cache", *arguments, kv_indices, kv_indptr, kv_last_page_len)
        indices = (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in indices)
        assert append_key.dtype == append_value.dtype == paged_kv_cache.dtype
        page_size = paged_kv_cache.shape[2]
        for token, (sequence, position) in enumerate(
            zip(batch_indices.tolist(), positions.tolist(), strict=True)
        ):
            page = kv_indices[int(kv_indptr[sequence]) + position // page_size]
            paged_kv_cache[page, 0, position % page_size] = append_key[token]
            paged_kv_cache[page, 1, position % page_size] = append_value[token]


class WrapperTwin:
    """Both attention wrappers: a decode is a prefill of one query per sequence."""

    def __init__(self, library: FlashInferTwin, kind: str, workspace: Tensor, *_, **options):
        self._library = library
        self._kind = kind
        self._options = options
        self._real = getattr(library.real, kind, None) if library.real else None
        assert workspace.dtype == torch.uint8 and not workspace.any(), "has to be zeros at first"

    def plan(self, *args, **kwargs) -> None:
        # The decode wrapper's `plan` takes anything; what it hands on to has the arguments.
        planner = getattr(self._real, "_plan_impl", None) or getattr(self._real, "plan", None)
        name = f"{self._kind}.plan"
        self._library.note(name, planner, *((self,) if planner else ()), *args, **kwargs)
        self._is_prefill = "Prefill" in self._kind
        if self._is_prefill:
            assert kwargs["causal"]
            self._query_starts, *args = args
        starts, pages, last_lens, self._num_heads, num_kv_heads, head_dim, page_size = args
        assert starts.device.type == last_lens.device.type == "cpu", "would wait for the device"
        self._shape = (num_kv_heads, head_dim, page_size)
        self._settings = kwargs
        if self._options.get("use_cuda_graph"):
            self._into_buffers(starts, pages, last_lens)
        else:
            self._starts, self._pages, self._last_lens = starts, pages, last_lens
        if not self._is_prefill:
            self._query_starts = torch.arange(len(last_lens) + 1)

    def _into_buffers(self, starts: Tensor, pages: Tensor, last_lens: Tensor) -> None:
        names = ("indptr", "indices", "last_page_len")
        buffers = [self._options[f"paged_kv_{name}_buffer"] for name in names]
        for buffer, values in zip(buffers, (starts, pages, last_lens), strict=True):
            assert len(values) <= len(buffer) and buffer.dtype == values.dtype
            buffer[: len(values)] = values
        assert len(last_lens) == len(buffers[2]), "a graph's batch has one size"
        self._starts, self._pages, self._last_lens = buffers

    def run(self, q: Tensor, paged_kv_cache: Tensor, *, out: Tensor) -> Tensor:
        real = getattr(self._real, "run", None)
        name = f"{self._kind}.run"
        self._library.note(name, real, *((self,) if real else ()), q, paged_kv_cache, out=out)
        num_kv_heads, head_dim, page_size = self._shape
        assert paged_kv_cache.shape[1:] == (2, page_size, num_kv_heads, head_dim)
        assert q.dtype == self._settings["q_data_type"]
        assert paged_kv_cache.dtype == self._settings["kv_data_type"]
        assert q.shape[1:] == (self._num_heads, head_dim) and q.stride(2) == 1
        starts = self._starts.tolist()
        queries = self._query_starts.tolist()
        for row, last in enumerate(self._last_lens.tolist()):
            pages = self._pages[starts[row] : starts[row + 1]].long()
            length = (len(pages) - 1) * page_size + last
            keys, values = (
                paged_kv_cache[pages, part].flatten(0, 1)[:length].float() for part in (0, 1)
            )
            part = slice(queries[row], queries[row + 1])
            out[part] = self._attend(q[part].float(), keys, values).to(out.dtype)
        return out

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        group = self._num_heads // keys.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q, keys) * self._settings["sm_scale"]
        cap, left = self._settings["logits_soft_cap"], self._settings["window_left"]
        if cap:
            scores = cap * torch.tanh(scores / cap)
        at = torch.arange(len(keys))
        own = at[len(keys) - len(q) :, None]
        hidden = at > own
        if left >= 0:
            hidden = hidden | (at < own - left)
        return torch.einsum(
            "hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values
        )


class SamplingTwin:
    """`flashinfer.sampling`: probabilities that add up to 1."""

    def __init__(self, library: FlashInferTwin) -> None:
        self._library = library

    def _note(self, name: str, *args: object, **kwargs: object) -> None:
        real = self._library.real
        function = None if real is None else getattr(real.sampling, name)
        self._library.note(f"sampling.{name}", function, *args, **kwargs)

    def softmax(self, *args, **kwargs) -> Tensor:
        self._note("softmax", *args, **kwargs)
        logits, temperature = args
        assert temperature.shape == (len(logits),)
        return (logits / temperature.unsqueeze(1)).softmax(-1)

    def top_k_renorm_probs(self, *args, **kwargs) -> Tensor:
        self._note("top_k_renorm_probs", *args, **kwargs)
        probs, top_k = args
        assert top_k.dtype == torch.int32 and (top_k > 0).all()
        border = probs.sort(-1, descending=True).values.gather(1, top_k.long().unsqueeze(1) - 1)
        return _normalised(probs.masked_fill(probs < border, 0.0))

    def top_p_renorm_probs(self, *args, **kwargs) -> Tensor:
        self._note("top_p_renorm_probs", *args, **kwargs)
        probs, top_p = args
        best = probs.sort(-1, descending=True).values
        reached = best.cumsum(-1) >= top_p.unsqueeze(1)
        reached[:, -1] = True
        border = best.gather(1, reached.int().argmax(-1, keepdim=True))
        return _normalised(probs.masked_fill(probs < border, 0.0))


def _normalised(probs: Tensor) -> Tensor:
    return probs / probs.sum(-1, keepdim=True)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    assert weight.dtype == x.dtype
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)
