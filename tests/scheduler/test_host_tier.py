"""Swap, the second-level cache and the cleaner, over a fake model with two tiers."""

import pytest
from scheduler_harness import Cluster

from pagefleet.protos.messages import FinishReason
from pagefleet.scheduler.config import PreemptionMode, SchedulerConfig
from pagefleet.scheduler.costs import CostModel
from pagefleet.scheduler.output import CopyKind

SWAP = PreemptionMode.SWAP


@pytest.fixture(params=[False, True], ids=["in-step", "run-ahead"])
def run_ahead(request) -> bool:
    return request.param


def make_cluster(**config: object) -> Cluster:
    """A tight device pool beside a roomy host; nothing is written back unless asked for."""
    settings = {
        "block_size": 4,
        "num_blocks": 16,
        "num_host_blocks": 64,
        "preemption_mode": SWAP,
        "watermark": 0.0,
        "write_back_blocks": 0,
    }
    return Cluster(**{**settings, **config})


def add_three(cluster: Cluster, max_tokens: int = 20) -> list:
    return [cluster.add([value] * 14, max_tokens=max_tokens) for value in range(3)]


@pytest.mark.parametrize("caching", [True, False])
def test_swapped_sequences_come_back_as_they_were(run_ahead, caching):
    cluster = make_cluster(run_ahead=run_ahead, enable_prefix_caching=caching)
    add_three(cluster)
    cluster.run()
    cluster.assert_oracle()
    stats = cluster.scheduler.stats()
    assert stats.preemptions_swap > 0 and stats.preemptions_recompute == 0
    assert stats.blocks_stored > 0
    # Only prompts were computed whole, and every token once: nothing was computed again.
    assert cluster.model.num_computed_tokens == 3 * (14 + 19)
    cluster.assert_idle()


def test_swapped_sequence_holds_no_device_block():
    cluster = make_cluster()
    cluster.add(14, max_tokens=30)
    for _ in range(4):
        cluster.step()
    assert cluster.scheduler.force_preemption()
    cluster.scheduler.check_integrity()
    counts = cluster.scheduler.stats().device
    assert counts.referenced == 0
    assert counts.fenced == 5  # until the copy has read them
    cluster.run()
    cluster.assert_oracle()


def test_full_host_means_recompute(run_ahead):
    cluster = make_cluster(run_ahead=run_ahead, num_host_blocks=2)
    add_three(cluster)
    cluster.run()
    cluster.assert_oracle()
    stats = cluster.scheduler.stats()
    assert stats.swaps_refused > 0 and stats.preemptions_recompute > 0
    cluster.assert_idle()


def test_blocks_that_siblings_share_move_once():
    cluster = make_cluster(num_blocks=40)
    request = cluster.add(16, n=3, max_tokens=20)
    for _ in range(4):
        cluster.step()
    for _ in range(3):
        assert cluster.scheduler.force_preemption()
    cluster.scheduler.check_integrity()
    cluster.step()
    jobs = [job for step in cluster.steps for job in step.copy_jobs if job.kind is CopyKind.STORE]
    assert sum(len(job.sources) for job in jobs) == 4 + 3  # the prompt once, a tail each
    cluster.run()
    cluster.assert_oracle(request)
    cluster.assert_idle()


def test_siblings_without_a_cache_compute_again_rather_than_move_twice():
    cluster = make_cluster(num_blocks=40, enable_prefix_caching=False)
    request = cluster.add(16, n=3, max_tokens=20)
    for _ in range(4):
        cluster.step()
    for _ in range(3):
        assert cluster.scheduler.force_preemption()
    cluster.run()
    stats = cluster.scheduler.stats()
    # The last of them has nobody to share with any more.
    assert (stats.swaps_refused, stats.preemptions_recompute, stats.preemptions_swap) == (2, 2, 1)
    cluster.assert_oracle(request)
    cluster.assert_idle()


def test_one_preempted_sibling_leaves_the_others_alone(run_ahead):
    cluster = make_cluster(run_ahead=run_ahead, num_blocks=40)
    request = cluster.add(10, n=3, max_tokens=20)
    for _ in range(4):
        cluster.step()
    assert cluster.scheduler.force_preemption()
    cluster.run()
    cluster.assert_oracle(request)
    usages = [cluster.sample(request, i).last.usage for i in range(3)]
    assert sorted(usage.preemptions for usage in usages) == [0, 0, 1]
    cluster.assert_idle()


def test_evicted_prefix_is_loaded_from_the_host(run_ahead):
    cluster = make_cluster(run_ahead=run_ahead, write_back_blocks=16)
    first = list(range(100, 141))
    cluster.add(first, max_tokens=2)
    cluster.run()
    for value in range(2):
        cluster.add([value] * 50, max_tokens=2)
        cluster.run()
    again = cluster.add(first, max_tokens=2)
    cluster.run()
    cluster.assert_oracle()
    assert cluster.cached_tokens(again) == 40
    assert cluster.scheduler.stats().blocks_loaded > 0
    cluster.assert_idle()


