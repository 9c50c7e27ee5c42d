"""The controller's behaviour, one scenario a test."""

import random
from dataclasses import replace

import pytest
from cluster_factories import (
    FakeReplica,
    join,
    make_card,
    make_controller,
    make_hashes,
    make_info,
    make_request,
    tell,
)

from pagefleet.cluster.admission import AdmissionConfig
from pagefleet.cluster.controller import Controller
from pagefleet.protos.messages import (
    AdmissionClass,
    Lease,
    LeaseUse,
    Refused,
    ReplicaState,
    ReserveRequest,
    Ticket,
)

WHOLE_POOL = {"num_tokens": 1500, "max_tokens": 100}  # 100 of 100 blocks


def reserve(controller: Controller, request: ReserveRequest, now: float = 1.0) -> Lease:
    answer = controller.reserve(request, now)
    assert isinstance(answer, Lease), answer
    controller.check_integrity()
    return answer


def only_status(controller: Controller, now: float = 1.0):
    (status,) = controller.cluster_state(now).replicas
    return status


# Replicas


def test_a_replica_is_used_once_its_counts_are_known() -> None:
    controller, info = make_controller(), make_info()
    assert controller.register_replica(info, make_card(info), 0.0).needs_snapshot
    assert only_status(controller).state is ReplicaState.STARTING
    assert isinstance(controller.reserve(make_request(), 0.1), Ticket)
    controller.report(FakeReplica(info).report(snapshot=True), 0.2)
    (grant,) = controller.poll_grants("g", 0.3)
    assert isinstance(grant, Lease) and grant.replica_id == "r0"


def test_a_gap_asks_that_replica_for_a_snapshot() -> None:
    controller = make_controller()
    replica = join(controller, make_info())
    replica.store(*make_hashes(3))
    replica.report()  # lost
    reply = controller.report(replica.report(), 1.0)
    assert reply.needs_snapshot
    assert not controller.report(replica.report(snapshot=True), 1.1).needs_snapshot
    assert only_status(controller).indexed_device == 3


def test_lost_reports_and_snapshots_asked_for_are_counted() -> None:
    controller = make_controller()
    replica = join(controller, make_info())  # its first snapshot is not for anything lost
    tell(controller, replica, 0.5)
    counted = []
    for number_lost in (0, 2, 1):
        lost = [replica.report() for _ in range(number_lost)]
        assert controller.report(replica.report(), 1.0).needs_snapshot is bool(lost)
        assert controller.report(replica.report(), 1.1).needs_snapshot is bool(lost)  # once asked
        controller.report(replica.report(snapshot=True), 1.2)
        for late in lost:
            controller.report(late, 1.3)
        status = only_status(controller)
        counted.append((status.reports_lost, status.snapshots_asked))
    replica.report()
    controller.report(replica.report(snapshot=True), 1.4)  # which it sent unasked
    assert counted == [(0, 0), (2, 1), (3, 2)]
    status = only_status(controller)
    assert (status.reports_lost, status.snapshots_asked) == (4, 2)


def test_a_wrong_digest_asks_for_a_snapshot() -> None:
    controller = make_controller()
    replica = join(controller, make_info())
    assert controller.report(replica.report(digest_device=5), 1.0).needs_snapshot
    status = only_status(controller)
    assert (status.reports_lost, status.snapshots_asked) == (0, 1)


def test_late_and_repeated_reports_change_nothing() -> None:
    controller = make_controller()
    replica = join(controller, make_info())
    old = replica.report(num_waiting=9)
    controller.report(replica.report(), 1.0)
    controller.report(replica.report(snapshot=True), 1.0)
    before = only_status(controller)
    controller.report(old, 1.1)
    assert replace(only_status(controller), report_age_s=None) == replace(before, report_age_s=None)


def test_an_unknown_replica_is_told_to_register() -> None:
    controller = make_controller()
    assert controller.report(FakeReplica(make_info()).report(), 0.0).unknown


