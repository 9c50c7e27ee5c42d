"""FlashInfer's attention wrappers and what they plan on the host, once per step and layer shape.

Knows the page-table form that FlashInfer reads (page ids in a row, where each sequence's begin, how
full its last page is) and when a plan holds; not what else the backend does. FlashInfer itself
comes in as a value, so that a twin can stand for it where there is no GPU.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .metadata import AttentionMetadata, HostLayout

WORKSPACE_BYTES = 128 * 2**20  # what FlashInfer recommends for partial results of split keys
HEAD_DIMS = (64, 128, 256)
# FlashInfer's other decode kernel computes without tensor cores, which few heads per KV head
# leave idle; it is compiled for these.
_PLAIN_GROUPS = (1, 2, 3)
_LAYOUT = "NHD"


class Wrapper(Protocol):
    """What FlashInfer's prefill and decode wrappers have in common. `plan` differs."""

    def run(self, q: Tensor, paged_kv_cache: Tensor, *, out: Tensor) -> Tensor: ...


class DecodeWrapper(Wrapper, Protocol):
    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        sm_scale: float,
    ) -> None: ...


class PrefillWrapper(Wrapper, Protocol):
    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        sm_scale: float,
    ) -> None: ...


class AttentionLibrary(Protocol):
    """The part of FlashInfer that this file calls."""

    def BatchDecodeWithPagedKVCacheWrapper(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str,
        *,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str,
    ) -> DecodeWrapper: ...

    def BatchPrefillWithPagedKVCacheWrapper(
        self, float_workspace_buffer: Tensor, kv_layout: str, *, backend: str
    ) -> PrefillWrapper: ...


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a plan depends on beside the step: layers that agree in it share one."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    scale: float
    window: int | None
    soft_cap: float | None

    @property
    def is_supported(self) -> bool:
        """Whether FlashInfer has kernels for it."""
        return self.head_dim in HEAD_DIMS and self.dtype in (torch.float16, torch.bfloat16)

    @property
    def window_left(self) -> int:
        """FlashInfer counts the keys before a query's own; -1 = all."""
        return -1 if self.window is None else self.window - 1

    @property
    def uses_tensor_cores(self) -> bool:
        """Which of FlashInfer's two decode kernels."""
        group = self.num_heads // self.num_kv_heads
        return group not in _PLAIN_GROUPS or self.kv_dtype.itemsize < self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PageTable:
    """Some sequences' blocks as FlashInfer reads them. starts, last_lens: int32, in pinned host
    memory; pages: int32, on the device."""

    starts: Tensor
    last_lens: Tensor
    pages: Tensor

    @classmethod
    def of(
        cls, host: HostLayout, first: int, end: int, block_size: int, device: torch.device
    ) -> "PageTable":
        """Of sequences [first, end)."""
        lens = host.context_lens[first:end]
        needed = -(-lens // block_size)
        starts = np.zeros(len(lens) + 1, dtype=np.int32)
        np.cumsum(needed, out=starts[1:])
        # Row by row, the entries that are defined.
        tables = host.block_tables[first:end]
        pages = tables[np.arange(tables.shape[1]) < needed[:, None]]
        last_lens = lens - (needed - 1) * block_size
        return cls(
            pinned(starts, device),
            pinned(last_lens.astype(np.int32), device),
            pinned(pages.astype(np.int32), device).to(device, non_blocking=True),
        )


@dataclass(slots=True)
class StepPlan:
    """The wrappers planned for one step and one shape. None = the step has no such sequences."""

    decode: DecodeWrapper | None = None
    prefill: PrefillWrapper | None = None


@dataclass(slots=True)
class GraphPlans:
    """What a CUDA graph's decode step was planned with: buffers that the graph reads, and a wrapper
    for every shape that it met. metadata: kept, since its identity is the key."""

    metadata: AttentionMetadata
    host: HostLayout
    starts: Tensor
    last_lens: Tensor
    decode: dict[AttentionShape, DecodeWrapper] = field(
        default_factory=dict[AttentionShape, DecodeWrapper]
    )


class AttentionPlans:
    """All wrappers of one device. A step is planned when its first layer asks; a graph's step
    before each replay."""

    def __init__(self, library: AttentionLibrary, device: torch.device) -> None:
        self._library = library
        self._device = device
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._decode: dict[AttentionShape, DecodeWrapper] = {}
        self._prefill: dict[AttentionShape, PrefillWrapper] = {}
        self._graphs: dict[int, GraphPlans] = {}
        self._graph_pages = torch.empty(0, dtype=torch.int32, device=device)
        self._step: AttentionMetadata | None = None
        self._planned: dict[AttentionShape, StepPlan] = {}
        self._host: HostLayout | None = None
        self._tables: dict[tuple[int, int, int], PageTable] = {}
        self._fence = torch.cuda.Event() if device.type == "cuda" else None

    def of(self, metadata: AttentionMetadata, shape: AttentionShape) -> StepPlan:
        """The plan that holds for a step's layers of this shape."""
        graph = self._graphs.get(id(metadata))
        if graph is not None:
            if shape not in graph.decode:
                graph.decode[shape] = self._graph_wrapper(graph, shape)
                self._begin(graph.host, None)
                self._plan_decode(graph.decode[shape], shape, len(graph.last_lens))
            return StepPlan(decode=graph.decode[shape])
        if metadata is not self._step:
            self._begin(metadata.host or _read_layout(metadata), metadata)
        if shape not in self._planned:
            self._planned[shape] = self._plan(metadata, shape)
        return self._planned[shape]

    def plan_graph(self, metadata: AttentionMetadata, host: HostLayout, max_num_pages: int) -> None:
        """Plan a graph's decode step for new contents of its tensors; the first call announces it.

        max_num_pages: of all sequences of any graph's step together.
        """
        graph = self._graphs.get(id(metadata))
        if graph is None:
            size = len(metadata.context_lens)
            starts = torch.zeros(size + 1, dtype=torch.int32, device=self._device)
            last_lens = torch.ones(size, dtype=torch.int32, device=self._device)
            if len(self._graph_pages) < max_num_pages:
                assert not self._graphs, "graphs read the first one's buffer of pages"
                self._graph_pages = torch.zeros(
                    max_num_pages, dtype=torch.int32, device=self._device
                )
            graph = self._graphs[id(metadata)] = GraphPlans(metadata, host, starts, last_lens)
        graph.host = host
        self._begin(host, None)
        for shape, wrapper in graph.decode.items():
            self._plan_decode(wrapper, shape, len(graph.last_lens))

    def _begin(self, host: HostLayout, step: AttentionMetadata | None) -> None:
        """A step's first plan. step: None = a graph's.

        Plans go through pinned memory of the wrappers': wait until the last ones have left it,
        which they have unless the GPU is more than a step behind.
        """
        if self._fence is not None:
            self._fence.synchronize()
        self._host, self._tables = host, {}
        self._step, self._planned = step, {}

    def _plan(self, metadata: AttentionMetadata, shape: AttentionShape) -> StepPlan:
        plan = StepPlan()
        num_decodes, num_sequences = metadata.num_decodes, len(metadata.context_lens)
        if num_decodes > 0:
            if shape not in self._decode:
                self._decode[shape] = self._library.BatchDecodeWithPagedKVCacheWrapper(
                    self._workspace,
                    _LAYOUT,
                    use_tensor_cores=shape.uses_tensor_cores,
                    backend="fa2",
                )
            plan.decode = self._decode[shape]
            self._plan_decode(plan.decode, shape, num_decodes)
        if num_decodes < num_sequences:
            if shape not in self._prefill:
                self._prefill[shape] = self._library.BatchPrefillWithPagedKVCacheWrapper(
                    self._workspace, _LAYOUT, backend="fa2"
                )
            plan.prefill = self._prefill[shape]
            self._plan_prefill(plan.prefill, shape, num_decodes, num_sequences)
        return plan

    def _plan_decode(self, wrapper: DecodeWrapper, shape: AttentionShape, num_decodes: int) -> None:
        table = self._table(0, num_decodes, shape.block_size)
        wrapper.plan(
            table.starts,
            table.pages,
            table.last_lens,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            window_left=shape.window_left,
            logits_soft_cap=shape.soft_cap,
            q_data_type=shape.dtype,
            kv_data_type=shape.kv_dtype,
            sm_scale=shape.scale,
        )
        self._mark()

    def _plan_prefill(
        self, wrapper: PrefillWrapper, shape: AttentionShape, first: int, end: int
    ) -> None:
        assert self._host is not None, "no step was begun"
        starts = self._host.query_starts[first : end + 1]
        table = self._table(first, end, shape.block_size)
        wrapper.plan(
            pinned((starts - starts[0]).astype(np.int32), self._device),
            table.starts,
            table.pages,
            table.last_lens,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            causal=True,
            window_left=shape.window_left,
            logits_soft_cap=shape.soft_cap,
            q_data_type=shape.dtype,
            kv_data_type=shape.kv_dtype,
            sm_scale=shape.scale,
        )
        self._mark()

    def _mark(self) -> None:
        if self._fence is not None:
            self._fence.record(torch.cuda.current_stream(self._device))

    def _table(self, first: int, end: int, block_size: int) -> PageTable:
        key = (first, end, block_size)
        if key not in self._tables:
            assert self._host is not None, "no step was begun"
            self._tables[key] = PageTable.of(self._host, first, end, block_size, self._device)
        return self._tables[key]

    def _graph_wrapper(self, graph: GraphPlans, shape: AttentionShape) -> DecodeWrapper:
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            _LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=shape.uses_tensor_cores,
            paged_kv_indptr_buffer=graph.starts,
            paged_kv_indices_buffer=self._graph_pages,
            paged_kv_last_page_len_buffer=graph.last_lens,
            backend="fa2",
        )


def pinned(array: NDArray[np.int32], device: torch.device) -> Tensor:
    """Where a copy to the device need not wait; torch keeps the memory until that has ended."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _read_layout(metadata: AttentionMetadata) -> HostLayout:
    """From the device, which waits for it: for callers that did not keep the host's."""
    tensors = (metadata.query_starts, metadata.context_lens, metadata.block_tables)
    return HostLayout(*(tensor.cpu().numpy() for tensor in tensors))
