"""The cluster's brain: knows every replica's blocks, routes and reserves in one atomic step.

Pure: time and randomness come in, nothing waits, no process is known. All of it is soft state
that the replicas' reports rebuild: after a restart the replicas register again, their ledgers are
adopted, and it is right again in one round.
"""

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..protos.errors import ModelNotFound
from ..protos.messages import (
    CacheReset,
    ClusterState,
    ClusterView,
    Explanation,
    Lease,
    ModelCard,
    Refused,
    ReplicaInfo,
    ReplicaReport,
    ReplicaState,
    ReportReply,
    ReserveRequest,
    Ticket,
    WantedWeights,
)
from .admission import AdmissionConfig
from .binding_costs import LateBindingConfig
from .cluster_view import cells_per_pool, make_view, prefix_nodes
from .decision_log import DecisionLog
from .explain import REASONS, explain
from .fair_queue import WaitingRequest
from .lease_table import LeaseRecord
from .model_pool import Grant, ModelPool
from .policies import make_policy
from .prefix_forest import Run
from .replica_view import ReplicaView
from .served_models import ServedModels
from .weights_orders import WeightsOrders

_WATCHDOG_STEPS = 20  # a step may take so many times its usual length before it counts as stuck
_LOOK_INTERVAL_S = 0.1  # between two looks at all replicas: ticks may come much oftener
_UNKNOWN_MODEL_RETRY_S = 1.0
_REPLACED_RETRY_S = 1.0
_MAX_REMEMBERED_DEAD = 1024
DRAIN_S = 30.0  # how long the streams of a draining replica may go on, unless told otherwise
LAST_DRAIN_S = 600.0  # the same where no other replica has its weights, so that they cannot move


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """Settings of the whole controller.

    policy: one of `policies.POLICY_NAMES`. late_binding: its slack covers the way of a grant to a
    leader, which a simulation does not have. lease_ttl_s: a grant that no report lists in this time
    is void. gateway_timeout_s: a gateway silent for so long is gone. watchdog_s: a replica without
    a report, or with work but without a step, for so long, or for 20 of its longest steps, is
    dead. restart_grace_s: how long after the start an unknown model may just not have registered.
    """

    policy: str = "default"
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    late_binding: LateBindingConfig = field(
        default_factory=lambda: LateBindingConfig(start_slack_s=0.05)
    )
    lease_ttl_s: float = 10.0
    gateway_timeout_s: float = 30.0
    watchdog_s: float = 5.0
    restart_grace_s: float = 5.0


@dataclass(slots=True)
class _Entry:
    """The newest attempt of one request: waiting, or under a lease."""

    attempt: int
    pool: ModelPool
    waiting: WaitingRequest | None = None
    record: LeaseRecord | None = None


@dataclass(slots=True)
class _Gateway:
    """Answers that a gateway has still to fetch, and when it was last heard."""

    last_seen: float
    outbox: deque[Lease | Refused] = field(default_factory=deque[Lease | Refused])


