"""The tensors behind the block pools of one rank, and the copies inside and between them.

Knows bytes and ids of blocks; which block belongs to whom, and when it may be reused, is the
scheduler's. Layout on both tiers: [num_blocks, num_layers, 2, block_size, num_kv_heads,
head_dim], so a block is one contiguous piece over all layers.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..kernels import block_copy
from ..kernels.backend import KernelBackend
from ..scheduler.output import CopyDone, CopyJob, CopyKind, DeviceCopy
from .models.config import DecoderConfig


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


class Copier(Protocol):
    """Moves whole blocks between the tiers beside the steps."""

    def submit(self, job: CopyJob) -> None:
        """Start it: a STORE sees all that was computed before, a LOAD is seen by what follows
        its `CopyDone`."""
        ...

    def poll(self) -> tuple[CopyDone, ...]:
        """Jobs that ended since the last call; never waits."""
        ...

    def close(self) -> None:
        """Wait for what is running and stop."""
        ...


class BlockStorage:
    """Device pool, host pool, and the copies of one rank."""

    def __init__(
        self,
        layout: BlockLayout,
        num_blocks: int,
        num_host_blocks: int,
        device: torch.device,
        backend: KernelBackend,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self._backend = backend
        self._device = device
        # Not cleared: no kernel may read a slot before it was written, and untouched pages of
        # host memory cost nothing.
        self.pool = torch.empty((num_blocks, *layout.shape), dtype=layout.dtype, device=device)
        self.host_pool = torch.empty(
            (num_host_blocks, *layout.shape),
            dtype=layout.dtype,
            pin_memory=device.type == "cuda" and num_host_blocks > 0,
        )
        self.layers = [self.pool[:, index] for index in range(layout.num_layers)]
        self._copier: Copier | None = None

    def copy_on_write(self, copies: tuple[DeviceCopy, ...]) -> None:
        """In one call, on the step's own stream."""
        if not copies:
            return
        columns = np.array(
            [(copy.source, copy.target, copy.num_slots) for copy in copies], dtype=np.int64
        )
        sources, targets, num_slots = (
            torch.from_numpy(np.ascontiguousarray(columns[:, index])).to(self._device)
            for index in range(3)
        )
        self._backend.copy_slots(self.pool, sources, targets, num_slots)

    def submit(self, jobs: tuple[CopyJob, ...]) -> None:
        """Start copies between the tiers. Called between steps."""
        if jobs and self._copier is None:
            self._copier = make_copier(self.pool, self.host_pool)
        for job in jobs:
            assert self._copier is not None
            self._check_ids(job)
            self._copier.submit(job)

    def poll(self) -> tuple[CopyDone, ...]:
        """Jobs that ended since the last call."""
        return () if self._copier is None else self._copier.poll()

    def close(self) -> None:
        """Stop the copier, if one was ever needed."""
        if self._copier is not None:
            self._copier.close()
            self._copier = None

    def _check_ids(self, job: CopyJob) -> None:
        assert len(job.sources) == len(job.targets), f"sides of job {job.job_id} differ"
        is_store = job.kind is CopyKind.STORE
        on_device, on_host = (job.sources, job.targets) if is_store else (job.targets, job.sources)
        for ids, limit in ((on_device, self.num_blocks), (on_host, self.num_host_blocks)):
            assert ((ids >= 0) & (ids < limit)).all(), f"{job} leaves a pool of {limit} blocks"


def make_copier(pool: Tensor, host_pool: Tensor) -> Copier:
    """The copier for the pool's device."""
    if pool.device.type == "cuda":
        return CudaCopier(pool, host_pool)
    return ThreadCopier(pool, host_pool)


class ThreadCopier:
    """Copies in host memory by one thread, in order of submission.

    Steps on the CPU are over when they return, so a job submitted between two steps is ordered
    after the one before by itself.
    """

    def __init__(self, pool: Tensor, host_pool: Tensor) -> None:
        self._pools = {
            CopyKind.STORE: (_byte_view(pool), _byte_view(host_pool)),
            CopyKind.LOAD: (_byte_view(host_pool), _byte_view(pool)),
        }
        self._jobs: queue.SimpleQueue[CopyJob | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[CopyDone] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="block-copies", daemon=True)
        self._thread.start()

    def submit(self, job: CopyJob) -> None:
        self._jobs.put(job)

    def poll(self) -> tuple[CopyDone, ...]:
        done: list[CopyDone] = []
        while not self._done.empty():
            done.append(self._done.get())
        return tuple(done)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            source, target = self._pools[job.kind]
            started = time.perf_counter()
            block_copy.copy_bytes(source, job.sources, target, job.targets)
            self._done.put(CopyDone(job.job_id, elapsed_s=time.perf_counter() - started))


class CudaCopier:
    """Copies between device and pinned host memory, one stream per direction.

    Ordered by events alone: a STORE waits for the step stream's work so far; a LOAD too, since
    a step still running may read what stood in its targets.
    """

    def __init__(self, pool: Tensor, host_pool: Tensor) -> None:
        self._pools = {
            CopyKind.STORE: (pool, host_pool),
            CopyKind.LOAD: (host_pool, pool),
        }
        self._device = pool.device
        self._streams = {kind: torch.cuda.Stream(pool.device) for kind in CopyKind}
        self._running: dict[CopyKind, deque[tuple[CopyJob, torch.cuda.Event, torch.cuda.Event]]] = {
            kind: deque() for kind in CopyKind
        }

    def submit(self, job: CopyJob) -> None:
        stream = self._streams[job.kind]
        source, target = self._pools[job.kind]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            began.record(stream)
            block_copy.copy_blocks(source, job.sources, target, job.targets)
            ended.record(stream)
        self._running[job.kind].append((job, began, ended))

    def poll(self) -> tuple[CopyDone, ...]:
        done: list[CopyDone] = []
        for running in self._running.values():
            while running and running[0][2].query():
                job, began, ended = running.popleft()
                done.append(CopyDone(job.job_id, elapsed_s=began.elapsed_time(ended) / 1e3))
        return tuple(done)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


def _byte_view(pool: Tensor) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """uint8 [num_blocks, block_bytes] over the same memory."""
    if len(pool) == 0:
        return np.empty((0, 0), dtype=np.uint8)
    return pool.view(len(pool), -1).view(torch.uint8).numpy()
