"""Decode steps as CUDA graphs: a recording for each of some batch sizes, replayed with new inputs.

Knows which size a step is padded to and the buffers that a recording reads; neither the model nor
how a recording is made on a device, which come in as values. Padded rows are sequences of one
token that stand in a block which nobody is ever given.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateImportUsage=false

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..kernels.metadata import AttentionMetadata, HostLayout
from .input_batch import StepLayout
from .upload import upload_into

Forward = Callable[[Tensor, AttentionMetadata], Tensor]
Plan = Callable[[AttentionMetadata, HostLayout, int], None]

_FIRST_SIZES = (1, 2, 4)
_STEPS = ((64, 8), (128, 16), (256, 32))  # up to this size, in steps of this many
_FARTHER_STEP = 64
# What the driver and the plans of one recording take; its tensors lie in memory that all share.
GRAPH_BYTES = 24 * 2**20


class Graph(Protocol):
    """A recorded computation."""

    output: Tensor

    def replay(self) -> None:
        """Compute `output` anew from what the buffers hold now."""
        ...


Capture = Callable[[Callable[[], Tensor]], Graph]


def graph_sizes(max_num_sequences: int) -> tuple[int, ...]:
    """The batch sizes worth a recording, ascending: a step computes at most a quarter for nothing
    beyond the smallest. The last is what the batch can hold."""
    sizes = [size for size in _FIRST_SIZES if size < max_num_sequences]
    at = 0
    for limit, step in (*_STEPS, (max_num_sequences, _FARTHER_STEP)):
        while at + step <= min(limit, max_num_sequences):
            at += step
            sizes.append(at)
    if not sizes or sizes[-1] < max_num_sequences:
        sizes.append(max_num_sequences)
    return tuple(sizes)


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """null_block: of the pool, never anyone's. max_blocks: of one sequence."""

    sizes: tuple[int, ...]
    block_size: int
    max_blocks: int
    null_block: int
    device: torch.device


class GraphInputs:
    """The buffers that the recording of one batch size reads.

    packed: int64 [4, size], so that one copy fills all but the tables: token ids, positions, slots,
    and in the last row the context lengths, two to a number.
    """

    def __init__(self, size: int, tables: Tensor, settings: GraphSettings) -> None:
        self.size = size
        self._settings = settings
        self._packed = torch.zeros(4, size, dtype=torch.int64, device=settings.device)
        self._tables = tables[:size]
        self.token_ids, positions, slots = self._packed[0], self._packed[1], self._packed[2]
        self.metadata = AttentionMetadata(
            query_starts=torch.arange(size + 1, dtype=torch.int32, device=settings.device),
            context_lens=self._packed[3].view(torch.int32)[:size],
            block_tables=self._tables,
            positions=positions,
            slots=slots,
            num_decodes=size,
            max_query_len=1,
            # What is recorded has to do for every step to come.
            max_context_len=settings.max_blocks * settings.block_size,
        )

    def fill(self, layout: StepLayout | None) -> HostLayout:
        """A step's rows, then padding (None: nothing else); → the same as the host sees it."""
        null_block, block_size = self._settings.null_block, self._settings.block_size
        num_rows = 0 if layout is None else len(layout.token_ids)
        num_blocks = 1 if layout is None else layout.attention.block_tables.shape[1]
        packed = np.zeros((4, self.size), dtype=np.int64)
        packed[2, num_rows:] = null_block * block_size
        context_lens = packed[3].view(np.int32)[: self.size]
        context_lens[num_rows:] = 1
        tables = np.full((self.size, num_blocks), null_block, dtype=np.int32)
        if layout is not None:
            packed[0, :num_rows] = layout.token_ids
            packed[1, :num_rows] = layout.positions
            packed[2, :num_rows] = layout.slots
            context_lens[:num_rows] = layout.attention.context_lens
            tables[:num_rows] = layout.attention.block_tables
        upload_into(packed, self._packed)
        if layout is not None and layout.feed is not None:
            layout.feed.write(self.token_ids)  # what only the device knows yet
        upload_into(tables, self._tables[:, :num_blocks])
        if layout is not None and layout.feed is not None:
            layout.feed.write(self.token_ids)
        query_starts = np.arange(self.size + 1, dtype=np.int32)
        return HostLayout(query_starts, context_lens, tables)


class DecodeGraphs:
    """All recordings of a model.

    forward: token ids and layout to hidden states, over a pool that stays where it is; plan:
    `GraphBackend.plan_graph`; capture: records a function on the device.
    """

    def __init__(
        self, settings: GraphSettings, forward: Forward, plan: Plan, capture: Capture
    ) -> None:
        self._settings = settings
        self._plan = plan
        # One table for all: only one recording runs at a time.
        tables = torch.zeros(
            settings.sizes[-1], settings.max_blocks, dtype=torch.int32, device=settings.device
        )
        self._max_num_pages = tables.numel()
        self._inputs: dict[int, GraphInputs] = {}
        self._graphs: dict[int, Graph] = {}
        # The largest first: the others fit into its memory.
        for size in reversed(settings.sizes):
            inputs = self._inputs[size] = GraphInputs(size, tables, settings)
            plan(inputs.metadata, inputs.fill(None), self._max_num_pages)
            self._graphs[size] = capture(_bind(forward, inputs))

    def holds(self, layout: StepLayout) -> bool:
        """Whether there is a recording for such a step."""
        return layout.is_decode and len(layout.token_ids) <= self._settings.sizes[-1]

    def size_for(self, num_sequences: int) -> int:
        """The smallest size with room for all."""
        return next(size for size in self._settings.sizes if size >= num_sequences)

    def run(self, layout: StepLayout) -> Tensor:
        """Hidden states [T, hidden_size] of a step that `holds`; the next run overwrites them."""
        num_rows = len(layout.token_ids)
        size = self.size_for(num_rows)
        inputs, graph = self._inputs[size], self._graphs[size]
        self._plan(inputs.metadata, inputs.fill(layout), self._max_num_pages)
        graph.replay()
        return graph.output[:num_rows]


def _bind(forward: Forward, inputs: GraphInputs) -> Callable[[], Tensor]:
    return lambda: forward(inputs.token_ids, inputs.metadata)


class CudaGraph:
    """A recording on a GPU."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self._graph = graph
        self.output = output

    def replay(self) -> None:
        """On the current stream."""
        self._graph.replay()


class CudaCapture:
    """Records on a GPU; all recordings share memory, since they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, run: Callable[[], Tensor]) -> CudaGraph:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            run()  # whatever is compiled, planned or allocated once
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the GPU meanwhile: NCCL's watchdog does.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            output = run()
        return CudaGraph(graph, output)
