"""What would happen to a request now, and why: every term of every replica's cost, in ms.

Reads one model's pool and reserves nothing.
"""

from ..protos.messages import Explanation, ReplicaExplanation, ReserveRequest
from .admission import Need
from .forecast import wait_for_blocks_s
from .late_binding import LateBinding
from .model_pool import ModelPool
from .routing_policy import RoutedRequest, cheapest

REASONS = {
    "grant": "least cost of the replicas that can start it",
    "wait": "no replica can start it now, or a busy one would still serve it sooner",
}


def explain(pool: ModelPool, request: ReserveRequest, now: float) -> Explanation:
    """The decision that `reserve` would make now."""
    refusal = pool.gate.refuse(request, now, book=False)
    need = pool.gate.need_of(request)
    routed = pool.routed(request, need)
    costs = _costs(pool, routed, now)
    slot, lease_blocks = (None, need.num_blocks) if refusal else _choice(pool, request, need, now)
    view = pool.pool.by_slot.get(slot) if slot is not None else None
    decision = "refuse" if refusal else "wait" if view is None else "grant"
    return Explanation(
        policy=pool.policy.name,
        decision=decision,
        reason=refusal.reason if refusal else REASONS[decision],
        replica_id=view.info.replica_id if view else None,
        lease_blocks=lease_blocks,
        expected_output_tokens=round(need.expected_output_tokens),
        expected_wait_s=0.0 if view else pool.gate.expected_wait_s(request.tenant, now),
        queue_position=len(pool.queue),
        replicas=costs,
    )


def _choice(
    pool: ModelPool, request: ReserveRequest, need: Need, now: float
) -> tuple[int | None, int]:
    """Where it would go, and the blocks of its lease there; None = it would wait."""
    if isinstance(pool.policy, LateBinding):
        # What waits already is weighed together with it.
        start = None if len(pool.queue) else pool.start_now(request, need, now)
        return (None, need.num_blocks) if start is None else (start.slot, start.need.num_blocks)
    routed, columns = pool.routed(request, need), pool.pool.columns
    routed.candidates &= columns.available >= need.num_blocks
    return cheapest(routed, pool.policy.cost_ms(routed, columns, now)), need.num_blocks


def _costs(pool: ModelPool, routed: RoutedRequest, now: float) -> tuple[ReplicaExplanation, ...]:
    columns, policy = pool.pool.columns, pool.policy
    terms = (policy if isinstance(policy, LateBinding) else LateBinding()).terms(
        routed, columns, now
    )
    totals = policy.cost_ms(routed, columns, now)
    host = routed.host_tokens
    source_view = pool.pool.by_slot.get(routed.source.slot)
    source = "" if source_view is None else source_view.info.replica_id
    explained: list[ReplicaExplanation] = []
    for slot, view in sorted(pool.pool.by_slot.items()):
        missing = routed.num_blocks - view.available_blocks
        blocks_s = wait_for_blocks_s(missing, pool.releases(slot), now)
        blocks_ms = 1e3 * (
            pool.admission.appointments.max_retry_after_s if blocks_s is None else blocks_s
        )
        explained.append(
            ReplicaExplanation(
                replica_id=view.info.replica_id,
                eligible=bool(routed.candidates[slot]),
                hit_tokens=int(routed.device_tokens[slot]),
                host_hit_tokens=0 if host is None else int(host[slot]),
                available_blocks=max(0, view.available_blocks),
                prefill_ms=float(terms.prefill[slot]),
                load_ms=float(terms.load[slot]),
                queue_ms=float(terms.queue[slot]),
                blocks_ms=blocks_ms,
                batch_ms=float(terms.batch[slot]),
                affinity_ms=float(terms.affinity[slot]),
                total_ms=float(totals[slot]) + blocks_ms,
                transfer_ms=float(terms.transfer[slot]),
                transfer_tokens=int(terms.transfer_tokens[slot]),
                transfer_from=source if terms.transfer_tokens[slot] else "",
            )
        )
    return tuple(explained)