def test_sharers_of_a_load_wait_for_the_one_load():
    cluster = make_cluster(num_blocks=32, write_back_blocks=32, num_host_blocks=64)
    prefix = list(range(100, 148))
    cluster.add(prefix, max_tokens=1)
    cluster.run()
    cluster.add([5] * 120, max_tokens=1)
    cluster.run()
    cluster.model.hold_copies = True
    sharers = [cluster.add([*prefix, value], max_tokens=3) for value in range(2)]
    cluster.step()
    cluster.step()
    loads = [j for s in cluster.steps for j in s.copy_jobs if j.kind is CopyKind.LOAD]
    assert len(loads) == 1
    assert all(not cluster.tokens(request) for request in sharers)
    cluster.model.hold_copies = False
    cluster.run()
    cluster.assert_oracle()
    assert [cluster.cached_tokens(request) for request in sharers] == [48, 48]
    cluster.assert_idle()


def test_e12_reset_clears_the_host_too(run_ahead):
    cluster = make_cluster(run_ahead=run_ahead, write_back_blocks=16)
    prompt = list(range(40))
    cluster.add(prompt, max_tokens=1)
    cluster.run()
    cluster.add([9] * 60, max_tokens=1)
    cluster.run()
    assert cluster.scheduler.stats().host.cached_idle > 0
    cluster.scheduler.reset_prefix_cache()
    cluster.scheduler.check_integrity()
    assert cluster.scheduler.stats().host.cached_idle == 0
    snapshot, _, host_digest = cluster.scheduler.route_snapshot()
    assert not snapshot.stored_host and host_digest == 0
    again = cluster.add(prompt, max_tokens=1)
    cluster.run()
    assert cluster.cached_tokens(again) == 0


def test_e16_store_sees_what_the_step_before_it_wrote(run_ahead):
    """150 preemptions, each copying blocks that the step in flight is still writing."""
    cluster = make_cluster(run_ahead=run_ahead, num_blocks=128, max_context=500)
    request = cluster.add(9, max_tokens=480)
    forced = 0
    while cluster.step():
        forced += cluster.scheduler.force_preemption()
    assert forced >= 150
    cluster.assert_oracle(request)
    cluster.assert_idle()


def test_e18_abort_while_a_copy_never_ends(run_ahead):
    cluster = make_cluster(run_ahead=run_ahead, num_blocks=200, num_host_blocks=300)
    requests = [cluster.add([value] * 9, max_tokens=30) for value in range(50)]
    for _ in range(4):
        cluster.step()
    cluster.model.hold_copies = True
    for _ in range(20):
        cluster.scheduler.force_preemption()
    cluster.step()
    for request in requests:
        cluster.scheduler.abort_request(request.request_key)
    cluster.scheduler.check_integrity()
    cluster.step()
    cluster.step()
    counts = cluster.scheduler.stats().device
    assert counts.referenced == 0
    assert 0 < counts.fenced <= 20 * 4  # what the open copies touch, and nothing else
    cluster.scheduler.copies_done(cluster.model.finish_copies())  # late after all
    cluster.scheduler.check_integrity()
    cluster.run()
    cluster.assert_idle()
    assert not cluster.scheduler._requests and not cluster.scheduler._sequences


def test_e37_blocks_on_their_way_spare_everyone():
    cluster = Cluster(run_ahead=True, block_size=4, num_blocks=24, watermark=0.0)
    requests = [cluster.add([value] * 7, max_tokens=8) for value in range(8)]
    while cluster.scheduler.stats().device.free:
        cluster.step()
    assert len(cluster.in_flight) == 1
    for request in requests[:2]:  # six blocks, which the step in flight may still touch
        cluster.scheduler.abort_request(request.request_key)
    assert cluster.scheduler.stats().device.fenced == 6
    cluster.run()
    cluster.assert_oracle(*requests[2:])
    stats = cluster.scheduler.stats()
    assert stats.preemptions == 0
    cluster.assert_idle()


def test_e40_preempted_request_waits_for_its_open_copy(run_ahead):
    cluster = make_cluster(run_ahead=run_ahead, num_blocks=40)
    request = cluster.add(14, max_tokens=20)
    for _ in range(4):
        cluster.step()
    cluster.model.hold_copies = True
    assert cluster.scheduler.force_preemption()
    told = len(cluster.tokens(request))
    for _ in range(4):
        cluster.step()  # there is room, but its KV is still on its way out
    assert len(cluster.tokens(request)) <= told + 1
    assert cluster.scheduler.stats().num_waiting == 1
    cluster.scheduler.copies_done(cluster.model.finish_copies())
    cluster.model.hold_copies = False
    cluster.run()
    cluster.assert_oracle(request)
    cluster.assert_idle()