def test_c1_a_restart_under_the_same_name_voids_all_that_was_known() -> None:
    controller, hashes = make_controller(), make_hashes(4)
    replica = join(controller, make_info(incarnation="a"))
    replica.store(*hashes)
    tell(controller, replica, 1.0)
    lease = reserve(controller, make_request(route_hashes=hashes, num_tokens=80))
    assert lease.expected_hit_tokens == 64
    stale = replica.report()
    join(controller, make_info(incarnation="b"), 2.0)
    status = only_status(controller)
    assert (status.indexed_device, status.leased_blocks) == (0, 0)
    assert controller.report(stale, 2.1).unknown
    again = reserve(controller, make_request(route_hashes=hashes, num_tokens=80), 3.0)
    assert (again.incarnation, again.expected_hit_tokens) == ("b", 0)


def test_c2_a_cache_reset_empties_the_index_within_one_report() -> None:
    controller = make_controller()
    replica = join(controller, make_info())
    replica.store(*make_hashes(5))
    tell(controller, replica, 1.0)
    assert only_status(controller).indexed_device == 5
    replica.resident.clear()
    replica.epoch += 1
    reply = controller.report(replica.report(), 1.1)
    assert not reply.needs_snapshot
    assert only_status(controller).indexed_device == 0


def test_c3_a_removed_replica_is_never_tried_again() -> None:
    controller, hashes = make_controller(), make_hashes(4)
    a, b = (join(controller, make_info(name)) for name in ("a", "b"))
    b.store(*hashes)
    tell(controller, b, 1.0)
    controller.declare_dead("b", 1.1)
    for _ in range(50):
        request = make_request(route_hashes=hashes)
        lease = reserve(controller, request, 1.2)
        assert lease.replica_id == "a" and a.accept(lease)
        a.finish(lease.lease_id)
        tell(controller, a, 1.2)
    assert only_status(controller).replica_id == "a"
    assert controller.report(b.report(), 1.3).fence


def test_c12_counts_of_two_replicas_are_kept_apart() -> None:
    controller = make_controller()
    a, b = (join(controller, make_info(name)) for name in ("a", "b"))
    lease = reserve(controller, make_request(**WHOLE_POOL))
    owner, other = (a, b) if lease.replica_id == "a" else (b, a)
    owner.accept(lease)
    tell(controller, owner, 1.1)
    available = {s.replica_id: s.available_blocks for s in controller.cluster_state(2.0).replicas}
    assert available == {owner.info.replica_id: 0, other.info.replica_id: 100}


def test_c28_models_do_not_mix() -> None:
    controller, hashes = make_controller(), make_hashes(4)
    a = join(controller, make_info("a", model="x"))
    join(controller, make_info("b", model="y"))
    a.store(*hashes)
    tell(controller, a, 1.0)
    request = make_request(model="y", route_hashes=hashes, num_tokens=80)
    lease = reserve(controller, request)
    assert (lease.replica_id, lease.expected_hit_tokens) == ("b", 0)
    assert {card.model for card in controller.model_cards()} == {"x", "y"}


def test_an_alias_names_the_same_model() -> None:
    controller, info = make_controller(), make_info()
    replica = FakeReplica(info)
    controller.register_replica(info, replace(make_card(info), aliases=("short",)), 0.0)
    controller.report(replica.report(snapshot=True), 0.0)
    assert reserve(controller, make_request(model="short")).replica_id == "r0"


def test_a_silent_replica_is_dead_and_its_waiting_requests_go_on() -> None:
    controller = make_controller(watchdog_s=5.0)
    a = join(controller, make_info("a"))
    reserve(controller, make_request(**WHOLE_POOL))
    assert isinstance(controller.reserve(make_request(), 1.0), Ticket)
    assert controller.tick(4.9) == ()
    assert [info.replica_id for info in controller.tick(5.1)] == ["a"]
    assert controller.report(a.report(), 5.2).fence
    join(controller, make_info("a", "b"), 6.0)
    assert len(controller.poll_grants("g", 6.1)) == 1


