"""What a dashboard shows of the controller, bounded in size whatever the cluster's.

Reads the models' pools and changes nothing. What is asked of replicas for it: maps of their pools,
the fewer cells the more replicas there are.
"""

import heapq
from collections.abc import Iterable, Sequence
from itertools import islice

from ..protos.messages import (
    ClusterState,
    ClusterView,
    DecisionView,
    LeaseView,
    PoolView,
    PrefixNode,
    WaitingView,
)
from ..scheduler.block_hash import route_tokens
from .lease_table import LeaseRecord
from .model_pool import ModelPool
from .prefix_forest import Run

_CELL_BUDGET = 2**15  # of all device maps together
_MIN_CELLS, _MAX_CELLS = 64, 4096
_MAX_ROWS = 64


def cells_per_pool(num_replicas: int) -> int:
    """How fine the maps may be."""
    return max(_MIN_CELLS, min(_MAX_CELLS, _CELL_BUDGET // max(num_replicas, 1)))


def make_view(
    pools: Sequence[ModelPool],
    state: ClusterState,
    decisions: tuple[DecisionView, ...],
    now: float,
) -> ClusterView:
    """Everything but the prefixes."""
    return ClusterView(
        state=state,
        pools=tuple(_pool_views(pools)),
        waiting=_waiting(pools, now),
        leases=_leases(pools, now),
        num_leases=sum(len(pool.pool.leases) for pool in pools),
        decisions=decisions,
        prefixes=(),
    )


def prefix_nodes(pools: dict[str, ModelPool], runs: Sequence[Run]) -> tuple[PrefixNode, ...]:
    """The runs with what is resident of them now; those of models that are gone are left out."""
    nodes: list[PrefixNode] = []
    places: dict[int, int] = {}
    for run in runs:
        pool = pools.get(run.model)
        if pool is None:
            continue
        places[id(run)] = len(nodes)
        device, host = pool.pool.index.num_holders(run.last_hash)
        nodes.append(
            PrefixNode(
                model=run.model,
                tenant=run.tenant,
                parent=None if run.parent is None else places[id(run.parent)],
                label=run.last_hash[:4].hex(),
                num_tokens=route_tokens(run.depth, pool.block_size),
                num_requests=run.num_requests,
                num_device_replicas=device,
                num_host_replicas=host,
            )
        )
    return tuple(nodes)


def _pool_views(pools: Iterable[ModelPool]) -> Iterable[PoolView]:
    for pool in pools:
        for replica_id, view in pool.pool.replicas.items():
            for tier, found in zip(("device", "host"), view.maps, strict=False):
                if found.num_blocks:
                    yield PoolView(replica_id, tier, found)


def _waiting(pools: Iterable[ModelPool], now: float) -> tuple[WaitingView, ...]:
    """The oldest ones; a queue is in the order of arrival."""
    firsts = [waiting for pool in pools for waiting in islice(pool.queue, _MAX_ROWS)]
    oldest = heapq.nsmallest(_MAX_ROWS, firsts, key=lambda waiting: waiting.arrived_at)
    return tuple(
        WaitingView(
            request_key=waiting.request.request_key,
            request_id=waiting.request.request_id,
            tenant=waiting.request.tenant,
            model=waiting.request.model,
            admission_class=waiting.request.admission_class,
            priority=waiting.request.priority,
            num_tokens=waiting.request.num_tokens,
            num_blocks=waiting.need.num_blocks,
            waited_s=now - waiting.arrived_at,
        )
        for waiting in oldest
    )


def _leases(pools: Iterable[ModelPool], now: float) -> tuple[LeaseView, ...]:
    """The newest ones."""
    records = [(record, pool) for pool in pools for record in pool.pool.leases]
    newest = heapq.nlargest(_MAX_ROWS, records, key=lambda pair: pair[0].lease_id)
    return tuple(_lease(record, pool, now) for record, pool in newest)


def _lease(record: LeaseRecord, pool: ModelPool, now: float) -> LeaseView:
    lease = record.lease
    return LeaseView(
        lease_id=record.lease_id,
        replica_id=pool.pool.by_slot[record.slot].info.replica_id,
        request_key="" if lease is None else lease.request_key,
        request_id=record.request_id,
        tenant=record.tenant,
        admission_class=record.admission_class,
        num_blocks=record.num_blocks,
        remaining_blocks=record.remaining,
        age_s=now - record.granted_at if lease is not None else 0.0,
        accepted=record.listed,
    )
