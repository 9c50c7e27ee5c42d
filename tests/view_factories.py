"""Makers of cluster views: what a dashboard would be shown of a busy cluster of any size."""

import numpy as np

from pagefleet.cluster.cluster_view import cells_per_pool
from pagefleet.protos.messages import (
    AdmissionClass,
    BlockCounts,
    ClusterState,
    ClusterView,
    DecisionView,
    LeaseView,
    PoolView,
    PrefixNode,
    ReplicaExplanation,
    ReplicaState,
    ReplicaStatus,
    WaitingView,
)
from pagefleet.scheduler.block_map import BlockState, StateArray, make_map

TENANTS = ("acme", "globex", "initech", "<b>umbrella</b>")
CLASSES = tuple(AdmissionClass)
KINDS = ("grant", "grant", "grant", "wait", "grant", "refuse", "grant", "expire")
REASONS = {
    "grant": "least cost of the replicas that can start it",
    "wait": "no replica can start it now, or a busy one would still serve it sooner",
    "refuse": "the queue is full",
    "expire": "its deadline passed before it could start",
}


def make_states(num_blocks: int, seed: int, tier: str = "device") -> StateArray:
    """A pool in use: runs of blocks that sequences took together, some of them shared."""
    rng = np.random.default_rng(seed)
    states = np.full(num_blocks, BlockState.CLEAN, dtype=np.uint8)
    kinds = [BlockState.REFERENCED, BlockState.CACHED, BlockState.SHARED, BlockState.FENCED]
    weights = [0.42, 0.38, 0.17, 0.03]
    if tier == "host":
        kinds, weights = (
            [BlockState.HOST, BlockState.REFERENCED, BlockState.FENCED],
            [0.8, 0.18, 0.02],
        )
    used = int(num_blocks * rng.uniform(0.55, 0.97))
    place = 0
    while place < used:
        length = int(rng.integers(1, max(2, num_blocks // 24)))
        states[place : min(place + length, used)] = rng.choice(kinds, p=weights)
        place += length
    return states


def count_states(states: StateArray) -> BlockCounts:
    """The four states that a pool counts."""
    counts = np.bincount(states, minlength=len(BlockState))
    return BlockCounts(
        clean=int(counts[BlockState.CLEAN]),
        cached_idle=int(counts[BlockState.CACHED] + counts[BlockState.HOST]),
        referenced=int(counts[BlockState.REFERENCED] + counts[BlockState.SHARED]),
        fenced=int(counts[BlockState.FENCED]),
    )


def make_cluster_view(
    num_replicas: int = 4,
    num_blocks: int = 256,
    num_host_blocks: int = 128,
    *,
    tick: int = 0,
    num_rows: int = 12,
) -> ClusterView:
    """tick: another moment of the same cluster; some of it has changed."""
    names = [f"replica-{number}" for number in range(num_replicas)]
    max_cells = cells_per_pool(num_replicas)
    pools: list[PoolView] = []
    replicas: list[ReplicaStatus] = []
    for number, name in enumerate(names):
        seed = 1000 * number + (tick if (number + tick) % 3 == 0 else tick // 3)
        device = make_states(num_blocks, seed)
        host = make_states(num_host_blocks, seed + 7, "host")
        pools.append(PoolView(name, "device", make_map(device, max_cells)))
        if num_host_blocks:
            pools.append(PoolView(name, "host", make_map(host, max_cells)))
        replicas.append(_status(name, number, tick, count_states(device), count_states(host)))
    return ClusterView(
        state=ClusterState(
            replicas=tuple(replicas),
            queued_requests=num_rows + 5,
            queued_tokens=48_200,
            granted=12_345 + 9 * tick,
            refused=17,
            expired=3,
            policy="default",
            uptime_s=86_400.0 + tick,
            oldest_wait_s=2.5,
        ),
        pools=tuple(pools),
        waiting=tuple(_waiting(number) for number in range(num_rows)),
        leases=tuple(_lease(number, names) for number in range(num_rows)),
        num_leases=num_rows + 100,
        decisions=tuple(_decision(n, names) for n in range(1 + 3 * tick, 41 + 3 * tick)),
        prefixes=_prefixes(num_replicas),
    )


def _status(
    name: str, number: int, tick: int, device: BlockCounts, host: BlockCounts
) -> ReplicaStatus:
    states = {3: ReplicaState.DRAINING, 11: ReplicaState.SUSPECT, 17: ReplicaState.STARTING}
    return ReplicaStatus(
        replica_id=name,
        incarnation=f"life-{number}",
        model="SmolLM2-135M-Instruct",
        state=states.get(number, ReplicaState.READY),
        address="10.0.0.1:1",
        device=device,
        host=host,
        num_waiting=number % 3,
        num_running=5 + number % 11,
        leased_blocks=37 + number,
        available_blocks=max(0, device.free - 37),
        hit_tokens=70_000 + 311 * tick * (1 + number % 3),
        query_tokens=100_000 + 400 * tick * (1 + number % 3),
        preemptions=number % 4,
        steps_done=1000 + tick,
        indexed_device=9,
        indexed_host=0,
        report_age_s=0.04,
        preemptions_swap=number % 2,
        copy_bytes_per_s=11.5e9,
        prefill_tokens_per_s=18_250.0,
        decode_step_s=0.0125,
        num_leases=4 + number % 5,
    )


def _waiting(number: int) -> WaitingView:
    return WaitingView(
        request_key=f"gateway-1f-{number}",
        request_id=f"chatcmpl-{number:04x}",
        tenant=TENANTS[number % 4],
        model="SmolLM2-135M-Instruct",
        admission_class=CLASSES[number % 3],
        priority=0,
        num_tokens=900 + 431 * number,
        num_blocks=60 + 27 * number,
        waited_s=2.5 - 0.2 * number if number < 12 else 0.1,
    )


def _lease(number: int, names: list[str]) -> LeaseView:
    return LeaseView(
        lease_id=2**40 + 900 - number,
        replica_id=names[number % len(names)],
        request_key=f"gateway-1f-{500 + number}",
        request_id=f"chatcmpl-{500 + number:04x}",
        tenant=TENANTS[number % 4],
        admission_class=CLASSES[number % 3],
        num_blocks=64 + number,
        remaining_blocks=max(0, 64 - 6 * number),
        age_s=0.4 * number,
        accepted=number > 0,
    )


def _decision(number: int, names: list[str]) -> DecisionView:
    kind = KINDS[number % len(KINDS)]
    chosen = names[number * 7 % len(names)] if kind == "grant" else ""
    other = names[(number * 7 + 1) % len(names)]
    costs = (_cost(chosen, number), _cost(other, number + 3)) if chosen else ()
    return DecisionView(
        number=number,
        age_s=0.3,
        request_key=f"gateway-1f-{number}",
        request_id=f"chatcmpl-{number:04x}",
        tenant=TENANTS[number % 4],
        model="SmolLM2-135M-Instruct",
        decision=kind,
        reason=REASONS[kind],
        replica_id=chosen,
        num_tokens=800 + 37 * (number % 50),
        hit_tokens=512 if number % 3 else 0,
        lease_blocks=60 + number % 40,
        waited_s=0.0 if number % 2 else 0.35,
        replicas=costs,
    )


def _cost(name: str, number: int) -> ReplicaExplanation:
    terms = (12.5 + number % 40, 0.0, 3.0 * (number % 5), 0.0, 8.0 + number % 7, 2.0 * (number % 3))
    return ReplicaExplanation(name, True, 512, 0, 99, *terms, sum(terms))


def _prefixes(num_replicas: int) -> tuple[PrefixNode, ...]:
    nodes: list[PrefixNode] = []
    for tenant in TENANTS:
        root = len(nodes)
        nodes.append(_node(tenant, None, "a3f10c22", 512, 96, min(3, num_replicas), 1))
        nodes.append(_node(tenant, root, "77be0941", 1280, 60, min(2, num_replicas), 0))
        nodes.append(_node(tenant, root + 1, "0c9d1e55", 2816, 21, 1, 1))
        nodes.append(_node(tenant, root, "e01fa7b8", 768, 18, 1, 0))
        nodes.append(_node(tenant, None, "5512cd00", 256, 9, 0, 1))
    return tuple(nodes)


def _node(
    tenant: str, parent: int | None, label: str, tokens: int, requests: int, device: int, host: int
) -> PrefixNode:
    return PrefixNode(
        "SmolLM2-135M-Instruct", tenant, parent, label, tokens, requests, device, host
    )