def test_a_replica_with_work_and_no_step_is_dead_although_it_reports() -> None:
    controller = make_controller(watchdog_s=5.0)
    replica = join(controller, make_info())
    for second in range(1, 5):
        controller.report(replica.report(num_running=1), float(second))
        assert controller.tick(float(second)) == ()
    controller.report(replica.report(num_running=1), 5.5)
    assert len(controller.tick(5.6)) == 1


def test_an_idle_replica_that_reports_lives() -> None:
    controller = make_controller(watchdog_s=5.0)
    replica = join(controller, make_info())
    for second in range(1, 60):
        controller.report(replica.report(), float(second))
        assert controller.tick(float(second)) == ()


def test_a_hint_of_failure_bars_a_replica_until_it_reports() -> None:
    controller = make_controller()
    replica = join(controller, make_info())
    controller.replica_failed("r0", "another life", 1.0)
    assert only_status(controller).state is ReplicaState.READY
    controller.replica_failed("r0", "a", 1.0)
    assert isinstance(controller.reserve(make_request(), 1.1), Ticket)
    tell(controller, replica, 1.2)
    assert len(controller.poll_grants("g", 1.3)) == 1


def test_draining_gives_no_new_leases_and_outlives_a_restart() -> None:
    controller = make_controller()
    replica = join(controller, make_info())
    assert not controller.drain("nobody", 1.0)
    assert controller.drain("r0", 1.0)
    assert controller.report(replica.report(), 1.1).draining
    assert isinstance(controller.reserve(make_request(), 1.2), Ticket)
    join(controller, make_info(incarnation="b"), 2.0)
    assert only_status(controller).state is ReplicaState.DRAINING
    controller.drain("r0", 3.0, draining=False)
    assert len(controller.poll_grants("g", 3.1)) == 1


def test_a_restarted_controller_adopts_the_ledgers_in_one_round() -> None:
    controller = make_controller(seed=1)
    replica = join(controller, make_info())
    lease = reserve(controller, make_request(**WHOLE_POOL))
    replica.accept(lease)
    replica.take(lease.lease_id, 30)
    tell(controller, replica, 1.1)
    restarted = make_controller(seed=2)
    assert restarted.report(replica.report(), 2.0).unknown
    restarted.register_replica(replica.info, make_card(replica.info), 2.1)
    restarted.report(replica.report(snapshot=True), 2.2)
    status = only_status(restarted, 2.3)
    assert (status.leased_blocks, status.available_blocks) == (70, 0)
    assert isinstance(restarted.reserve(make_request(), 2.4), Ticket)
    replica.finish(lease.lease_id)
    tell(restarted, replica, 2.5)
    (grant,) = restarted.poll_grants("g", 2.6)
    assert grant.lease_id != lease.lease_id
    restarted.check_integrity()


def test_an_unknown_model_may_be_about_to_register_after_a_restart() -> None:
    controller = make_controller(restart_grace_s=5.0)
    early = controller.reserve(make_request(), 1.0)
    assert isinstance(early, Refused) and early.error == "Unavailable" and early.retry_after_s
    late = controller.reserve(make_request(), 6.0)
    assert isinstance(late, Refused) and late.error == "ModelNotFound"
    assert late.retry_after_s is None


# Requests


def test_asking_again_gives_the_same_answer() -> None:
    controller = make_controller()
    join(controller, make_info())
    request, waiting = make_request(**WHOLE_POOL), make_request()
    lease = reserve(controller, request)
    assert controller.reserve(request, 2.0) == lease
    assert isinstance(controller.reserve(waiting, 2.0), Ticket)
    assert isinstance(controller.reserve(waiting, 2.1), Ticket)
    assert controller.cluster_state(2.2).queued_requests == 1


def test_a_later_attempt_replaces_an_earlier_one() -> None:
    controller = make_controller()
    a, _ = (join(controller, make_info(name)) for name in ("a", "b"))
    request = make_request()
    first = reserve(controller, request)
    second = reserve(controller, replace(request, attempt=2, excluded=(first.replica_id,)), 1.1)
    assert second.replica_id != first.replica_id
    stale = controller.reserve(request, 1.2)
    assert isinstance(stale, Refused) and stale.error == "RequestCancelled"
    tell(controller, a, 1.3)
    controller.check_integrity()


