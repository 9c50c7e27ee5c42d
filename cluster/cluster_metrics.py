"""The controller's figures as metrics, in the field's names: blocks, leases, queues, preemptions.

Made anew from each `ClusterState`; nothing is kept or counted here. METRICS.md lists every name.
"""

from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ..protos.messages import (
    BlockCounts,
    CallTimes,
    ClusterState,
    ReplicaCounters,
    ReplicaState,
    ReplicaStatus,
)

# fields of ReplicaCounters, one per way to meet exhaustion beside preemption
_EXHAUSTION = (
    *("admissions_deferred", "rows_held", "swaps_refused"),
    *("queue_full", "leases_refused", "kv_exhausted"),
)
_PLACE = ("model_name", "replica")
_Families = dict[str, GaugeMetricFamily | CounterMetricFamily]


class ClusterCollector(Collector):
    """The controller's figures as metrics; made anew at each scrape, nothing is kept."""

    def __init__(self) -> None:
        self.state: ClusterState | None = None

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        up = GaugeMetricFamily("pagefleet_controller_up", "1 if the controller answered")
        up.add_metric([], 0.0 if self.state is None else 1.0)
        yield up
        if self.state is not None:
            yield from _queue_families(self.state)
            yield _call_family(self.state.calls)
            yield from _replica_families(self.state.replicas)


def _queue_families(state: ClusterState) -> Iterator[Metric]:
    for name, text, value in (
        ("queued_requests", "Requests waiting in the controller", state.queued_requests),
        ("queued_tokens", "Known tokens of those", state.queued_tokens),
        ("queue_oldest_seconds", "The longest wait among those", state.oldest_wait_s),
        ("controller_uptime_seconds", "Since the controller started", state.uptime_s),
    ):
        yield GaugeMetricFamily(f"pagefleet_{name}", text, value=value)
    for name, text, value in (
        ("leases_granted", "Leases granted", state.granted),
        ("requests_refused", "Requests refused by the controller", state.refused),
        ("requests_expired", "Deadlines that passed in the queue", state.expired),
    ):
        yield CounterMetricFamily(f"pagefleet_{name}", text, value=value)


def _call_family(calls: tuple[CallTimes, ...]) -> Metric:
    """Prometheus' buckets are cumulative."""
    family = HistogramMetricFamily(
        "pagefleet_controller_call_duration_seconds",
        "The controller's own work on one call",
        labels=("call",),
    )
    for times in calls:
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*times.bounds_s, "+Inf"), times.counts, strict=True):
            total += count
            buckets.append((str(bound), total))
        family.add_metric([times.call], buckets, times.total_s)
    return family


def _replica_families(replicas: tuple[ReplicaStatus, ...]) -> Iterator[Metric]:
    families = _make_families()
    for replica in replicas:
        _add_blocks(families["kv_blocks"], replica, "device", replica.device)
        _add_blocks(families["kv_blocks"], replica, "host", replica.host)
        place = [replica.model, replica.replica_id]
        for state in ReplicaState:
            is_in = float(replica.state is state)
            families["replica_state"].add_metric([*place, state.value], is_in)
        recompute = replica.preemptions - replica.preemptions_swap
        families["num_preemptions"].add_metric([*place, "recompute"], recompute)
        families["num_preemptions"].add_metric([*place, "swap"], replica.preemptions_swap)
        transfers = replica.transfers
        families["prefix_transfers"].add_metric([*place, "done"], transfers.done)
        families["prefix_transfers"].add_metric([*place, "failed"], transfers.failed)
        for name, label, value in _labelled_counts(replica.counters):
            families[name].add_metric([*place, label], value)
        for name, value in _plain_values(replica):
            families[name].add_metric(place, value)
    yield from families.values()


def _plain_values(replica: ReplicaStatus) -> Iterator[tuple[str, float]]:
    """Figures with one value per replica."""
    device = replica.device
    used = device.referenced + device.fenced
    yield "kv_cache_usage_perc", used / device.total if device.total else 0.0
    yield "leases", replica.num_leases
    yield "leased_blocks", replica.leased_blocks
    yield "available_blocks", replica.available_blocks
    yield "num_requests_running", replica.num_running
    yield "num_requests_waiting", replica.num_waiting
    yield "prefix_cache_queries", replica.query_tokens
    yield "prefix_cache_hits", replica.hit_tokens
    yield "steps", replica.steps_done
    yield "reports_lost", replica.reports_lost
    yield "snapshots_asked", replica.snapshots_asked
    yield "copies_failed", replica.counters.copies_failed
    yield "copies_on_write", replica.counters.copies_on_write
    yield "spec_decode_num_draft_tokens", replica.counters.draft_tokens
    yield "spec_decode_num_accepted_tokens", replica.counters.accepted_tokens
    yield "hash_collisions", replica.counters.collisions_refused
    yield "replica_requests_expired", replica.counters.expired
    yield "prefix_transfers_offered", replica.transfers_offered
    yield "prefix_transfer_blocks", replica.transfers.blocks
    yield "prefix_transfer_bytes", replica.transfers.num_bytes
    yield "prefix_transfer_seconds", replica.transfers.seconds
    yield "prefix_transfer_bandwidth_bytes_per_second", replica.transfers.bytes_per_s
    yield "copy_bandwidth_bytes_per_second", replica.copy_bytes_per_s
    yield "prefill_tokens_per_second", replica.prefill_tokens_per_s
    yield "decode_step_seconds", replica.decode_step_s
    if replica.report_age_s is not None:
        yield "report_age_seconds", replica.report_age_s