class Controller:
    """Owns all pools; every method takes the time."""

    def __init__(self, config: ControllerConfig, rng: random.Random, now: float) -> None:
        self.config = config
        self._rng = rng
        self._started_at = now
        self._looked_at = -math.inf
        self._models = ServedModels(self._make_pool)
        self._views: dict[str, tuple[ModelPool, ReplicaView]] = {}
        self._dead: dict[tuple[str, str], float] = {}
        self._weights = WeightsOrders(LAST_DRAIN_S)
        self._num_resets = 0
        self._drained: dict[str, float] = {}  # replica id → when its streams have to move
        self._entries: dict[str, _Entry] = {}
        self._by_lease: dict[int, str] = {}
        self._gateways: dict[str, _Gateway] = {}
        self._decisions = DecisionLog()
        # Leases outlive a controller in the leaders' ledgers: another life draws another range.
        self._next_lease_id = rng.getrandbits(30) << 32

    # Replicas

    def register_replica(self, info: ReplicaInfo, card: ModelCard, now: float) -> ReportReply:
        """A replica presents itself; whatever was known of an earlier incarnation is void."""
        if (info.replica_id, info.incarnation) in self._dead:
            return ReportReply(fence=True)
        known = self._views.get(info.replica_id)
        if known is not None:
            if known[1].info.incarnation == info.incarnation:
                return ReportReply(needs_snapshot=known[1].needs_snapshot)
            self._remove(info.replica_id, now)
        pool = self._models.pool_for(info, card)
        view = pool.pool.add(info, card, now)
        self._weights.note_registered(info)
        view.drain(self._drained.get(info.replica_id), now)
        self._views[info.replica_id] = (pool, view)
        self._elect(info.model, now)
        return view.reply(now, needs_snapshot=True)

    def report(self, report: ReplicaReport, now: float) -> ReportReply:
        """Mirror a report; what it set free is given to those who wait."""
        if (report.replica_id, report.incarnation) in self._dead:
            return ReportReply(fence=True)
        known = self._views.get(report.replica_id)
        if known is None or known[1].info.incarnation != report.incarnation:
            return ReportReply(unknown=True)
        pool, view = known
        reply, ended = pool.take_report(view, report, now)
        for record in ended:
            self._forget_lease(record)
        self._pump(pool, now)
        if self._decisions.is_watched(now):
            return replace(reply, map_cells=cells_per_pool(len(self._views)))
        return reply

    def replica_failed(self, replica_id: str, incarnation: str, now: float) -> None:
        """A gateway's stream broke: no new leases there until the replica reports again."""
        known = self._views.get(replica_id)
        if known is not None and known[1].info.incarnation == incarnation:
            known[1].suspect = True
            known[1].refresh(now)

    def declare_dead(self, replica_id: str, now: float) -> None:
        """The replica's life is over: fenced if it ever speaks again."""
        known = self._views.get(replica_id)
        if known is not None:
            self._dead[(replica_id, known[1].info.incarnation)] = now
            if len(self._dead) > _MAX_REMEMBERED_DEAD:
                del self._dead[next(iter(self._dead))]
            self._remove(replica_id, now)
            self._pump(known[0], now)

    def drain(
        self, replica_id: str, now: float, *, draining: bool = True, drain_s: float = DRAIN_S
    ) -> bool:
        """No new leases for this replica (or again); False if it is not known.

        drain_s: how long its streams may go on there. Then its leader ends them, and their
        gateways go on with them elsewhere.
        """
        known = self._views.get(replica_id)
        if not draining:
            self._drained.pop(replica_id, None)
        if known is None:
            return False
        if draining:
            self._weights.note_leaving(known[1].info.model, replica_id)
            until = min(now + drain_s, self._drained.get(replica_id, math.inf))
            self._drained[replica_id] = until
        known[1].renews = False
        known[1].drain(self._drained.get(replica_id), now)
        self._elect(known[1].info.model, now)
        self._pump(known[0], now)
        return True

    def update_weights(self, model: str, checkpoint: str, drain_s: float, now: float) -> int:
        """From now on the model has these weights, one replica after the other; their version.

        drain_s: how long streams may go on at the last replica of the weights they began with.
        Raises ModelNotFound.
        """
        name = self._models.name_of(model)
        wanted = self._weights.wanted(name)
        versions = [pool.identity.weights_version for pool in self._models.of(name)]
        version = 1 + max([*versions, 0 if wanted is None else wanted.version])
        self._weights.give(name, checkpoint, version, drain_s)
        self._roll(now)
        return version

    def wanted_weights(self, model: str) -> WantedWeights | None:
        """What a replica of the model that starts now is to load; None = what it was made for."""
        return self._weights.wanted(model)

    def order_reset(self, model: str) -> int:
        """Every replica (of the model, if one is named) is to forget what it has cached, on all
        tiers; the order's number. Raises ModelNotFound.
        """
        name = self._models.name_of(model) if model else ""
        self._num_resets += 1
        for _, view in self._views.values():
            if not name or view.info.model == name:
                view.reset_order = self._num_resets
        return self._num_resets

    def resets(self, order: int) -> tuple[tuple[CacheReset, ...], tuple[str, ...]]:
        """What the replicas that an order concerns have done, and who has not answered."""
        concerned = [view for _, view in self._views.values() if view.reset_order >= order]
        done = [view.report for view in concerned if view.has_reset(order)]
        return (
            tuple(
                CacheReset(report.replica_id, report.reset_blocks, report.epoch)
                for report in done
                if report is not None
            ),
            tuple(view.info.replica_id for view in concerned if not view.has_reset(order)),
        )

    def can_move(self, replica_id: str) -> bool:
        """Whether another replica could go on with this one's streams: one of the same weights."""
        known = self._views.get(replica_id)
        return known is not None and any(
            view is not known[1] and view.state is ReplicaState.READY
            for view in known[0].pool.replicas.values()
        )

    # Requests

    def reserve(self, request: ReserveRequest, now: float) -> Lease | Ticket | Refused:
        """Route and reserve in one step; asking again for the same attempt changes nothing."""
        self.heartbeat(request.gateway_id, now)
        entry = self._entries.get(request.request_key)
        if entry is not None:
            if request.attempt < entry.attempt:
                return _superseded(request)
            if request.attempt == entry.attempt:
                return self._answer_again(entry, now)
            self._supersede(entry, request.request_key, now)
        pool = self._pool_of(request, now)
        if isinstance(pool, Refused):
            return pool
        if self._decisions.wants_costs(now):
            self._decisions.asked(request, explain(pool, request, now))
        outcome = pool.submit(request, now)
        if isinstance(outcome, Refused):
            self._decisions.add("refuse", outcome.reason, request, now)
            return outcome
        if isinstance(outcome, Grant):
            self._book(outcome, pool, now)
            return outcome.lease
        self._entries[request.request_key] = _Entry(request.attempt, pool, waiting=outcome)
        own = self._pump(pool, now, newcomer=request.request_key)
        if own is not None:
            return own
        need = outcome.need.num_blocks
        self._decisions.add("wait", REASONS["wait"], request, now, lease_blocks=need)
        return self._ticket(pool, outcome, now)

    def release(
        self, request_key: str, attempt: int, now: float, output_tokens: int | None = None
    ) -> None:
        """A lease or ticket is no longer needed; says how long the output was if it is known."""
        entry = self._entries.get(request_key)
        if entry is None or entry.attempt != attempt:
            return
        if output_tokens is not None:
            entry.pool.gate.lengths.observe(output_tokens)
        if entry.waiting is not None:
            entry.pool.withdraw(entry.waiting)
            del self._entries[request_key]
        elif entry.record is not None and not self._take_back(entry, now):
            entry.pool.pool.leases.give_back(entry.record)
        self._pump(entry.pool, now)

    def poll_grants(self, gateway_id: str, now: float) -> tuple[Lease | Refused, ...]:
        """The answers that came up for tickets of this gateway; each is handed out once."""
        gateway = self.heartbeat(gateway_id, now)
        answers = tuple(gateway.outbox)
        gateway.outbox.clear()
        return answers

    def heartbeat(self, gateway_id: str, now: float) -> _Gateway:
        """The gateway lives."""
        gateway = self._gateways.get(gateway_id)
        if gateway is None:
            gateway = self._gateways[gateway_id] = _Gateway(now)
        gateway.last_seen = now
        return gateway

    def has_grants(self, gateway_id: str) -> bool:
        """Whether `poll_grants` would return something."""
        gateway = self._gateways.get(gateway_id)
        return gateway is not None and bool(gateway.outbox)

    # Time

    def tick(self, now: float) -> tuple[ReplicaInfo, ...]:
        """What time alone brings about; returns the replicas just declared dead, to be killed."""
        dead = self._find_dead(now)
        for info in dead:
            self.declare_dead(info.replica_id, now)
        self._roll(now)
        self._forget_gateways(now)
        for pool in self._models:
            records, refused = pool.expire(now)
            for record in records:
                self._forget_lease(record)
            for waiting, refusal in refused:
                waited_s = now - waiting.arrived_at
                self._decisions.add(
                    "expire", refusal.reason, waiting.request, now, waited_s=waited_s
                )
                del self._entries[waiting.request.request_key]
                self._send(waiting.request.gateway_id, refusal)
            self._pump(pool, now)
        return tuple(dead)

    def next_wakeup(self, now: float) -> float | None:
        """When `tick` should be called next, at the latest; None = nothing is pending."""
        wakeups = [pool.next_wakeup(now) for pool in self._models]
        return min((moment for moment in wakeups if moment is not None), default=None)

    # Looking

    def model_cards(self) -> tuple[ModelCard, ...]:
        """One per model that a replica serves, or would once somebody asks."""
        holds = self.config.admission.hold_s > 0.0
        current = self._models.current.values()
        return tuple(pool.card for pool in current if holds or pool.pool.replicas)

    def cluster_state(self, now: float) -> ClusterState:
        """Everything that a status page shows."""
        pools = tuple(self._models)
        return ClusterState(
            replicas=tuple(status for pool in pools for status in pool.pool.statuses(now)),
            queued_requests=sum(len(pool.queue) for pool in pools),
            queued_tokens=sum(pool.queue.num_tokens for pool in pools),
            granted=sum(pool.stats.granted for pool in pools),
            refused=sum(pool.stats.refused for pool in pools),
            expired=sum(pool.stats.expired for pool in pools),
            policy=self.config.policy,
            uptime_s=now - self._started_at,
            oldest_wait_s=max((pool.queue.oldest_wait_s(now) for pool in pools), default=0.0),
        )

    def explain(self, request: ReserveRequest, now: float) -> Explanation | Refused:
        """What would happen to the request now, and why."""
        pool = self._pool_of(request, now)
        return pool if isinstance(pool, Refused) else explain(pool, request, now)

    def watch(self, now: float) -> ClusterView:
        """All that a dashboard shows but the prefixes. Its cost is worth it for some seconds."""
        self._decisions.watch(now)
        pools = tuple(self._models)
        return make_view(pools, self.cluster_state(now), self._decisions.views(now), now)

    def recent_prompts(self) -> tuple[ReserveRequest, ...]:
        """The requests that the last decisions were on."""
        return tuple(self._decisions.recent_prompts())

    def with_prefixes(self, view: ClusterView, runs: Sequence[Run]) -> ClusterView:
        """The view with these prefixes, and what is resident of them."""
        return replace(view, prefixes=prefix_nodes(self.pools(), runs))

    def pools(self) -> dict[str, ModelPool]:
        """By model, those that new requests go to."""
        return self._models.current

    def pools_of(self, model: str) -> tuple[ModelPool, ...]:
        """Those of one model, one for each set of weights."""
        return self._models.of(model)

    def check_integrity(self) -> None:
        """Assert that the parts and the maps between them agree."""
        for pool in self._models:
            pool.check_integrity()
        waiting = sum(len(pool.queue) for pool in self._models)
        entries = self._entries.values()
        assert waiting == sum(entry.waiting is not None for entry in entries)
        for key, entry in self._entries.items():
            assert (entry.waiting is None) != (entry.record is None), f"{key} is in two states"
            if entry.record is not None:
                assert self._by_lease[entry.record.lease_id] == key
        for lease_id, key in self._by_lease.items():
            record = self._entries[key].record
            assert record is not None and record.lease_id == lease_id

    # One step each

    def _pool_of(self, request: ReserveRequest, now: float) -> ModelPool | Refused:
        """Where it has to go: what has begun goes on with the weights it began with."""
        try:
            pool = self._models.find(request.model, request.weights)
        except ModelNotFound:
            return self._refuse_unknown_model(request, now)
        return pool or _refused_replaced(request)

    def _make_pool(self, info: ReplicaInfo, card: ModelCard) -> ModelPool:
        return ModelPool(
            info.model,
            info.identity.block_size,
            make_policy(self.config.policy, self.config.late_binding),
            self.config.admission,
            self.config.lease_ttl_s,
            self._draw_lease_id,
            self._rng,
            info.identity,
            card,
        )

    def _roll(self, now: float) -> None:
        """Take out the next replica whose weights are to be replaced; it comes again with them."""
        for model in self._models.names:
            pools = self._models.of(model)
            views = [view for pool in pools for view in pool.pool.replicas.values()]
            turn = self._weights.next_turn(model, views)
            if turn is not None:
                view, last_drain_s = turn
                drain_s = DRAIN_S if self.can_move(view.info.replica_id) else last_drain_s
                view.renews = True
                view.drain(now + drain_s, now)
                self._elect(model, now)

    def _elect(self, model: str, now: float) -> None:
        """Where new requests go may have changed, and for whom there is nobody left."""
        election = self._models.elect(model)
        if election.after is not election.before:
            self._transfer(election.before, election.after, now)
        for pool in election.forsaken:
            for waiting in list(pool.queue):
                self._refuse_waiting(pool, waiting, _refused_replaced(waiting.request))
        self._models.forget_empty(model)

    def _transfer(self, old: ModelPool, new: ModelPool, now: float) -> None:
        """Who waits and has not begun may begin with other weights."""
        for waiting in list(old.queue):
            if waiting.request.weights is not None:
                continue
            outcome = new.take_over(waiting, now)
            if isinstance(outcome, Refused):
                self._refuse_waiting(old, waiting, outcome)
                continue
            old.withdraw(waiting)
            entry = self._entries[waiting.request.request_key]
            entry.pool, entry.waiting = new, outcome
        self._pump(new, now)

    def _refuse_waiting(self, pool: ModelPool, waiting: WaitingRequest, answer: Refused) -> None:
        pool.withdraw(waiting)
        del self._entries[waiting.request.request_key]
        self._send(waiting.request.gateway_id, answer)

    def _draw_lease_id(self) -> int:
        self._next_lease_id += 1
        return self._next_lease_id

    def _remove(self, replica_id: str, now: float) -> None:
        pool, view = self._views.pop(replica_id)
        for record in pool.remove_replica(view):
            self._forget_lease(record)
        self._elect(view.info.model, now)

    def _pump(self, pool: ModelPool, now: float, newcomer: str | None = None) -> Lease | None:
        """Grant what can start; the newcomer's lease is returned, others' wait in outboxes."""
        own: Lease | None = None
        for grant in pool.pump(now):
            self._book(grant, pool, now)
            if grant.request.request_key == newcomer:
                own = grant.lease
            else:
                self._send(grant.request.gateway_id, grant.lease)
        return own

    def _book(self, grant: Grant, pool: ModelPool, now: float) -> None:
        request, lease = grant.request, grant.lease
        key = request.request_key
        entry = self._entries.get(key)
        waited = None if entry is None else entry.waiting
        self._decisions.add(
            "grant",
            REASONS["grant"],
            request,
            now,
            replica_id=lease.replica_id,
            hit_tokens=lease.expected_hit_tokens,
            lease_blocks=lease.num_blocks,
            waited_s=0.0 if waited is None else now - waited.arrived_at,
        )
        grant.record.request_id = request.request_id
        self._entries[key] = _Entry(request.attempt, pool, record=grant.record)
        self._by_lease[grant.record.lease_id] = key

    def _forget_lease(self, record: LeaseRecord) -> None:
        key = self._by_lease.pop(record.lease_id, None)
        if key is not None:
            del self._entries[key]

    def _supersede(self, entry: _Entry, request_key: str, now: float) -> None:
        """A later attempt has begun: whatever the earlier one holds goes back."""
        self.release(request_key, entry.attempt, now)
        if entry.record is not None and self._entries.get(request_key) is entry:
            del self._entries[request_key]
            del self._by_lease[entry.record.lease_id]

    def _send(self, gateway_id: str, answer: Lease | Refused) -> None:
        gateway = self._gateways.get(gateway_id)
        if gateway is not None:
            gateway.outbox.append(answer)

    def _take_back(self, entry: _Entry, now: float) -> bool:
        """Undo a lease that still lies in its gateway's outbox."""
        record = entry.record
        assert record is not None and record.lease is not None
        gateway = self._gateways.get(record.gateway_id)
        if gateway is None or record.lease not in gateway.outbox:
            return False
        gateway.outbox.remove(record.lease)
        self._forget_lease(record)
        entry.pool.drop_grant(record, now)
        return True

    def _answer_again(self, entry: _Entry, now: float) -> Lease | Ticket:
        if entry.waiting is not None:
            return self._ticket(entry.pool, entry.waiting, now)
        assert entry.record is not None and entry.record.lease is not None
        return entry.record.lease

    def _ticket(self, pool: ModelPool, waiting: WaitingRequest, now: float) -> Ticket:
        return Ticket(
            waiting.request.request_key,
            waiting.request.attempt,
            len(pool.queue),
            pool.gate.expected_wait_s(waiting.tenant, now),
        )

    def _refuse_unknown_model(self, request: ReserveRequest, now: float) -> Refused:
        if now - self._started_at < self.config.restart_grace_s:
            reason = "no replica of this model has registered yet"
            return _refused(request, "Unavailable", reason, _UNKNOWN_MODEL_RETRY_S)
        served = ", ".join(self._models.names) or "none"
        reason = f"model {request.model!r} is not served here; served: {served}"
        return _refused(request, "ModelNotFound", reason)

    def _find_dead(self, now: float) -> list[ReplicaInfo]:
        dead: list[ReplicaInfo] = []
        if now - self._looked_at < _LOOK_INTERVAL_S:
            return dead
        self._looked_at = now
        for _, view in self._views.values():
            patience = max(self.config.watchdog_s, _WATCHDOG_STEPS * view.longest_step_s)
            silent = now - max(view.reported_at, view.registered_at) > patience
            stuck = view.num_working > 0 and now - view.moved_at > patience
            if silent or stuck:
                dead.append(view.info)
        return dead

    def _forget_gateways(self, now: float) -> None:
        for gateway_id, gateway in list(self._gateways.items()):
            if now - gateway.last_seen > self.config.gateway_timeout_s:
                del self._gateways[gateway_id]
                self._end_requests_of(gateway_id, now)

    def _end_requests_of(self, gateway_id: str, now: float) -> None:
        """Its tickets end; grants it never took up expire by themselves."""
        gone = [
            (key, entry.attempt)
            for key, entry in self._entries.items()
            if entry.waiting is not None and entry.waiting.request.gateway_id == gateway_id
        ]
        for key, attempt in gone:
            self.release(key, attempt, now)


def _superseded(request: ReserveRequest) -> Refused:
    reason = "a later attempt of the same request has been made"
    return _refused(request, "RequestCancelled", reason)


def _refused_replaced(request: ReserveRequest) -> Refused:
    reason = "the weights that it began with have been replaced"
    return _refused(request, "Unavailable", reason, _REPLACED_RETRY_S)


def _refused(
    request: ReserveRequest, error: str, reason: str, retry_after_s: float | None = None
) -> Refused:
    return Refused(request.request_key, request.attempt, error, reason, retry_after_s)