def test_an_only_replica_is_tried_again_although_it_failed() -> None:
    controller = make_controller()
    join(controller, make_info())
    assert reserve(controller, make_request(excluded=("r0",))).replica_id == "r0"


def test_a_grant_still_in_the_outbox_is_taken_back_at_once() -> None:
    controller = make_controller()
    replica = join(controller, make_info())
    lease = reserve(controller, make_request(**WHOLE_POOL))
    waiting = make_request(**WHOLE_POOL)
    assert isinstance(controller.reserve(waiting, 1.1), Ticket)
    controller.release(lease.request_key, 1, 1.2)
    tell(controller, replica, 1.3)
    assert controller.has_grants("g")
    controller.release(waiting.request_key, 1, 1.4)
    assert not controller.has_grants("g")
    assert only_status(controller).available_blocks == 100
    controller.check_integrity()


def test_c9_64_submits_never_overbook_room_for_8() -> None:
    controller = make_controller()
    replica = join(controller, make_info(num_blocks=40))
    requests = [make_request() for _ in range(64)]  # 5 blocks each
    answers = [controller.reserve(request, 1.0) for request in requests]
    leases = [answer for answer in answers if isinstance(answer, Lease)]
    assert len(leases) == 8
    served = 0
    while leases:
        for lease in leases:
            assert replica.accept(lease), "an overbooked lease was refused"
            replica.take(lease.lease_id, lease.num_blocks)
        tell(controller, replica, 2.0)
        for lease in leases:
            replica.finish(lease.lease_id)
            served += 1
        tell(controller, replica, 3.0)
        controller.check_integrity()
        leases = [grant for grant in controller.poll_grants("g", 3.0) if isinstance(grant, Lease)]
        assert len(leases) <= 8
    assert served == 64


def test_a_lease_that_no_report_lists_expires() -> None:
    controller = make_controller(lease_ttl_s=10.0, watchdog_s=1e9)
    join(controller, make_info())
    reserve(controller, make_request(**WHOLE_POOL), 1.0)
    assert isinstance(controller.reserve(make_request(), 2.0), Ticket)
    controller.tick(10.9)
    assert not controller.has_grants("g")
    controller.tick(11.0)
    assert controller.has_grants("g")
    controller.check_integrity()


def test_a_deadline_that_passes_in_the_queue_is_told() -> None:
    controller = make_controller(watchdog_s=1e9)
    replica = join(controller, make_info())
    lease = reserve(controller, make_request(**WHOLE_POOL))
    replica.accept(lease)
    tell(controller, replica, 1.0)
    assert isinstance(controller.reserve(make_request(deadline_s=3.0), 1.0), Ticket)
    assert controller.next_wakeup(1.0) == 4.0
    controller.tick(4.0)
    (refused,) = controller.poll_grants("g", 4.1)
    assert isinstance(refused, Refused) and refused.error == "DeadlineExceeded"
    replica.finish(lease.lease_id)
    tell(controller, replica, 5.0)
    assert controller.cluster_state(5.0).granted == 1  # the expired one never runs


def test_a_deadline_in_the_past_is_refused_at_once() -> None:
    controller = make_controller()
    join(controller, make_info())
    refused = controller.reserve(make_request(deadline_s=0.0), 1.0)
    assert isinstance(refused, Refused) and refused.error == "DeadlineExceeded"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"num_tokens": 4096}, "prompt"),
        ({"num_tokens": 1601, "max_tokens": 1}, "prompt"),
        ({"num_tokens": 1500, "max_tokens": 200}, "prompt"),
        ({"num_tokens": 10, "max_tokens": 100, "num_samples": 64}, "prompt"),
        ({"max_tokens": None}, "sampling.max_tokens"),
    ],
)
def test_what_can_never_fit_is_refused_for_good(fields: dict[str, object], field: str) -> None:
    controller = make_controller()
    join(controller, make_info())
    refused = controller.reserve(make_request(**fields), 1.0)
    assert isinstance(refused, Refused) and refused.error == "InvalidArgument"
    assert refused.reason.startswith(field) and refused.retry_after_s is None