def _labelled_counts(counters: ReplicaCounters) -> Iterator[tuple[str, str, float]]:
    """Counters with one label beside the place."""
    yield "blocks_evicted", "device", counters.blocks_evicted
    yield "blocks_evicted", "host", counters.host_blocks_evicted
    yield "blocks_copied", "store", counters.blocks_stored
    yield "blocks_copied", "load", counters.blocks_loaded
    for action in _EXHAUSTION:
        yield "exhaustion_events", action, getattr(counters, action)


def _make_families() -> _Families:
    gauges = (
        ("kv_blocks", "Blocks of a tier by state", ("tier", "state")),
        ("replica_state", "1 for the state that a replica is in", ("state",)),
        ("kv_cache_usage_perc", "Share of device blocks in use, 0 to 1", ()),
        ("leases", "Leases that have not ended", ()),
        ("leased_blocks", "Blocks that leases still may take", ()),
        ("available_blocks", "Blocks that a new lease could have", ()),
        ("num_requests_running", "Sequences in the running batch", ()),
        ("num_requests_waiting", "Requests waiting at the replica", ()),
        ("copy_bandwidth_bytes_per_second", "Between the tiers, as measured", ()),
        (
            "prefix_transfer_bandwidth_bytes_per_second",
            "Of each rank, from other replicas, as measured",
            (),
        ),
        ("prefill_tokens_per_second", "As measured", ()),
        ("decode_step_seconds", "As measured", ()),
        ("report_age_seconds", "Since the replica's last report", ()),
    )
    counters = (
        ("num_preemptions", "Preemptions by policy", ("policy",)),
        ("prefix_cache_queries", "Prompt tokens looked up in the cache", ()),
        ("prefix_cache_hits", "Prompt tokens found in the cache", ()),
        ("steps", "Engine steps, and seconds of idleness", ()),
        ("reports_lost", "Reports that did not arrive, or after a later one", ()),
        ("snapshots_asked", "Times that it was asked for all it holds", ()),
        ("blocks_evicted", "Cached blocks dropped to make room", ("tier",)),
        ("blocks_copied", "Blocks copied to the host (store) and back (load)", ("direction",)),
        ("copies_failed", "Copies between the tiers that failed", ()),
        ("prefix_transfers_offered", "Leases that named a replica to copy from", ()),
        ("prefix_transfers", "Prefixes fetched from other replicas", ("outcome",)),
        ("prefix_transfer_blocks", "Blocks that came with them", ()),
        ("prefix_transfer_bytes", "Bytes that each rank read for them", ()),
        ("prefix_transfer_seconds", "Time that they took", ()),
        ("copies_on_write", "Shared blocks copied before they were written", ()),
        ("spec_decode_num_draft_tokens", "Tokens guessed ahead", ()),
        ("spec_decode_num_accepted_tokens", "Guessed tokens that were right", ()),
        ("hash_collisions", "Blocks not published because their hash was taken", ()),
        ("exhaustion_events", "What was done when blocks or places ran out", ("action",)),
        ("replica_requests_expired", "Deadlines that passed at the replica", ()),
    )
    families: _Families = {}
    for name, text, labels in gauges:
        families[name] = GaugeMetricFamily(f"pagefleet_{name}", text, labels=(*_PLACE, *labels))
    for name, text, labels in counters:
        families[name] = CounterMetricFamily(f"pagefleet_{name}", text, labels=(*_PLACE, *labels))
    return families


def _add_blocks(
    family: GaugeMetricFamily | CounterMetricFamily,
    replica: ReplicaStatus,
    tier: str,
    counts: BlockCounts,
) -> None:
    for state in ("clean", "cached_idle", "referenced", "fenced"):
        labels = [replica.model, replica.replica_id, tier, state]
        family.add_metric(labels, getattr(counts, state))
