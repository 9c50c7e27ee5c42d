"""A group of ranks on one host that exchange tensors and messages through shared memory.

Knows files, names and errors; the exchange itself is compiled (kernels/csrc/all_reduce.cpp).

The segment is a file in /dev/shm only while the ranks find each other: once all have mapped it,
it has no name any more, so nothing is left over however they end. What a leader killed before
that point leaves is removed by the next group that starts on the host.
"""
# pyright: reportUnknownMemberType=false

import ctypes
import hashlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..kernels import all_reduce
from .parallel import GroupAborted, GroupError, RankLost, RankMismatch, RankTimeout

DIRECTORY = Path("/dev/shm")
_PREFIX = "pagefleet-ranks-"
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_SLOT_BYTES = 256 * 1024
_POLL_S = 0.005
# A rank that waits for a message looks up this often, so that a signal can be handled.
_RECEIVE_SLICE_NS = 1_000_000_000
# About 10 µs: longer than ranks in step are apart, far shorter than a time slice.
_SPINS = 200


def is_available() -> bool:
    """Whether the compiled part is here and the host has shared memory."""
    return all_reduce.library() is not None and os.access(DIRECTORY, os.W_OK)


class SharedMemoryGroup:
    """All ranks construct it with the same name, unique to the replica's incarnation.

    start_timeout_s: for the others to come at all. timeout_s: for them to enter a collective.
    Sums are taken in rank order and rounded once: bitwise equal on all ranks, and from run to run.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        world_size: int,
        *,
        timeout_s: float = 30.0,
        start_timeout_s: float = 120.0,
        slot_bytes: int = _SLOT_BYTES,
    ) -> None:
        library = all_reduce.library()
        assert library is not None, "is_available() says whether this group can be made"
        assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
        assert slot_bytes % 64 == 0, f"slots of {slot_bytes} bytes are not whole cache lines"
        self.rank = rank
        self.world_size = world_size
        self._library = library
        self._timeout_s = timeout_s
        # Held during a call: `close` must not unmap memory that another thread is working on.
        self._in_use = threading.Lock()
        self._handle_lock = threading.Lock()
        self._culprit = ctypes.c_int32()
        self._culprit_pointer = ctypes.byref(self._culprit)
        self._handle: int | None = _join(
            library, name, rank, world_size, timeout_s, start_timeout_s, slot_bytes
        )
        path = segment_path(name)
        try:
            self.barrier(start_timeout_s)
        except GroupError:
            self.close()
            raise
        finally:
            if rank == 0:
                path.unlink(missing_ok=True)

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace the tensor by the sum over all ranks; float32 or bfloat16, on the CPU."""
        _check_layout(tensor)
        with self._in_use:
            status = self._library.pf_group_all_reduce(
                self._require_handle(),
                tensor.data_ptr(),
                tensor.numel(),
                _DTYPES[tensor.dtype],
                self._culprit_pointer,
            )
        self._raise_for(status, "all_reduce")

    def all_gather(self, tensor: Tensor, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
        """All ranks' tensors side by side along `dim`, in rank order; any dtype."""
        out = self._gather(tensor, dim, sizes, wants_result=True)
        assert out is not None
        return out

    def gather(self, tensor: Tensor, dim: int, sizes: Sequence[int] | None = None) -> Tensor | None:
        """As `all_gather`, for the leader alone."""
        return self._gather(tensor, dim, sizes, wants_result=self.rank == 0)

    def _gather(
        self, tensor: Tensor, dim: int, sizes: Sequence[int] | None, wants_result: bool
    ) -> Tensor | None:
        _check_layout(tensor)
        dim = dim % tensor.dim()
        sizes = [tensor.shape[dim]] * self.world_size if sizes is None else sizes
        assert len(sizes) == self.world_size and sizes[self.rank] == tensor.shape[dim], (
            f"sizes {list(sizes)} do not fit rank {self.rank} with {tuple(tensor.shape)}"
        )
        outer, inner = tensor.shape[:dim], tensor.shape[dim + 1 :]
        unit = inner.numel() * tensor.element_size()
        row_bytes = (ctypes.c_int64 * self.world_size)(*(size * unit for size in sizes))
        out = tensor.new_empty((*outer, sum(sizes), *inner)) if wants_result else None
        with self._in_use:
            status = self._library.pf_group_gather(
                self._require_handle(),
                tensor.data_ptr(),
                outer.numel(),
                ctypes.addressof(row_bytes),
                None if out is None else out.data_ptr(),
                self._culprit_pointer,
            )
        self._raise_for(status, "gather")
        return out

    def broadcast(self, message: bytes | None) -> bytes:
        """The leader's message, on all ranks."""
        if self.rank == 0:
            assert message is not None, "the leader has to bring the message"
            self._send(message)
            return message
        assert message is None, f"rank {self.rank} is not the leader"
        return self._receive()

    def _send(self, message: bytes) -> None:
        with self._in_use:
            status = self._library.pf_group_send(
                self._require_handle(), message, len(message), self._culprit_pointer
            )
        self._raise_for(status, "broadcast")

    def _receive(self) -> bytes:
        size = ctypes.c_int64()
        status = all_reduce.TIMEOUT
        while status == all_reduce.TIMEOUT:
            with self._in_use:
                status = self._library.pf_group_await_message(
                    self._require_handle(),
                    _RECEIVE_SLICE_NS,
                    ctypes.byref(size),
                    self._culprit_pointer,
                )
        self._raise_for(status, "broadcast")
        buffer = ctypes.create_string_buffer(size.value)
        with self._in_use:
            status = self._library.pf_group_take_message(
                self._require_handle(), buffer, size.value, self._culprit_pointer
            )
        self._raise_for(status, "broadcast")
        return buffer.raw

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return once all ranks have entered."""
        timeout_ns = int((self._timeout_s if timeout_s is None else timeout_s) * 1e9)
        with self._in_use:
            status = self._library.pf_group_barrier(
                self._require_handle(), timeout_ns, self._culprit_pointer
            )
        self._raise_for(status, "barrier")

    def check(self) -> None:
        """Raise if a rank is gone or has given up."""
        culprit = ctypes.c_int32()
        with self._handle_lock:
            handle = self._require_handle()
            status = self._library.pf_group_check(handle, ctypes.byref(culprit))
        self._raise_for(status, "check", culprit.value)

    def abort(self) -> None:
        """Make every rank's current and later calls fail."""
        with self._handle_lock:
            if self._handle is not None:
                self._library.pf_group_abort(self._handle)

    def close(self) -> None:
        """Leave. A call of another thread that is still waiting fails first."""
        while not self._in_use.acquire(timeout=_POLL_S):
            self.abort()
        try:
            with self._handle_lock:
                if self._handle is not None:
                    self._library.pf_group_close(self._handle)
                    self._handle = None
        finally:
            self._in_use.release()

    def _require_handle(self) -> int:
        if self._handle is None:
            raise GroupAborted(self.rank, f"rank {self.rank} has closed its group")
        return self._handle

    def _raise_for(self, status: int, operation: str, culprit: int | None = None) -> None:
        if status == all_reduce.OK:
            return
        rank = self._culprit.value if culprit is None else culprit
        if status == all_reduce.LOST:
            raise RankLost(rank, f"rank {rank} is gone; rank {self.rank} was in {operation}")
        if status == all_reduce.TIMEOUT:
            raise RankTimeout(
                rank,
                f"rank {rank} did not take part in the {operation} of rank {self.rank} in time",
            )
        if status == all_reduce.MISMATCH:
            raise RankMismatch(
                rank, f"rank {rank} entered something else than the {operation} of {self.rank}"
            )
        raise GroupAborted(rank, f"rank {rank} gave up; rank {self.rank} was in {operation}")


def _check_layout(tensor: Tensor) -> None:
    assert tensor.is_contiguous() and tensor.device.type == "cpu", (
        f"a contiguous tensor in host memory is needed, got {tensor.device}, {tensor.stride()}"
    )


def segment_path(name: str) -> Path:
    """Where the segment of a group stands while its ranks find each other."""
    # Names come from configuration and may be long or hold any character.
    return DIRECTORY / f"{_PREFIX}{hashlib.blake2b(name.encode(), digest_size=12).hexdigest()}"


def _join(
    library: ctypes.CDLL,
    name: str,
    rank: int,
    world_size: int,
    timeout_s: float,
    start_timeout_s: float,
    slot_bytes: int,
) -> int:
    """Open the segment (rank 0 makes it), and take the rank's place in it."""
    path = segment_path(name)
    if rank == 0:
        _sweep(library)
        file = _create(library.pf_group_bytes(world_size, slot_bytes))
    else:
        file = _open(path, start_timeout_s)
    spins = _SPINS if len(os.sched_getaffinity(0)) >= world_size else 0
    handle: int | None = library.pf_group_attach(
        file, rank, world_size, slot_bytes, int(timeout_s * 1e9), spins
    )
    if handle is None:
        error = ctypes.get_errno()
        os.close(file)
        raise GroupError(rank, f"rank {rank} cannot join {path}: {os.strerror(error)}")
    if rank == 0:
        # Named only now: whoever finds it finds it laid out, and held by a living leader.
        # (os.link follows the symlink in /proc only where it is given a directory, unused here.)
        os.link(f"/proc/self/fd/{file}", path, src_dir_fd=file)
    return handle


def _create(size: int) -> int:
    file = os.open(DIRECTORY, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    try:
        # Room is taken now: a full /dev/shm is an error here rather than a SIGBUS in a step.
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        os.close(file)
        raise GroupError(0, f"{DIRECTORY} has no room for {size} bytes: {error}") from error
    return file


def _open(path: Path, timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise RankTimeout(0, f"rank 0 did not make {path} in {timeout_s:g} s") from None
            time.sleep(_POLL_S)


def _sweep(library: ctypes.CDLL) -> None:
    """Remove the segments of leaders that were killed before all their ranks had come."""
    for path in DIRECTORY.glob(f"{_PREFIX}*"):
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):
            continue
        try:
            if not library.pf_group_is_held(file, 0):
                path.unlink(missing_ok=True)
        finally:
            os.close(file)