def test_e41_needles_keep_to_their_haystacks(run_ahead):
    cluster = make_cluster(
        run_ahead=run_ahead, write_back_blocks=16, num_blocks=24, num_host_blocks=200
    )
    prompts = [[1, 2, 3, 4, 50 + value, *range(20)] for value in range(16)]
    for _ in range(3):
        for first, second in zip(prompts[::2], prompts[1::2], strict=True):
            cluster.add(first, max_tokens=6)
            cluster.add(second, max_tokens=6)
            cluster.run()
    cluster.assert_oracle()
    assert cluster.scheduler.stats().blocks_loaded > 50
    cluster.assert_idle()


@pytest.mark.parametrize("warmth", ["cold", "warm", "half-warm", "host"])
def test_e50_answers_do_not_depend_on_the_cache(run_ahead, warmth):
    cluster = make_cluster(run_ahead=run_ahead, write_back_blocks=16)
    prompt = list(range(30))
    if warmth != "cold":
        cluster.add(prompt[: 15 if warmth == "half-warm" else 30], max_tokens=1)
        cluster.run()
    if warmth == "host":
        cluster.add([7] * 60, max_tokens=1)
        cluster.run()
    request = cluster.add(prompt, max_tokens=8)
    cluster.run()
    assert (cluster.cached_tokens(request) > 0) is (warmth != "cold")
    cluster.assert_oracle()


def test_e60_all_but_one_swapped_out_and_back(run_ahead):
    cluster = make_cluster(run_ahead=run_ahead, num_blocks=60)
    requests = [cluster.add([value] * 10, max_tokens=20) for value in range(5)]
    for _ in range(5):
        cluster.step()
    for _ in range(4):
        assert cluster.scheduler.force_preemption()
    cluster.scheduler.check_integrity()
    cluster.run()
    cluster.assert_oracle(*requests)
    assert cluster.scheduler.stats().preemptions_swap == 4
    cluster.assert_idle()


@pytest.mark.parametrize("kind", [CopyKind.STORE, CopyKind.LOAD])
def test_failed_copy_means_compute_again(run_ahead, kind):
    cluster = make_cluster(run_ahead=run_ahead, num_blocks=40)
    request = cluster.add(14, max_tokens=20)
    for _ in range(4):
        cluster.step()
    cluster.model.hold_copies = True
    cluster.scheduler.force_preemption()
    for _ in range(200):
        cluster.step()
        jobs = cluster.model.open_jobs
        if jobs:
            ok = jobs[0].kind is not kind
            cluster.scheduler.copies_done(cluster.model.finish_copies(1, ok))
            cluster.scheduler.check_integrity()
    cluster.run()
    cluster.assert_oracle(request)
    assert cluster.scheduler.stats().copies_failed == 1
    cluster.assert_idle()


def test_writing_back_stops_when_all_is_done():
    cluster = make_cluster(write_back_blocks=16, num_host_blocks=8)
    for value in range(6):
        cluster.add([value] * 40, max_tokens=2)
    cluster.run(max_steps=400)
    cluster.assert_oracle()


def test_lone_sequence_outgrows_the_pool_beside_swapped_ones():
    cluster = make_cluster(num_blocks=8)
    long = cluster.add(8, max_tokens=60)
    other = cluster.add([3] * 8, max_tokens=10)
    cluster.run()
    assert cluster.sample(long).finish_reason is FinishReason.KV_EXHAUSTED
    cluster.assert_oracle(other)
    cluster.assert_idle()


def test_auto_takes_the_cheaper_way():
    def costs(**rates: float) -> CostModel:
        return CostModel(SchedulerConfig(8, block_bytes=1 << 20, **rates))

    slow_copies = costs(copy_bytes_per_s=1e6, prefill_tokens_per_s=1e5)
    fast_copies = costs(copy_bytes_per_s=1e10, prefill_tokens_per_s=1e2)
    assert not slow_copies.loads_pay
    assert fast_copies.loads_pay
    assert fast_copies.copy_ms(10) == pytest.approx(10 * (1 << 20) / 1e7)
    assert slow_copies.recompute_ms(100) == pytest.approx(1.0)


def test_measured_rates_replace_the_guesses():
    costs = CostModel(SchedulerConfig(8, block_bytes=1000, prefill_tokens_per_s=1.0))
    for _ in range(200):
        costs.observe_step(num_tokens=512, num_rows=1, elapsed_s=0.5)
        costs.observe_copy(num_blocks=10, elapsed_s=0.001)
    costs.observe_step(num_tokens=64, num_rows=64, elapsed_s=10.0)  # says nothing of prefills
    assert costs.prefill_tokens_per_s == pytest.approx(1024.0, rel=0.01)
    assert costs.copy_bytes_per_s == pytest.approx(1e7, rel=0.01)
    assert costs.waiting_pays(11_000) and not costs.waiting_pays(9_000)  # of 10 s a step
