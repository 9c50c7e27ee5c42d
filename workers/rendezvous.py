"""How the ranks of a replica find each other, and which transport they then use.

Knows the transports; no model and no Ray.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateImportUsage=false

from dataclasses import dataclass, replace

import torch
from torch.distributed import TCPStore

from . import shared_memory_group
from .parallel import SingleRank, TensorParallelGroup
from .rank_spec import RankSpec, Transport
from .shared_memory_group import SharedMemoryGroup
from .torch_group import TorchDistributedGroup, host_store, open_store


@dataclass(frozen=True, slots=True)
class RankGroups:
    """tensors: where the model's tensors meet. messages: for the steps and for small tensors in
    host memory. Often the same group."""

    tensors: TensorParallelGroup
    messages: TensorParallelGroup

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.tensors.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.tensors.world_size

    def minimum(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Of each value, the least that any rank has."""
        mine = torch.tensor([values], dtype=torch.int64)
        return tuple(self.messages.all_gather(mine, 0).amin(0).tolist())

    def abort(self) -> None:
        """Make the other ranks' calls fail."""
        self.messages.abort()
        if self.tensors is not self.messages:
            self.tensors.abort()

    def close(self) -> None:
        """Leave the groups."""
        self.messages.close()
        if self.tensors is not self.messages:
            self.tensors.close()


def single_rank() -> RankGroups:
    """A replica that is one process."""
    group = SingleRank()
    return RankGroups(group, group)


def best_transport(*, is_one_host: bool) -> Transport:
    """What ranks on one host, or on several, can best use."""
    if is_one_host and shared_memory_group.is_available():
        return Transport.SHARED_MEMORY
    return Transport.TORCH


def open_group(
    name: str, world_size: int, host: str, device: str
) -> tuple[RankSpec, TCPStore | None]:
    """In the leader's process, before the other ranks of its host start: what they must be told,
    and what is to be given to `connect` here.

    host: the node's own address. device: as in `WorkerConfig`.
    """
    spec = RankSpec(name, 0, world_size, best_transport(is_one_host=True), host)
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if world_size == 1 or (spec.transport is Transport.SHARED_MEMORY and not on_gpu):
        return spec, None
    store = host_store(host, spec.start_timeout_s)
    return replace(spec, store_port=store.port), store


def connect(spec: RankSpec, device: torch.device, store: TCPStore | None = None) -> RankGroups:
    """Meet the other ranks; raises GroupError if they do not come in time.

    store: the leader's, opened before the others were told its port.
    """
    if spec.world_size == 1:
        return single_rank()
    shared: TensorParallelGroup | None = None
    if spec.transport is Transport.SHARED_MEMORY:
        shared = SharedMemoryGroup(
            spec.group_name,
            spec.rank,
            spec.world_size,
            timeout_s=spec.timeout_s,
            start_timeout_s=spec.start_timeout_s,
        )
        if device.type == "cpu":
            return RankGroups(shared, shared)
    group = TorchDistributedGroup(
        store or open_store(spec.store_host, spec.store_port, spec.start_timeout_s),
        spec.group_name,
        spec.rank,
        spec.world_size,
        device=device,
        timeout_s=spec.timeout_s,
        start_timeout_s=spec.start_timeout_s,
    )
    return RankGroups(group, shared or group)