def test_what_just_fits_is_taken() -> None:
    controller = make_controller()
    join(controller, make_info())
    assert reserve(controller, make_request(num_tokens=1500, max_tokens=101)).num_blocks == 100


def test_a_dead_gateways_tickets_end_and_its_grants_expire() -> None:
    controller = make_controller(gateway_timeout_s=30.0, watchdog_s=1e9)
    join(controller, make_info())
    reserve(controller, make_request(gateway_id="gone", **WHOLE_POOL), 1.0)
    assert isinstance(controller.reserve(make_request(gateway_id="gone"), 1.0), Ticket)
    controller.tick(32.0)
    state = controller.cluster_state(32.0)
    assert state.queued_requests == 0 and state.replicas[0].leased_blocks == 0
    controller.check_integrity()


def test_c7_a_shared_prefix_does_not_draw_everything_to_one_replica() -> None:
    controller = make_controller("default", start_slack_s=0.0)
    hashes = make_hashes(16)
    replicas = {
        name: join(controller, make_info(name, num_blocks=1000, prefill_tokens_per_s=1e4))
        for name in "abcd"
    }
    placed: dict[str, list[Lease]] = {name: [] for name in replicas}
    now = 1.0
    for number in range(200):
        now += 0.001
        answer = controller.reserve(
            make_request(route_hashes=hashes + make_hashes(4, number + 1), num_tokens=1100), now
        )
        grants = [answer] if isinstance(answer, Lease) else []
        for replica in replicas.values():
            tell(controller, replica, now)
        grants += [g for g in controller.poll_grants("g", now) if isinstance(g, Lease)]
        for lease in grants:
            replica = replicas[lease.replica_id]
            placed[lease.replica_id].append(lease)
            assert replica.accept(lease)
            replica.take(lease.lease_id, lease.num_blocks)
            replica.finish(lease.lease_id)
            replica.store(*hashes)
    counts = sorted(len(leases) for leases in placed.values())
    assert sum(counts) >= 4 and counts[-1] <= 2 * (sum(counts) / 4) + 1, counts


def test_c7_idle_ties_spread_evenly() -> None:
    controller = make_controller("min-ttft")
    replicas = {name: join(controller, make_info(name)) for name in "abcd"}
    counts = dict.fromkeys("abcd", 0)
    for _ in range(200):
        lease = reserve(controller, make_request(num_tokens=16, max_tokens=1))
        counts[lease.replica_id] += 1
        replica = replicas[lease.replica_id]
        replica.accept(lease)
        replica.finish(lease.lease_id)
        tell(controller, replica, 1.0)
    assert min(counts.values()) > 25, counts


# Overload


def fill(controller: Controller, now: float = 1.0) -> None:
    reserve(controller, make_request(**WHOLE_POOL), now)
    while isinstance(controller.reserve(make_request(**WHOLE_POOL), now), Ticket):
        pass


def make_bounded() -> Controller:
    return make_controller(admission=AdmissionConfig(max_queued_requests=3), watchdog_s=1e9)


def test_a_full_queue_refuses_with_an_appointment() -> None:
    controller = make_bounded()
    join(controller, make_info())
    fill(controller)
    waits: list[float] = []
    for _ in range(3):
        refused = controller.reserve(make_request(**WHOLE_POOL), 1.0)
        assert isinstance(refused, Refused) and refused.error == "Overloaded"
        assert refused.retry_token and refused.retry_after_s is not None
        waits.append(refused.retry_after_s)
    assert 0 < waits[0] < waits[1] < waits[2]  # one after the other


