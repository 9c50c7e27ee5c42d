"""Views of the cluster as public protobuf messages. Knows both shapes, nothing else."""

from ..protos import inference_pb2 as pb
from ..protos.messages import DecisionView, LeaseView, PoolView, PrefixNode, WaitingView
from .cluster_watch import ClusterUpdate
from .proto_conversion import cluster_state_to_proto, replica_explanation_to_proto


def update_to_proto(update: ClusterUpdate) -> pb.ClusterUpdate:
    """One message of WatchCluster."""
    view, rates = update.view, update.rates
    return pb.ClusterUpdate(
        state=cluster_state_to_proto(view.state),
        pools=[_pool(pool) for pool in view.pools],
        waiting=[_waiting(waiting) for waiting in view.waiting],
        leases=[_lease(lease) for lease in view.leases],
        num_leases=view.num_leases,
        decisions=[_decision(decision) for decision in view.decisions],
        prefixes=[_prefix(node) for node in view.prefixes],
        rates=pb.RecentRates(
            window_s=rates.window_s,
            tokens_per_s=rates.tokens_per_s,
            requests_per_s=rates.requests_per_s,
            ttft_p50_s=rates.ttft_p50_s,
            ttft_p99_s=rates.ttft_p99_s,
            query_tokens=update.query_tokens,
            hit_tokens=update.hit_tokens,
        ),
    )


def _pool(pool: PoolView) -> pb.PoolMap:
    return pb.PoolMap(
        replica_id=pool.replica_id,
        tier=pool.tier,
        num_blocks=pool.map.num_blocks,
        cells=pool.map.cells,
    )


def _waiting(waiting: WaitingView) -> pb.WaitingState:
    return pb.WaitingState(
        request_key=waiting.request_key,
        request_id=waiting.request_id,
        tenant=waiting.tenant,
        model=waiting.model,
        admission_class=waiting.admission_class.value,
        priority=waiting.priority,
        num_tokens=waiting.num_tokens,
        num_blocks=waiting.num_blocks,
        waited_s=waiting.waited_s,
    )


def _lease(lease: LeaseView) -> pb.LeaseState:
    return pb.LeaseState(
        lease_id=lease.lease_id,
        replica_id=lease.replica_id,
        request_key=lease.request_key,
        request_id=lease.request_id,
        tenant=lease.tenant,
        admission_class=lease.admission_class.value,
        num_blocks=lease.num_blocks,
        remaining_blocks=lease.remaining_blocks,
        age_s=lease.age_s,
        accepted=lease.accepted,
    )


def _decision(decision: DecisionView) -> pb.Decision:
    return pb.Decision(
        number=decision.number,
        age_s=decision.age_s,
        request_key=decision.request_key,
        request_id=decision.request_id,
        tenant=decision.tenant,
        model=decision.model,
        decision=decision.decision,
        reason=decision.reason,
        replica_id=decision.replica_id,
        num_tokens=decision.num_tokens,
        hit_tokens=decision.hit_tokens,
        lease_blocks=decision.lease_blocks,
        waited_s=decision.waited_s,
        replicas=[replica_explanation_to_proto(replica) for replica in decision.replicas],
    )


def _prefix(node: PrefixNode) -> pb.PrefixNode:
    return pb.PrefixNode(
        model=node.model,
        tenant=node.tenant,
        parent=node.parent,
        label=node.label,
        num_tokens=node.num_tokens,
        num_requests=node.num_requests,
        num_device_replicas=node.num_device_replicas,
        num_host_replicas=node.num_host_replicas,
    )
