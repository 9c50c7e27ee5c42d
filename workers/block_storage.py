"""The tensors behind the block pools of one rank, and the copies inside and between them.

Knows bytes and ids of blocks; which block belongs to whom, and when it may be reused, is the
scheduler's. Layout on both tiers: [num_blocks, num_layers, 2, block_size, num_kv_heads,
head_dim], so a block is one contiguous piece over all layers.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from dataclasses import dataclass

import numpy as np
import torch

from ..kernels.backend import KernelBackend
from ..kernels.cpu import CpuBackend
from ..kernels.cpu_memory import advise_huge_pages
from ..scheduler.output import (
    CopyDone,
    CopyJob,
    CopyKind,
    DeviceCopy,
    Int32Array,
    SchedulerOutput,
)
from .block_staging import BlockBatch, StagedBlocks, StagedCopier, read_blocks
from .copier import Copier, byte_view, choose_copy_bytes, make_copier
from .faults import Faults
from .faulty_blocks import NUM_GUARDS, BlockGuard, LateCopier, fill_with_nan, fresh_blocks
from .models.config import DecoderConfig
from .pinned_memory import PinnedMemory
from .upload import upload


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Shape and dtype of one block."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: DecoderConfig, block_size: int, dtype: torch.dtype) -> "BlockLayout":
        """The layout that a model needs."""
        return cls(config.num_layers, block_size, config.num_kv_heads, config.head_dim, dtype)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """[num_layers, 2, block_size, num_kv_heads, head_dim]."""
        return (self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def num_bytes(self) -> int:
        """Bytes of one block."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


class BlockStorage:
    """Device pool, host pool, and the copies of one rank.

    has_null_block: one block more than the scheduler knows of, `null_block`, where what is computed
    for nobody may be written.
    """

    def __init__(
        self,
        layout: BlockLayout,
        num_blocks: int,
        num_host_blocks: int,
        device: torch.device,
        backend: KernelBackend,
        faults: Faults | None = None,
        *,
        has_null_block: bool = False,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self._backend = backend
        self._device = device
        self._faults = faults or Faults()
        num_guards = NUM_GUARDS if self._faults.guard_block else 0
        self.null_block = num_blocks if has_null_block else None
        num_device_blocks = num_blocks + int(has_null_block) + num_guards
        # Not cleared: no kernel may read a slot before it was written, and untouched pages of
        # host memory cost nothing until `take_memory`.
        pool = torch.empty((num_device_blocks, *layout.shape), dtype=layout.dtype, device=device)
        host_pool = torch.empty((num_host_blocks + num_guards, *layout.shape), dtype=layout.dtype)
        self._is_compiled = isinstance(backend, CpuBackend)
        if self._is_compiled:  # blocks are found twice as fast, for attention and for copies
            advise_huge_pages(pool)
            advise_huge_pages(host_pool)
        self._pinned = None
        if device.type == "cuda" and num_host_blocks > 0:
            self._pinned = PinnedMemory(host_pool)
        self._guard = BlockGuard(pool, host_pool) if num_guards else None
        self.pool = pool if self._guard is None else self._guard.inner(pool)
        self.host_pool = host_pool if self._guard is None else self._guard.inner(host_pool)
        if self._faults.nan_fill:
            fill_with_nan(self.pool)
            fill_with_nan(self.host_pool)
        self.layers = [self.pool[:, index] for index in range(layout.num_layers)]
        self.staged = StagedBlocks(layout.num_bytes)
        self._copier: Copier | None = None
        self._staged_copier: Copier | None = None

    def take_memory(self) -> None:
        """Have the system give the device pool's pages now, all threads at once. A pool that memory
        has no room for fails here instead of under its streams, and no step waits for a page: a
        prompt that is the first in its blocks is computed an eighth faster."""
        if self._faults.nan_fill:
            return  # written already, and to stay so
        self.pool.view(-1).view(torch.uint8).zero_()

    def take_fresh(self, output: SchedulerOutput) -> None:
        """Before a step: with `nan-fill`, its new blocks hold NaN until they are written."""
        if self._faults.nan_fill:
            fresh = fresh_blocks(output, self.layout.block_size).astype(np.int64)
            fill_with_nan(self.pool, upload(fresh, self._device))

    def check_guard(self) -> None:
        """After a step: with `guard-block`, raises GuardChanged where one was written to."""
        if self._guard is not None:
            self._guard.check()

    def copy_on_write(self, copies: tuple[DeviceCopy, ...]) -> None:
        """In one call, on the step's own stream."""
        if not copies:
            return
        columns = np.array(
            [(copy.source, copy.target, copy.num_slots) for copy in copies], dtype=np.int64
        )
        sources, targets, num_slots = (
            upload(np.ascontiguousarray(columns[:, index]), self._device) for index in range(3)
        )
        self._backend.copy_slots(self.pool, sources, targets, num_slots)

    def submit(self, jobs: tuple[CopyJob, ...]) -> None:
        """Start copies between the tiers. Called between steps."""
        for job in jobs:
            self._check_ids(job)
            if job.kind is CopyKind.IMPORT:
                if self._staged_copier is None:
                    self._staged_copier = self._make_staged_copier()
                self._staged_copier.submit(job)
                continue
            if self._copier is None:
                self._copier = self._or_late(
                    make_copier(self.pool, self.host_pool, compiled=self._is_compiled)
                )
            self._copier.submit(job)

    def poll(self) -> tuple[CopyDone, ...]:
        """Jobs that ended since the last call."""
        copiers = (self._copier, self._staged_copier)
        return tuple(done for copier in copiers if copier is not None for done in copier.poll())

    def read_host(self, block_ids: Int32Array) -> BlockBatch:
        """Blocks of the host tier, for another replica. From any thread, while they are pinned."""
        copy_bytes = choose_copy_bytes(self._is_compiled)
        return read_blocks(byte_view(self.host_pool), block_ids, copy_bytes)

    def close(self) -> None:
        """Stop the copiers, if any was ever needed."""
        for copier in (self._copier, self._staged_copier):
            if copier is not None:
                copier.close()
        self._copier = self._staged_copier = None

    def _make_staged_copier(self) -> Copier:
        copy_bytes = choose_copy_bytes(self._is_compiled)
        return self._or_late(StagedCopier(self.staged, byte_view(self.host_pool), copy_bytes))

    def _or_late(self, copier: Copier) -> Copier:
        return LateCopier(copier) if self._faults.late_copies else copier

    def _check_ids(self, job: CopyJob) -> None:
        assert len(job.sources) == len(job.targets), f"sides of job {job.job_id} differ"
        match job.kind:
            case CopyKind.STORE:
                on_device, on_host = job.sources, job.targets
            case CopyKind.LOAD:
                on_device, on_host = job.targets, job.sources
            case CopyKind.IMPORT:
                on_device, on_host = job.targets[:0], job.targets
        for ids, limit in ((on_device, self.num_blocks), (on_host, self.num_host_blocks)):
            assert ((ids >= 0) & (ids < limit)).all(), f"{job} leaves a pool of {limit} blocks"
