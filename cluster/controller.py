"""The cluster's brain: knows every replica's blocks, routes and reserves in one atomic step.

Pure: time and randomness come in, nothing waits, no process is known. All of it is soft state
that the replicas' reports rebuild: after a restart the replicas register again, their ledgers are
adopted, and it is right again in one round.

    reserve ─► the model's pool: a lease, a refusal, or a ticket ─► outbox ─► poll_grants
    register_replica, report ─► the replica's pool ─► whoever waits gets what it set free
    tick ─► the dead, the silent, the expired
"""

import random
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
from .admission_gate import refused
from .attempts import Attempt, Attempts
from .binding_costs import LateBindingConfig
from .cluster_view import cells_per_pool, make_view, prefix_nodes
from .decision_log import DecisionLog
from .draining import DRAIN_S, LAST_DRAIN_S
from .explain import REASONS, explain
from .fair_queue import WaitingRequest
from .grants import Grant
from .lease_table import LeaseRecord
from .model_pool import ModelPool
from .outboxes import Outboxes
from .policies import make_policy
from .prefix_forest import Run
from .replica_orders import ReplicaOrders
from .replica_roster import ReplicaRoster
from .served_models import ServedModels
from .weights_orders import WeightsOrders

_UNKNOWN_MODEL_RETRY_S = 1.0
_REPLACED_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """Settings of the whole controller.

    policy: one of `policies.POLICY_NAMES`. late_binding: its slack covers the way of a grant to a
    leader, which a simulation does not have. lease_ttl_s: a grant that no report lists in this time
    is void. gateway_timeout_s: a gateway silent for so long is gone. watchdog_s: see
    `ReplicaRoster`. restart_grace_s: how long after the start an unknown model may just not have
    registered.
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


class Controller:
    """Owns all pools; every method takes the time."""

    def __init__(self, config: ControllerConfig, rng: random.Random, now: float) -> None:
        self.config = config
        self._rng = rng
        self._started_at = now
        self._models = ServedModels(self._make_pool)
        self._roster = ReplicaRoster(config.watchdog_s)
        self._orders = ReplicaOrders()
        self._weights = WeightsOrders(LAST_DRAIN_S)
        self._attempts = Attempts()
        self._outboxes = Outboxes()
        self._decisions = DecisionLog()
        # Leases outlive a controller in the leaders' ledgers: another life draws another range.
        self._next_lease_id = rng.getrandbits(30) << 32

    # A request: asked, routed, granted or queued, answered, given back

    def reserve(self, request: ReserveRequest, now: float) -> Lease | Ticket | Refused:
        """Route and reserve in one step; asking again for the same attempt changes nothing."""
        self._outboxes.heard(request.gateway_id, now)
        known = self._attempts.get(request.request_key)
        if known is not None:
            if request.attempt < known.number:
                return _superseded(request)
            if request.attempt == known.number:
                return self._answer_again(known, now)
            self._supersede(known, request.request_key, now)
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
        self._attempts.waits(outcome, pool)
        own = self._pump(pool, now, newcomer=request.request_key)
        if own is not None:
            return own
        need = outcome.need.num_blocks
        self._decisions.add("wait", REASONS["wait"], request, now, lease_blocks=need)
        return self._ticket(pool, outcome, now)

    def _answer_again(self, known: Attempt, now: float) -> Lease | Ticket:
        if known.waiting is not None:
            return self._ticket(known.pool, known.waiting, now)
        assert known.record is not None and known.record.lease is not None
        return known.record.lease

    def _supersede(self, known: Attempt, request_key: str, now: float) -> None:
        """A later attempt has begun: whatever the earlier one holds goes back."""
        self.release(request_key, known.number, now)
        if self._attempts.get(request_key) is known:
            self._attempts.forget(request_key)

    def _pool_of(self, request: ReserveRequest, now: float) -> ModelPool | Refused:
        """Where it has to go: what has begun goes on with the weights it began with."""
        try:
            pool = self._models.find(request.model, request.weights)
        except ModelNotFound:
            return self._refuse_unknown_model(request, now)
        return pool or _refused_replaced(request)

    def _refuse_unknown_model(self, request: ReserveRequest, now: float) -> Refused:
        if now - self._started_at < self.config.restart_grace_s:
            reason = "no replica of this model has registered yet"
            return refused(request, "Unavailable", reason, retry_after_s=_UNKNOWN_MODEL_RETRY_S)
        served = ", ".join(self._models.names) or "none"
        reason = f"model {request.model!r} is not served here; served: {served}"
        return refused(request, "ModelNotFound", reason)

    def _book(self, grant: Grant, pool: ModelPool, now: float) -> None:
        request, lease = grant.request, grant.lease
        known = self._attempts.get(request.request_key)
        waited = None if known is None else known.waiting
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
        self._attempts.granted(grant, pool)

    def _draw_lease_id(self) -> int:
        self._next_lease_id += 1
        return self._next_lease_id

    def _pump(self, pool: ModelPool, now: float, newcomer: str | None = None) -> Lease | None:
        """Grant what can start; the newcomer's lease is returned, others' wait in outboxes."""
        own: Lease | None = None
        for grant in pool.pump(now):
            self._book(grant, pool, now)
            if grant.request.request_key == newcomer:
                own = grant.lease
            else:
                self._outboxes.send(grant.request.gateway_id, grant.lease)
        return own

    def _ticket(self, pool: ModelPool, waiting: WaitingRequest, now: float) -> Ticket:
        return Ticket(
            waiting.request.request_key,
            waiting.request.attempt,
            len(pool.queue),
            pool.gate.expected_wait_s(waiting.tenant, now),
        )

    def heartbeat(self, gateway_id: str, now: float) -> None:
        """The gateway lives."""
        self._outboxes.heard(gateway_id, now)

    def has_grants(self, gateway_id: str) -> bool:
        """Whether `poll_grants` would return something."""
        return self._outboxes.has_answers(gateway_id)

    def poll_grants(self, gateway_id: str, now: float) -> tuple[Lease | Refused, ...]:
        """The answers that came up for tickets of this gateway; each is handed out once."""
        self._outboxes.heard(gateway_id, now)
        return self._outboxes.fetch(gateway_id)

    def release(
        self, request_key: str, attempt: int, now: float, output_tokens: int | None = None
    ) -> None:
        """A lease or ticket is no longer needed; says how long the output was if it is known."""
        known = self._attempts.get(request_key)
        if known is None or known.number != attempt:
            return
        if output_tokens is not None:
            known.pool.gate.lengths.observe(output_tokens)
        if known.waiting is not None:
            known.pool.withdraw(known.waiting)
            self._attempts.forget(request_key)
        elif known.record is not None and not self._take_back(known.pool, known.record, now):
            known.pool.pool.leases.give_back(known.record)
        self._pump(known.pool, now)

    def _take_back(self, pool: ModelPool, record: LeaseRecord, now: float) -> bool:
        """Undo a lease that still lies in its gateway's outbox."""
        assert record.lease is not None, f"lease {record.lease_id} is of an earlier controller"
        if not self._outboxes.take_back(record.gateway_id, record.lease):
            return False
        self._attempts.forget_lease(record)
        pool.drop_grant(record, now)
        return True

    # Replicas: there, reporting, in doubt, gone

    def register_replica(self, info: ReplicaInfo, card: ModelCard, now: float) -> ReportReply:
        """A replica presents itself; whatever was known of an earlier incarnation is void."""
        if self._roster.is_dead(info.replica_id, info.incarnation):
            return ReportReply(fence=True)
        known = self._roster.get(info.replica_id)
        if known is not None:
            if known.view.info.incarnation == info.incarnation:
                return ReportReply(needs_snapshot=known.view.needs_snapshot)
            self._remove(info.replica_id, now)
        pool = self._models.pool_for(info, card)
        view = pool.pool.add(info, card, now)
        self._weights.note_registered(info)
        view.drain(self._orders.drain_until(info.replica_id), now)
        self._roster.add(pool, view)
        self._elect(info.model, now)
        return view.reply(now, needs_snapshot=True)

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

    def report(self, report: ReplicaReport, now: float) -> ReportReply:
        """Mirror a report; what it set free is given to those who wait."""
        if self._roster.is_dead(report.replica_id, report.incarnation):
            return ReportReply(fence=True)
        known = self._roster.get(report.replica_id, report.incarnation)
        if known is None:
            return ReportReply(unknown=True)
        reply, ended = known.pool.take_report(known.view, report, now)
        for record in ended:
            self._attempts.forget_lease(record)
        self._pump(known.pool, now)
        if self._decisions.is_watched(now):
            return replace(reply, map_cells=cells_per_pool(len(self._roster)))
        return reply

    def replica_failed(self, replica_id: str, incarnation: str, now: float) -> None:
        """A gateway's stream broke: no new leases there until the replica reports again."""
        known = self._roster.get(replica_id, incarnation)
        if known is not None:
            known.view.suspect = True
            known.view.refresh(now)

    def declare_dead(self, replica_id: str, now: float) -> None:
        """The replica's life is over: fenced if it ever speaks again."""
        known = self._roster.get(replica_id)
        if known is not None:
            self._roster.bury(known.view.info)
            self._remove(replica_id, now)
            self._pump(known.pool, now)

    def _remove(self, replica_id: str, now: float) -> None:
        member = self._roster.remove(replica_id)
        for record in member.pool.remove_replica(member.view):
            self._attempts.forget_lease(record)
        self._elect(member.view.info.model, now)

    # Time

    def tick(self, now: float) -> tuple[ReplicaInfo, ...]:
        """What time alone brings about; returns the replicas just declared dead, to be killed."""
        dead = self._roster.find_dead(now)
        for info in dead:
            self.declare_dead(info.replica_id, now)
        self._roll(now)
        for gateway_id in self._outboxes.forget_silent(now - self.config.gateway_timeout_s):
            self._end_requests_of(gateway_id, now)
        for pool in self._models:
            self._expire(pool, now)
            self._pump(pool, now)
        return tuple(dead)

    def _expire(self, pool: ModelPool, now: float) -> None:
        """End grants that nobody took up, and refuse who has waited in vain."""
        records, refusals = pool.expire(now)
        for record in records:
            self._attempts.forget_lease(record)
        for waiting, refusal in refusals:
            request, waited_s = waiting.request, now - waiting.arrived_at
            self._decisions.add("expire", refusal.reason, request, now, waited_s=waited_s)
            self._attempts.forget(request.request_key)
            self._outboxes.send(request.gateway_id, refusal)

    def _end_requests_of(self, gateway_id: str, now: float) -> None:
        """Its tickets end; grants it never took up expire by themselves."""
        for key, attempt in self._attempts.waiting_for(gateway_id):
            self.release(key, attempt.number, now)

    def next_wakeup(self, now: float) -> float | None:
        """When `tick` should be called next, at the latest; None = nothing is pending."""
        wakeups = [pool.next_wakeup(now) for pool in self._models]
        return min((moment for moment in wakeups if moment is not None), default=None)

    # Orders: drains, resets, other weights

    def drain(
        self, replica_id: str, now: float, *, draining: bool = True, drain_s: float = DRAIN_S
    ) -> bool:
        """No new leases for this replica (or again); False if it is not known.

        drain_s: how long its streams may go on there. Then its leader ends them, and their
        gateways go on with them elsewhere.
        """
        known = self._roster.get(replica_id)
        if not draining:
            self._orders.end_drain(replica_id)
        if known is None:
            return False
        pool, view = known.pool, known.view
        if draining:
            self._weights.note_leaving(view.info.model, replica_id)
            self._orders.drain(replica_id, now + drain_s)
        view.renews = False
        view.drain(self._orders.drain_until(replica_id), now)
        self._elect(view.info.model, now)
        self._pump(pool, now)
        return True

    def can_move(self, replica_id: str) -> bool:
        """Whether another replica could go on with this one's streams: one of the same weights."""
        known = self._roster.get(replica_id)
        return known is not None and any(
            view is not known.view and view.state is ReplicaState.READY
            for view in known.pool.pool.replicas.values()
        )

    def order_reset(self, model: str) -> int:
        """Every replica (of the model, if one is named) is to forget what it has cached, on all
        tiers; the order's number. Raises ModelNotFound.
        """
        name = self._models.name_of(model) if model else ""
        return self._orders.reset(view for view in self._roster if name in ("", view.info.model))

    def resets(self, order: int) -> tuple[tuple[CacheReset, ...], tuple[str, ...]]:
        """What the replicas that an order concerns have done, and who has not answered."""
        return self._orders.resets(order, self._roster)

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
            self._attempts.waits(outcome, new)
        self._pump(new, now)

    def _refuse_waiting(self, pool: ModelPool, waiting: WaitingRequest, answer: Refused) -> None:
        pool.withdraw(waiting)
        self._attempts.forget(waiting.request.request_key)
        self._outboxes.send(waiting.request.gateway_id, answer)

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
            granted=sum(pool.granter.num_granted for pool in pools),
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
        self._attempts.check_integrity(sum(len(pool.queue) for pool in self._models))


def _superseded(request: ReserveRequest) -> Refused:
    reason = "a later attempt of the same request has been made"
    return refused(request, "RequestCancelled", reason)


def _refused_replaced(request: ReserveRequest) -> Refused:
    reason = "the weights that it began with have been replaced"
    return refused(request, "Unavailable", reason, retry_after_s=_REPLACED_RETRY_S)