def test_who_keeps_an_appointment_is_let_in_before_newcomers() -> None:
    controller = make_bounded()
    join(controller, make_info())
    fill(controller)
    request = make_request(**WHOLE_POOL)
    refused = controller.reserve(request, 1.0)
    assert isinstance(refused, Refused) and refused.retry_after_s is not None
    token = refused.retry_token
    early = controller.reserve(replace(request, retry_token=token), 1.1)
    assert isinstance(early, Refused) and early.retry_token == token
    due = 1.0 + refused.retry_after_s
    assert early.retry_after_s == pytest.approx(due - 1.1)
    assert isinstance(controller.reserve(make_request(**WHOLE_POOL), due), Refused)
    assert isinstance(controller.reserve(replace(request, retry_token=token), due), Ticket)


def test_c11_the_overload_clears() -> None:
    controller = make_bounded()
    replica = join(controller, make_info())
    fill(controller)
    tell(controller, replica, 1.0)
    controller.tick(50.0)  # every grant and ticket of the silent gateway has gone
    controller.tick(100.0)
    assert isinstance(controller.reserve(make_request(), 101.0), Lease)


def test_tenants_share_by_block_seconds_while_both_wait() -> None:
    controller = make_controller(watchdog_s=1e9)
    replica = join(controller, make_info(num_blocks=20))
    used = {"heavy": 0, "light": 0}
    for _ in range(120):
        controller.reserve(make_request(tenant="heavy", num_tokens=250, max_tokens=16), 1.0)
    for _ in range(120):
        controller.reserve(make_request(tenant="light", num_tokens=40, max_tokens=16), 1.0)
    tenant_of = {
        waiting.request.request_key: waiting.tenant for waiting in controller.pools()["m"].queue
    }
    leases = [record.lease for record in controller.pools()["m"].pool.leases if record.lease]
    now = 1.0
    for _ in range(60):
        now += 1.0
        for lease in leases:
            assert replica.accept(lease)
            replica.take(lease.lease_id, lease.num_blocks)
        tell(controller, replica, now)
        now += 1.0
        for lease in leases:
            tenant = tenant_of.get(lease.request_key, "heavy")
            used[tenant] += lease.num_blocks
            replica.finish(lease.lease_id)
        tell(controller, replica, now)
        leases = [g for g in controller.poll_grants("g", now) if isinstance(g, Lease)]
        waiting = {w.tenant for w in controller.pools()["m"].queue}
        if waiting != {"heavy", "light"}:
            break
    share = used["heavy"] / (used["heavy"] + used["light"])
    assert 0.4 <= share <= 0.6, used


def test_priority_goes_first() -> None:
    controller = make_controller(watchdog_s=1e9)
    replica = join(controller, make_info())
    lease = reserve(controller, make_request(**WHOLE_POOL))
    replica.accept(lease)
    tell(controller, replica, 1.0)
    low = make_request(priority=0, **WHOLE_POOL)
    high = make_request(priority=3, **WHOLE_POOL)
    for request in (low, high):
        assert isinstance(controller.reserve(request, 1.1), Ticket)
    replica.finish(lease.lease_id)
    tell(controller, replica, 1.2)
    (grant,) = controller.poll_grants("g", 1.3)
    assert grant.request_key == high.request_key


def test_who_was_passed_over_for_long_gets_a_replica_held() -> None:
    controller = make_controller(watchdog_s=1e9, gateway_timeout_s=1e9)
    replica = join(controller, make_info())
    big = make_request(**WHOLE_POOL)
    small = [make_request(num_tokens=300, max_tokens=16) for _ in range(40)]
    running = [reserve(controller, small.pop()) for _ in range(5)]
    for lease in running:
        replica.accept(lease)
    tell(controller, replica, 1.0)
    assert isinstance(controller.reserve(big, 1.0), Ticket)
    now = 1.0
    while small and not any(lease.request_key == big.request_key for lease in running):
        now += 2.0
        replica.finish(running.pop(0).lease_id)
        controller.reserve(small.pop(), now)
        tell(controller, replica, now)
        for grant in controller.poll_grants("g", now):
            assert isinstance(grant, Lease) and replica.accept(grant)
            running.append(grant)
        assert running, "a replica was held for a request that fits"
    assert any(lease.request_key == big.request_key for lease in running), now


# Looking


