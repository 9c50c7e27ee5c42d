"""Moving whole blocks between the tiers, beside the steps: by a thread, or by streams on a GPU.

Knows both pools' bytes and ids of blocks; when a copy may start, and what it is for, is the
scheduler's.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels import block_copy, cpu_memory
from ..scheduler.output import CopyDone, CopyJob, CopyKind, Int32Array

ByteBlocks = NDArray[np.uint8]  # [num_blocks, block_bytes]
CopyBytes = Callable[[ByteBlocks, Int32Array, ByteBlocks, Int32Array], None]


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


def make_copier(pool: Tensor, host_pool: Tensor, *, compiled: bool) -> Copier:
    """The copier for the pool's device. compiled: on the CPU, by the compiled backend's copy."""
    if pool.device.type == "cuda":
        return CudaCopier(pool, host_pool)
    return ThreadCopier(pool, host_pool, choose_copy_bytes(compiled))


def choose_copy_bytes(compiled: bool) -> CopyBytes:
    """What copies blocks within host memory."""
    return cpu_memory.copy_bytes if compiled else block_copy.copy_bytes


class JobThread:
    """Copies by one thread, in order of submission."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[CopyJob | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[CopyDone] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def copy(self, job: CopyJob) -> bool:
        """Do it; whether the targets hold now what they should."""
        raise NotImplementedError

    def submit(self, job: CopyJob) -> None:
        """See Copier."""
        self._jobs.put(job)

    def poll(self) -> tuple[CopyDone, ...]:
        """See Copier."""
        done: list[CopyDone] = []
        while not self._done.empty():
            done.append(self._done.get())
        return tuple(done)

    def close(self) -> None:
        """See Copier."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            started = time.perf_counter()
            ok = self.copy(job)
            self._done.put(CopyDone(job.job_id, ok, time.perf_counter() - started))


class ThreadCopier(JobThread):
    """Copies in host memory.

    Steps on the CPU are over when they return, so a job submitted between two steps is ordered
    after the one before by itself.
    """

    def __init__(self, pool: Tensor, host_pool: Tensor, copy_bytes: CopyBytes) -> None:
        self._copy_bytes = copy_bytes
        self._pools = {
            CopyKind.STORE: (byte_view(pool), byte_view(host_pool)),
            CopyKind.LOAD: (byte_view(host_pool), byte_view(pool)),
        }
        super().__init__("block-copies")

    def copy(self, job: CopyJob) -> bool:
        """Always well."""
        source, target = self._pools[job.kind]
        self._copy_bytes(source, job.sources, target, job.targets)
        return True


class CudaCopier:
    """Copies between device and pinned host memory, one stream per direction.

    Ordered by events alone: a STORE waits for the step stream's work so far; a LOAD too, since
    a step still running may read what stood in its targets. Both pools outlive the copies, which
    `close` waits for, so no allocator needs to know of the streams.
    """

    def __init__(self, pool: Tensor, host_pool: Tensor) -> None:
        self._pools = {
            CopyKind.STORE: (pool, host_pool),
            CopyKind.LOAD: (host_pool, pool),
        }
        self._device = pool.device
        self._streams = {kind: torch.cuda.Stream(pool.device) for kind in self._pools}
        self._running: dict[CopyKind, deque[RunningCopy]] = {kind: deque() for kind in self._pools}

    def submit(self, job: CopyJob) -> None:
        """See Copier."""
        stream = self._streams[job.kind]
        source, target = self._pools[job.kind]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            began.record(stream)
            block_copy.copy_blocks(source, job.sources, target, job.targets)
            ended.record(stream)
        self._running[job.kind].append(RunningCopy(job.job_id, began, ended))

    def poll(self) -> tuple[CopyDone, ...]:
        """See Copier."""
        done: list[CopyDone] = []
        for running in self._running.values():
            # Copies of one stream end in the order of submission.
            while running and running[0].ended.query():
                done.append(running.popleft().done())
        return tuple(done)

    def close(self) -> None:
        """See Copier."""
        for stream in self._streams.values():
            stream.synchronize()


@dataclass(frozen=True, slots=True)
class RunningCopy:
    """The events around a job's copies. The job itself, with its arrays, is not needed: the
    addresses were told when the copies were submitted."""

    job_id: int
    began: torch.cuda.Event
    ended: torch.cuda.Event

    def done(self) -> CopyDone:
        """Once `ended` has been reached."""
        return CopyDone(self.job_id, elapsed_s=self.began.elapsed_time(self.ended) / 1e3)


def byte_view(pool: Tensor) -> ByteBlocks:
    """uint8 [num_blocks, block_bytes] over the same memory."""
    if len(pool) == 0:
        return np.empty((0, 0), dtype=np.uint8)
    return pool.view(len(pool), -1).view(torch.uint8).numpy()
