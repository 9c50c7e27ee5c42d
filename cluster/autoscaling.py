"""How many replicas a model needs, from its block deficit.

    deficit = needs of what waits + growth of what runs - free - what comes back before a new
              replica could have started and that newcomers will not take

Pure arithmetic on what the controller knew at one moment. Whoever decides gets that as plain
numbers (`to_stats`, `from_stats`), maybe late, twice, or from an earlier life of the controller:
only the newest of them counts, so that two planners cannot pull the size to and fro.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from ..protos.messages import ReplicaState
from .model_pool import ModelPool
from .replica_view import ReplicaView

# Share of a replica's blocks that has to be free beyond a whole replica before one may go: else
# the next request would ask for it back.
_SPARE_SHARE = 0.25
_SEPARATOR = "/"  # between model and number, in the names of Serve's statistics


@dataclass(frozen=True, slots=True)
class BlockDemand:
    """One model at one moment. Blocks of draining replicas are in none of the counts.

    epoch, sequence: of the controller that counted: its life, and +1 with each answer of it.
    queued_blocks: needs of the requests that wait, in the controller or, without their blocks, at a
    replica. growth_blocks: what leases still may take. releasing_blocks: of leases that are
    expected to end before a new replica could have started, less what comes in meanwhile.
    replica_blocks: of one replica; 0 = none has been seen yet.
    num_requests: waiting or running. num_replicas: those that take requests.
    wait_s: how long a newcomer would wait. startup_s: how long a replica takes to start.
    """

    epoch: float = 0.0
    sequence: float = 0.0
    queued_blocks: float = 0.0
    growth_blocks: float = 0.0
    free_blocks: float = 0.0
    releasing_blocks: float = 0.0
    replica_blocks: float = 0.0
    num_requests: float = 0.0
    num_replicas: float = 0.0
    wait_s: float = 0.0
    startup_s: float = 0.0

    @property
    def deficit(self) -> float:
        """Blocks that will be missing when a new replica could be there; negative = left over.

        Where the queue waits longer than that though blocks are free, it is not blocks that it
        waits for, and those that are free are of no use to it.
        """
        missing = self.queued_blocks + self.growth_blocks - self.free_blocks - self.releasing_blocks
        return max(missing, self.queued_blocks) if self.wait_s > self.startup_s else missing

    @property
    def spare(self) -> float:
        """Blocks that nobody needs now, whatever comes back later."""
        return self.free_blocks - self.growth_blocks - self.queued_blocks


def replicas_wanted(demand: BlockDemand) -> int:
    """The number of replicas; its bounds, and for how long it must stand, are others' affair."""
    num_replicas = int(demand.num_replicas)
    if not demand.num_requests:
        return 0
    if not num_replicas or not demand.replica_blocks:
        return max(1, math.ceil(demand.queued_blocks / max(1.0, demand.replica_blocks)))
    if demand.deficit > 0:
        return num_replicas + math.ceil(demand.deficit / demand.replica_blocks)
    superfluous = demand.spare / demand.replica_blocks - _SPARE_SHARE
    return max(1, num_replicas - max(0, math.floor(superfluous)))


def newest(demands: Iterable[BlockDemand]) -> BlockDemand | None:
    """The one that the latest controller counted last."""
    return max(demands, key=lambda demand: (demand.epoch, demand.sequence), default=None)


def block_demand(
    pools: Iterable[ModelPool], now: float, *, startup_s: float, epoch: float, sequence: int
) -> BlockDemand:
    """What the controller knows of one model. pools: of the weights that are served now.

    startup_s: as long as none has been measured.
    """
    pools = list(pools)
    ready = [
        (pool, view)
        for pool in pools
        for view in pool.pool.replicas.values()
        if view.state is ReplicaState.READY
    ]
    measured = max((view.info.startup_s for _, view in ready), default=0.0)
    startup_s = measured or startup_s
    return BlockDemand(
        epoch=epoch,
        sequence=sequence,
        queued_blocks=sum(_queued(pool) for pool in pools)
        + sum(_stalled(pool, view) for pool, view in ready),
        growth_blocks=sum(view.leased_blocks for _, view in ready),
        free_blocks=sum(view.free_blocks for _, view in ready),
        releasing_blocks=_net_releases(pools, ready, now, startup_s),
        replica_blocks=max((pool.pool.max_num_blocks for pool in pools), default=0),
        num_requests=sum(view.num_active for _, view in ready)
        + sum(len(pool.queue) for pool in pools),
        num_replicas=len(ready),
        wait_s=max((_expected_wait_s(pool, now) for pool in pools), default=0.0),
        startup_s=startup_s,
    )


def _queued(pool: ModelPool) -> int:
    return int(pool.queue.needs[pool.queue.waiting].sum())


def _expected_wait_s(pool: ModelPool, now: float) -> float:
    oldest = pool.queue.longest_waiting()
    return 0.0 if oldest is None else pool.gate.expected_wait_s(oldest.tenant, now)


def _stalled(pool: ModelPool, view: ReplicaView) -> int:
    """Blocks that requests at a replica lack: preempted, or not begun for want of them."""
    if view.report is None or not view.report.num_waiting:
        return 0
    return -(-view.report.waiting_prefill_tokens // pool.block_size)


def _net_releases(
    pools: list[ModelPool],
    ready: list[tuple[ModelPool, ReplicaView]],
    now: float,
    startup_s: float,
) -> float:
    """What comes back in time and is not taken by those who come in the same time."""
    ends = [end for pool, view in ready for end in pool.releases(view.slot)]
    releasing = sum(blocks for end, blocks in ends if end <= now + startup_s)
    arriving = startup_s * sum(pool.arrivals.per_s(now) for pool in pools)
    return max(0.0, releasing - arriving)


def to_stats(demands: Mapping[str, BlockDemand]) -> dict[str, float]:
    """By model → as named numbers, all of them floats: Serve takes nothing else."""
    return {
        f"{model}{_SEPARATOR}{field.name}": float(getattr(demand, field.name))
        for model, demand in demands.items()
        for field in fields(BlockDemand)
    }


def from_stats(stats: Mapping[str, float]) -> dict[str, BlockDemand]:
    """The reverse; names that are none of ours are passed over."""
    numbers: dict[str, dict[str, float]] = {}
    known = {field.name for field in fields(BlockDemand)}
    for key, value in stats.items():
        model, separator, name = key.rpartition(_SEPARATOR)
        if separator and name in known:
            numbers.setdefault(model, {})[name] = value
    return {model: BlockDemand(**values) for model, values in numbers.items()}