def test_explain_says_what_would_happen_and_reserves_nothing() -> None:
    controller, hashes = make_controller(), make_hashes(4)
    a, _ = (join(controller, make_info(name)) for name in ("a", "b"))
    a.store(*hashes)
    tell(controller, a, 1.0)
    request = make_request(route_hashes=hashes, num_tokens=80)
    explained = controller.explain(request, 1.0)
    assert not isinstance(explained, Refused)
    assert (explained.decision, explained.replica_id, explained.lease_blocks) == ("grant", "a", 6)
    by_id = {replica.replica_id: replica for replica in explained.replicas}
    assert by_id["a"].hit_tokens == 64 and by_id["b"].affinity_ms == pytest.approx(64.0)
    assert by_id["a"].total_ms < by_id["b"].total_ms
    assert controller.cluster_state(1.1).granted == 0
    assert reserve(controller, request).replica_id == "a"


@pytest.mark.parametrize("seed", range(10))
def test_explain_says_what_reserve_does(seed: int) -> None:
    rng, controller = random.Random(seed), make_controller()
    replicas = [join(controller, make_info(f"r{number}")) for number in range(3)]
    decisions: set[str] = set()
    for number in range(60):
        now = 1.0 + 0.05 * number
        hashes = make_hashes(rng.randrange(1, 12), chain=rng.randrange(3))
        size = 16 * len(hashes) + rng.randrange(1, 16)
        kind = rng.choice(list(AdmissionClass))
        request = make_request(
            route_hashes=hashes, num_tokens=size, max_tokens=200, admission_class=kind
        )
        explained = controller.explain(request, now)
        assert not isinstance(explained, Refused)
        decisions.add(explained.decision)
        answer = controller.reserve(request, now)
        if isinstance(answer, Lease):
            assert explained.decision == "grant"
            assert explained.replica_id == answer.replica_id
            assert explained.lease_blocks == answer.num_blocks
        else:
            assert explained.decision == "wait" and isinstance(answer, Ticket)
            controller.release(request.request_key, 1, now)
        replica = rng.choice(replicas)
        replica.store(*make_hashes(rng.randrange(12), chain=rng.randrange(3)))
        tell(controller, replica, now, waiting_prefill_tokens=rng.choice([0, 0, 40]))
    assert decisions == {"grant", "wait"}


def test_explain_says_why_a_request_waits_or_is_refused() -> None:
    controller = make_controller()
    join(controller, make_info())
    reserve(controller, make_request(**WHOLE_POOL))
    waits = controller.explain(make_request(), 1.0)
    assert not isinstance(waits, Refused) and waits.decision == "wait"
    assert waits.replicas[0].blocks_ms > 0
    never = controller.explain(make_request(num_tokens=5000), 1.0)
    assert not isinstance(never, Refused) and never.decision == "refuse"


def test_standard_leases_follow_what_was_learnt() -> None:
    controller = make_controller()
    replica = join(controller, make_info())
    request = make_request(admission_class=AdmissionClass.STANDARD, max_tokens=1000)
    first = reserve(controller, request)
    for _ in range(300):
        controller.pools()["m"].gate.lengths.observe(16)
    controller.release(request.request_key, 1, 1.1, output_tokens=16)
    tell(controller, replica, 1.2)
    second = reserve(controller, replace(request, request_key="another"), 1.3)
    assert second.num_blocks < first.num_blocks


def test_reports_teach_output_lengths() -> None:
    controller = make_controller()
    replica = join(controller, make_info())
    controller.report(replica.report(finished_leases=(1, 2), finished_output_tokens=(7, 9)), 1.0)
    assert controller.pools()["m"].gate.lengths.num_observed == 2


def test_leases_shrink_as_their_leader_reports() -> None:
    controller = make_controller()
    replica = join(controller, make_info())
    lease = reserve(controller, make_request(**WHOLE_POOL))
    controller.report(replica.report(leases=(LeaseUse(lease.lease_id, 40),), num_running=1), 1.1)
    assert only_status(controller).leased_blocks == 40
