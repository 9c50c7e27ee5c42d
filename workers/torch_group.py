"""A group of ranks over `torch.distributed`: gloo between hosts, NCCL between GPUs.

Knows stores, backends and what their errors mean. One per process: torch keeps its default
group in a global.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateImportUsage=false

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from .parallel import GroupAborted, GroupError, RankLost, RankTimeout

# A message and its length travel together as long as they fit: one broadcast instead of two.
_FRAME_BYTES = 4096
_LENGTH_BYTES = 8
# An idle replica sends nothing for hours. A leader that dies breaks its connections, which ends
# the wait; so does whoever ends the ranks of a replica whose leader's host is lost.
_IDLE_TIMEOUT = timedelta(days=365)
_ABORTED = "aborted"


def host_store(host: str, timeout_s: float) -> dist.TCPStore:
    """Where the ranks will find each other, in the leader's process; the others need `.port`."""
    return dist.TCPStore(
        host, 0, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )


def open_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """The leader's store, seen from another rank."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


class TorchDistributedGroup:
    """All ranks construct it with the same store and name, unique to the replica's incarnation.

    Tensors on a GPU go over NCCL, those in host memory and messages over gloo.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        rank: int,
        world_size: int,
        *,
        device: torch.device,
        timeout_s: float = 30.0,
        start_timeout_s: float = 120.0,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._is_open = True
        # A rank of an earlier incarnation that still runs meets nobody under this prefix.
        self._store = dist.PrefixStore(name, store)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with self._errors("meeting"):
            # Ranks come minutes apart, which is longer than a collective may take.
            self._store.set(f"rank {rank}", "")
            others = [f"rank {other}" for other in range(world_size)]
            self._store.wait(others, timedelta(seconds=start_timeout_s))
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=self._store,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
            messages = dist.new_group(backend="gloo", timeout=_IDLE_TIMEOUT)
            assert isinstance(messages, dist.ProcessGroup), f"rank {rank} is in no group"
            self._messages = messages
            self.barrier()

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace the tensor by the sum over all ranks."""
        with self._errors("all_reduce"):
            dist.all_reduce(tensor)

    def all_gather(self, tensor: Tensor, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
        """All ranks' tensors side by side along `dim`, in rank order."""
        padded = _padded(tensor, dim, sizes)
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        with self._errors("all_gather"):
            dist.all_gather(parts, padded)
        return _joined(parts, dim, sizes)

    def gather(self, tensor: Tensor, dim: int, sizes: Sequence[int] | None = None) -> Tensor | None:
        """As `all_gather`, for the leader alone."""
        padded = _padded(tensor, dim, sizes)
        parts = None
        if self.rank == 0:
            parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        with self._errors("gather"):
            dist.gather(padded, parts)
        return None if parts is None else _joined(parts, dim, sizes)

    def broadcast(self, message: bytes | None) -> bytes:
        """The leader's message, on all ranks."""
        if self.rank == 0:
            assert message is not None, "the leader has to bring the message"
            return self._send(message)
        assert message is None, f"rank {self.rank} is not the leader"
        return self._receive()

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return once all ranks have entered."""
        limit = timedelta(seconds=self._timeout_s if timeout_s is None else timeout_s)
        with self._errors("barrier"):
            # On the host even where there is a GPU: dist.barrier() would wait on the device.
            dist.monitored_barrier(self._messages, limit)

    def check(self) -> None:
        """Raise if a rank has given up; one that died is met in the next collective."""
        with self._errors("check"):
            has_aborted = self._store.check([_ABORTED])
        if has_aborted:
            rank = int(self._store.get(_ABORTED))
            raise GroupAborted(rank, f"rank {rank} gave up")

    def abort(self) -> None:
        """Tell the others, who see it when they `check` or time out."""
        if self._is_open:
            with self._errors("abort"):
                self._store.set(_ABORTED, str(self.rank))

    def close(self) -> None:
        """Leave; the connections break, which the others' collectives notice at once."""
        if self._is_open:
            self._is_open = False
            dist.destroy_process_group()

    def _send(self, message: bytes) -> bytes:
        framed = len(message).to_bytes(_LENGTH_BYTES, "little") + message
        first = bytearray(framed[:_FRAME_BYTES].ljust(_FRAME_BYTES, b"\0"))
        with self._errors("broadcast"):
            dist.broadcast(torch.frombuffer(first, dtype=torch.uint8), 0, self._messages)
            if len(framed) > _FRAME_BYTES:
                rest = bytearray(framed[_FRAME_BYTES:])
                dist.broadcast(torch.frombuffer(rest, dtype=torch.uint8), 0, self._messages)
        return message

    def _receive(self) -> bytes:
        first = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
        with self._errors("broadcast"):
            dist.broadcast(first, 0, self._messages)
            framed = first.numpy().tobytes()
            size = int.from_bytes(framed[:_LENGTH_BYTES], "little")
            missing = _LENGTH_BYTES + size - _FRAME_BYTES
            if missing > 0:
                rest = torch.empty(missing, dtype=torch.uint8)
                dist.broadcast(rest, 0, self._messages)
                framed += rest.numpy().tobytes()
        return framed[_LENGTH_BYTES : _LENGTH_BYTES + size]

    @contextmanager
    def _errors(self, operation: str) -> Generator[None]:
        """Torch raises RuntimeError for everything; its text tells a late rank from a lost one."""
        if not self._is_open:
            raise GroupAborted(self.rank, f"rank {self.rank} has closed its group")
        try:
            yield
        except GroupError:
            raise
        except RuntimeError as error:
            text = f"rank {self.rank} in {operation}: {error}"
            is_late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
            raise (RankTimeout if is_late else RankLost)(None, text) from error


def _padded(tensor: Tensor, dim: int, sizes: Sequence[int] | None) -> Tensor:
    """Backends want the same shape everywhere: `dim` comes first and is filled up."""
    moved = tensor.movedim(dim, 0)
    longest = moved.shape[0] if sizes is None else max(sizes)
    if moved.shape[0] < longest:
        filler = moved.new_zeros((longest - moved.shape[0], *moved.shape[1:]))
        moved = torch.cat([moved, filler])
    return moved.contiguous()


def _joined(parts: list[Tensor], dim: int, sizes: Sequence[int] | None) -> Tensor:
    if sizes is not None:
        parts = [part[:size] for part, size in zip(parts, sizes, strict=True)]
    return torch.cat(parts).movedim(0, dim).contiguous()
