"""Any interleaving of clients, leaders and a lossy network: no block is ever promised twice."""

from contextlib import suppress
from dataclasses import replace

from cluster_factories import (
    IDENTITY,
    FakeReplica,
    make_card,
    make_controller,
    make_hashes,
    make_info,
)
from cluster_factories import make_request as build_request
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagefleet.cluster.admission import AdmissionConfig
from pagefleet.protos.errors import ModelNotFound
from pagefleet.protos.messages import (
    AdmissionClass,
    CacheIdentity,
    Lease,
    Refused,
    ReplicaReport,
    ReserveRequest,
    Ticket,
)

REPLICAS = ("r0", "r1")
WEIGHTS = (IDENTITY, replace(IDENTITY, weights_version=2, model_fingerprint="other"))
BLOCKS = 20


class ClusterMachine(RuleBasedStateMachine):
    """Two leaders of 20 blocks, two gateways, and a network that loses, repeats and reorders."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.lives = 0
        self.seed = 0
        self.replicas: dict[str, FakeReplica] = {}
        self.in_flight: list[ReplicaReport] = []
        self.asked: dict[str, ReserveRequest] = {}
        self.leases: dict[str, Lease] = {}
        self.accepted: dict[int, str] = {}
        self._new_controller()
        for replica_id in REPLICAS:
            self._new_incarnation(replica_id)

    def _new_controller(self) -> None:
        self.seed += 1
        self.controller = make_controller(
            admission=AdmissionConfig(max_queued_requests=6),
            seed=self.seed,
            watchdog_s=1e9,
            restart_grace_s=1e9,
        )

    def _new_incarnation(self, replica_id: str, identity: CacheIdentity = IDENTITY) -> None:
        self.lives += 1
        info = make_info(replica_id, f"life-{self.lives}", num_blocks=BLOCKS, identity=identity)
        old = self.replicas.get(replica_id)
        if old is not None:
            for lease_id in old.remaining:
                self.accepted.pop(lease_id, None)
        self.replicas[replica_id] = FakeReplica(info, BLOCKS)
        self._register(replica_id)

    def _register(self, replica_id: str) -> None:
        replica = self.replicas[replica_id]
        reply = self.controller.register_replica(replica.info, make_card(replica.info), self.now)
        if reply.needs_snapshot:
            self._deliver(replica.report(snapshot=True))

    def _deliver(self, report: ReplicaReport) -> None:
        reply = self.controller.report(report, self.now)
        replica = self.replicas[report.replica_id]
        if report.incarnation != replica.info.incarnation:
            return
        if reply.unknown:
            self._register(report.replica_id)
        elif reply.needs_snapshot:
            self.in_flight.append(replica.report(snapshot=True))

    def _take(self, answer: Lease | Ticket | Refused) -> None:
        if isinstance(answer, Lease):
            begun = self.asked[answer.request_key].weights
            assert begun in (None, answer.weights), f"{begun} cannot go on with {answer}"
            self.leases[answer.request_key] = answer
        elif isinstance(answer, Refused):
            assert answer.error != "Overloaded" or (answer.retry_after_s or 0) > 0
            self.asked.pop(answer.request_key, None)

    def _some(self, choices: "list[str]", pick: int) -> str:
        return sorted(choices)[pick % len(choices)]

    @rule(
        tokens=st.integers(1, 160),
        output=st.integers(1, 160),
        kind=st.sampled_from(list(AdmissionClass)),
        tenant=st.sampled_from("xy"),
        gateway=st.sampled_from("gh"),
        deadline=st.sampled_from([None, 5.0]),
        chain=st.integers(0, 2),
        begun=st.sampled_from([None, None, *WEIGHTS]),
    )
    def reserve(
        self,
        tokens: int,
        output: int,
        kind: AdmissionClass,
        tenant: str,
        gateway: str,
        deadline: float | None,
        chain: int,
        begun: CacheIdentity | None,
    ) -> None:
        request = build_request(
            weights=None if begun is None else begun.weights,
            num_tokens=tokens,
            max_tokens=output,
            admission_class=kind,
            tenant=tenant,
            gateway_id=gateway,
            deadline_s=deadline,
            route_hashes=make_hashes(tokens // 16, chain),
        )
        self.asked[request.request_key] = request
        free = {
            status.replica_id: status.available_blocks
            for status in self.controller.cluster_state(self.now).replicas
        }
        answer = self.controller.reserve(request, self.now)
        if isinstance(answer, Lease):
            assert answer.num_blocks <= free[answer.replica_id], f"{answer} of {free}"
        self._take(answer)

    @precondition(lambda self: self.asked)
    @rule(pick=st.integers(0, 100))
    def reserve_again(self, pick: int) -> None:
        key = self._some(list(self.asked), pick)
        answer = self.controller.reserve(self.asked[key], self.now)
        known = self.leases.get(key)
        if known is not None and isinstance(answer, Lease):
            known_alive = known.lease_id >> 32 == answer.lease_id >> 32
            if known_alive and known.lease_id in self._mirrored():
                assert answer == known, "asking again gave another lease"
        self._take(answer)

    def _mirrored(self) -> set[int]:
        return {
            record.lease_id for pool in self.controller.pools_of("m") for record in pool.pool.leases
        }

    @precondition(lambda self: self.asked)
    @rule(pick=st.integers(0, 100))
    def next_attempt(self, pick: int) -> None:
        key = self._some(list(self.asked), pick)
        request = self.asked[key] = replace(self.asked[key], attempt=self.asked[key].attempt + 1)
        self.leases.pop(key, None)
        self._take(self.controller.reserve(request, self.now))

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 100))
    def submit(self, pick: int) -> None:
        key = self._some(list(self.leases), pick)
        lease = self.leases.pop(key)
        replica = self.replicas[lease.replica_id]
        if replica.info.incarnation != lease.incarnation or lease.lease_id in replica.used:
            return
        if replica.accept(lease):
            self.accepted[lease.lease_id] = key

    @precondition(lambda self: self.accepted)
    @rule(pick=st.integers(0, 100), blocks=st.integers(1, 20))
    def grow(self, pick: int, blocks: int) -> None:
        lease_id = sorted(self.accepted)[pick % len(self.accepted)]
        self._leader_of(lease_id).take(lease_id, blocks)

    @precondition(lambda self: self.accepted)
    @rule(pick=st.integers(0, 100), tells=st.booleans())
    def finish(self, pick: int, tells: bool) -> None:
        lease_id = sorted(self.accepted)[pick % len(self.accepted)]
        replica = self._leader_of(lease_id)
        replica.store(*make_hashes(2, lease_id % 3))
        replica.finish(lease_id)
        key = self.accepted.pop(lease_id)
        request = self.asked.pop(key, None)
        if tells and request is not None:
            self.controller.release(key, request.attempt, self.now, output_tokens=5)

    def _leader_of(self, lease_id: int) -> FakeReplica:
        return next(replica for replica in self.replicas.values() if lease_id in replica.used)

    @precondition(lambda self: self.asked)
    @rule(pick=st.integers(0, 100))
    def cancel(self, pick: int) -> None:
        key = self._some(list(self.asked), pick)
        request = self.asked.pop(key)
        self.leases.pop(key, None)
        self.controller.release(key, request.attempt, self.now)

    @rule(replica_id=st.sampled_from(REPLICAS), chain=st.integers(0, 2), count=st.integers(1, 4))
    def evict(self, replica_id: str, chain: int, count: int) -> None:
        self.replicas[replica_id].drop(*make_hashes(4, chain)[-count:])

    @rule(replica_id=st.sampled_from(REPLICAS))
    def report(self, replica_id: str) -> None:
        self.in_flight.append(self.replicas[replica_id].report())

    @precondition(lambda self: self.in_flight)
    @rule(pick=st.integers(0, 100), fate=st.sampled_from(["in order", "any", "twice", "lost"]))
    def network(self, pick: int, fate: str) -> None:
        place = 0 if fate == "in order" else pick % len(self.in_flight)
        report = self.in_flight[place]
        if fate != "twice":
            del self.in_flight[place]
        if fate != "lost":
            self._deliver(report)

    @rule(gateway=st.sampled_from("gh"))
    def poll(self, gateway: str) -> None:
        for answer in self.controller.poll_grants(gateway, self.now):
            request = self.asked.get(answer.request_key)
            if request is not None and request.attempt == answer.attempt:
                self._take(answer)

    @rule(seconds=st.sampled_from([0.1, 1.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.controller.tick(self.now)

    @rule(replica_id=st.sampled_from(REPLICAS), identity=st.sampled_from(WEIGHTS))
    def restart_replica(self, replica_id: str, identity: CacheIdentity) -> None:
        self._new_incarnation(replica_id, identity)

    @rule()
    def update_weights(self) -> None:
        with suppress(ModelNotFound):
            self.controller.update_weights("m", "/new", 5.0, self.now)

    @rule(replica_id=st.sampled_from(REPLICAS), draining=st.booleans())
    def drain(self, replica_id: str, draining: bool) -> None:
        self.controller.drain(replica_id, self.now, draining=draining)

    @rule()
    def restart_controller(self) -> None:
        self._new_controller()
        self.asked.clear()  # their gateways ask again, under new attempts
        self.leases.clear()

    @invariant()
    def books_agree(self) -> None:
        self.controller.check_integrity()

    @invariant()
    def no_leader_owes_more_than_it_has(self) -> None:
        for replica in self.replicas.values():
            assert 0 <= sum(replica.remaining.values()) <= replica.free

    @invariant()
    def what_is_promised_fits(self) -> None:
        for status in self.controller.cluster_state(self.now).replicas:
            assert status.leased_blocks >= 0
            assert status.available_blocks + status.leased_blocks <= max(
                BLOCKS, status.leased_blocks
            )

    def teardown(self) -> None:
        """When all has ended and been told, nothing is left over and a newcomer is served."""
        wanted = self.controller.wanted_weights("m")
        for replica_id, replica in list(self.replicas.items()):
            self.controller.drain(replica_id, self.now, draining=False)
            if wanted is not None and replica.info.identity.weights_version < wanted.version:
                self._new_incarnation(replica_id, replace(IDENTITY, weights_version=wanted.version))
        for key, request in list(self.asked.items()):
            self.controller.release(key, request.attempt, self.now)
        self.asked.clear()
        for _ in range(3):
            for replica_id, replica in self.replicas.items():
                for lease_id in list(replica.used):
                    replica.finish(lease_id)
                self._register(replica_id)
                self._deliver(replica.report())
                self._deliver(replica.report(snapshot=True))
            self.now += 100.0
            self.controller.tick(self.now)
        state = self.controller.cluster_state(self.now)
        assert state.queued_requests == 0, f"{state.queued_requests} still wait"
        for status in state.replicas:
            assert (status.leased_blocks, status.available_blocks) == (0, BLOCKS), f"{status}"
        assert isinstance(self.controller.reserve(build_request(), self.now), Lease)


TestCluster = ClusterMachine.TestCase
TestCluster.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
