"""Faults that serving systems have had, provoked at the scheduler; ids as in the list of faults.

`Cluster` checks every pool's books after every step; `assert_oracle` compares each output with
the same request alone.
"""

import random

import pytest
from scheduler_harness import Cluster, make_request

from pagefleet.protos.errors import InvalidArgument
from pagefleet.protos.messages import FinishReason


@pytest.fixture(params=[False, True], ids=["in-step", "run-ahead"])
def run_ahead(request) -> bool:
    return request.param


@pytest.mark.parametrize("ends_first", [0, 1])
def test_e1_shared_block_is_released_once(run_ahead, ends_first):
    cluster = Cluster(run_ahead=run_ahead, block_size=4, num_blocks=16)
    request = cluster.add(6, n=2, max_tokens=20)
    while len(cluster.tokens(request, 1)) < 10:
        cluster.step()
    cluster.scheduler.finish_sequence(request.request_key, ends_first, 10, cluster.now)
    cluster.run()
    other = 1 - ends_first
    assert cluster.tokens(request, other) == cluster.oracle(request, other)
    cluster.assert_idle()


def test_e2_fork_with_too_few_blocks_leaves_the_parent_whole(run_ahead):
    cluster = Cluster(run_ahead=run_ahead, block_size=4, num_blocks=10, watermark=0.0)
    request = cluster.add(23, n=3, max_tokens=12)  # divergence lies in the sixth block
    cluster.run()
    cluster.assert_oracle(request)
    cluster.assert_idle()


def test_e3_reallocated_block_is_not_found_under_its_old_key(run_ahead):
    cluster = Cluster(run_ahead=run_ahead, block_size=4, num_blocks=4)
    first = list(range(9))
    for prompt in (first, [77] * 13, first):
        cluster.add(prompt, max_tokens=2)
        cluster.run()
    cluster.assert_oracle()
    cluster.assert_idle()


@pytest.mark.parametrize("ending", ["eos", "length", "stop string", "abort"])
def test_e5_last_slot_is_given_back_once_under_overlap(ending):
    cluster = Cluster(run_ahead=True, eos=(5,), vocab_size=60 if ending == "eos" else 100_000)
    request = cluster.add(5, max_tokens=200)
    while cluster.sample(request).finish_reason is None and cluster.step():
        if ending == "stop string" and len(cluster.tokens(request)) == 120:
            cluster.scheduler.finish_sequence(request.request_key, 0, 118, cluster.now)
            cluster.take()
        elif ending == "abort" and len(cluster.tokens(request)) == 120:
            assert cluster.scheduler.abort_request(request.request_key)
            break
    cluster.run()
    cluster.assert_idle()


def test_e6_hit_is_never_accepted_on_the_hash_alone(run_ahead):
    cluster = Cluster(run_ahead=run_ahead, block_size=2, num_blocks=200, hash_bits=8)
    chance = random.Random(1)
    for _ in range(400):
        prompt = [chance.randrange(3) for _ in range(chance.randrange(1, 20))]
        cluster.add(prompt, max_tokens=2)
        cluster.step()
    cluster.run()
    cluster.assert_oracle()
    assert cluster.scheduler.stats().collisions_refused > 50


def test_e7_adapter_and_salt_do_not_share_keys():
    cluster = Cluster()
    for fields in (
        {"adapter": "x"},
        {"cache_salt": "x"},
        {"cache_salt": "ab"},
        {"adapter": "a", "cache_salt": "b"},
        {"adapter": "ab"},
        {},
    ):
        request = cluster.add(48, **fields)
        cluster.run()
        assert cluster.cached_tokens(request) == 0
    again = cluster.add(48, cache_salt="x")
    cluster.run()
    assert cluster.cached_tokens(again) == 32


def test_e10_wholly_cached_prompt_of_whole_blocks(run_ahead):
    cluster = Cluster(run_ahead=run_ahead)
    requests = []
    for _ in range(3):
        requests.append(cluster.add(32, max_tokens=1))
        cluster.run()
    extension = cluster.add(48, max_tokens=1)
    cluster.run()
    assert cluster.cached_tokens(requests[2]) >= 16
    assert cluster.cached_tokens(extension) == 32
    cluster.assert_oracle()


def test_e12_reset_leaves_nothing_to_hit(run_ahead):
    cluster = Cluster(run_ahead=run_ahead, block_size=4)
    cluster.add(20)
    cluster.run()
    running = cluster.add([8] * 10, max_tokens=30)
    for _ in range(8):
        cluster.step()
    assert cluster.scheduler.reset_prefix_cache() > 5
    cluster.scheduler.check_integrity()
    again = cluster.add(20)
    cluster.run()
    assert cluster.cached_tokens(again) == 0
    continued = cluster.add([*running.prompt_token_ids, *cluster.tokens(running)], max_tokens=1)
    cluster.run()
    assert cluster.cached_tokens(continued) == 0  # what ran through the reset is not found
    assert cluster.scheduler.stats().epoch == 1
    cluster.assert_oracle()


def test_e13_token_in_flight_survives_a_preemption():
    cluster = Cluster(run_ahead=True, block_size=4, num_blocks=40, watermark=0.0)
    first = cluster.add([1] * 64, max_tokens=64)
    second = cluster.add([2] * 64, max_tokens=64)
    while cluster.step():
        if cluster.scheduler.stats().steps % 7 == 0:
            cluster.scheduler.force_preemption()
    cluster.assert_oracle(first, second)
    assert cluster.scheduler.stats().preemptions > 10
    cluster.assert_idle()


def test_e15_sampling_path_is_kept_through_preemption(run_ahead):
    cluster = Cluster(run_ahead=run_ahead)
    request = cluster.add(9, seed=7, temperature=1.0, max_tokens=30)
    forced = 0
    while cluster.step():
        if len(cluster.tokens(request)) in (10, 20) and cluster.scheduler.force_preemption():
            forced += 1
    assert forced >= 2
    cluster.assert_oracle()


def test_e19_nothing_is_told_after_an_abort_in_the_last_chunk(run_ahead):
    cluster = Cluster(run_ahead=run_ahead, max_num_batched_tokens=16)
    requests = [cluster.add([value] * 40, max_tokens=5) for value in range(3)]
    victim = requests[2]
    while True:
        output = cluster.launch()
        assert output is not None
        ends = output.num_computed_tokens + output.num_scheduled_tokens
        row = cluster.scheduler._requests[victim.request_key].sequences[0].row
        if row is not None and ends[output.rows == row].tolist() == [40]:
            break
        cluster.land()
    assert cluster.scheduler.abort_request(victim.request_key)
    cluster.scheduler.check_integrity()
    cluster.run()
    assert not cluster.sample(victim).deltas
    cluster.assert_oracle(*requests[:2])
    cluster.assert_idle()


def test_e22_empty_prompt_is_refused():
    cluster = Cluster()
    with pytest.raises(InvalidArgument) as refused:
        cluster.add([])
    assert refused.value.field == "prompt"
    cluster.add(1)
    cluster.run()
    cluster.assert_idle()


@pytest.mark.parametrize(("length", "is_refused"), [(63, False), (64, True), (65, True)])
def test_e23_prompts_around_the_longest(length, is_refused):
    cluster = Cluster(max_context=64)
    if is_refused:
        with pytest.raises(InvalidArgument):
            cluster.add(length, max_tokens=1)
    else:
        cluster.add(length, max_tokens=1)
    cluster.add(10)
    cluster.run()
    cluster.assert_oracle()
    cluster.assert_idle()


def test_e24_max_tokens_at_its_borders(run_ahead):
    cluster = Cluster(run_ahead=run_ahead, max_context=64)
    nothing = cluster.add(20, max_tokens=0, n=2)
    unset = cluster.add(20, max_tokens=None)
    one = cluster.add(20, max_tokens=1)
    huge = cluster.add(20, max_tokens=2**31)
    whole_context = cluster.add(64, max_tokens=0)
    with pytest.raises(InvalidArgument):
        cluster.add(20, max_tokens=-1)
    cluster.run()
    for request, count in ((nothing, 0), (unset, 44), (one, 1), (huge, 44), (whole_context, 0)):
        assert len(cluster.tokens(request)) == count
        assert cluster.sample(request).finish_reason is FinishReason.LENGTH
    cluster.assert_oracle()
    cluster.assert_idle()


def test_e25_samples_differ_repeat_and_end_apart(run_ahead):
    cluster = Cluster(run_ahead=run_ahead, vocab_size=30, eos=(3,))
    seeds = (5, 5, 2**64 - 1)
    requests = [cluster.add(9, n=4, seed=seed, max_tokens=60) for seed in seeds]
    cluster.run()
    cluster.assert_oracle()
    outputs = [[tuple(cluster.tokens(r, i)) for i in range(4)] for r in requests]
    assert len(set(outputs[0])) >= 2
    assert outputs[0] == outputs[1] != outputs[2]
    assert len({len(output) for output in outputs[0]}) > 1
    cluster.assert_idle()


def test_e30_request_larger_than_the_pool_is_refused_at_once():
    cluster = Cluster(num_blocks=49)
    with pytest.raises(InvalidArgument, match="63 blocks, the pool has 49"):
        cluster.add(1002)
    cluster.add(10)
    cluster.run()
    cluster.assert_oracle()


def test_e31_lone_sequence_that_outgrows_the_pool_ends_with_what_it_has(run_ahead):
    cluster = Cluster(run_ahead=run_ahead, block_size=4, num_blocks=8)
    request = cluster.add(16, max_tokens=40, ignore_eos=True)
    following = cluster.add(10)
    cluster.run()
    sample = cluster.sample(request)
    assert sample.finish_reason is FinishReason.KV_EXHAUSTED
    assert len(sample.tokens) in (16, 17)
    assert sample.tokens == cluster.oracle(request)[: len(sample.tokens)]
    cluster.assert_oracle(following)
    assert cluster.scheduler.stats().kv_exhausted == 1
    cluster.assert_idle()


@pytest.mark.parametrize("num_samples", [5, 64, 300])
@pytest.mark.parametrize("caching", [True, False])
def test_e32_more_samples_than_rows_run_in_waves(run_ahead, num_samples, caching):
    cluster = Cluster(
        run_ahead=run_ahead, block_size=4, max_num_sequences=4, enable_prefix_caching=caching
    )
    cluster.add(9, n=num_samples, max_tokens=3)
    cluster.run()
    cluster.assert_oracle()
    cluster.assert_idle()


def test_e35_decodes_go_on_while_prompts_keep_coming(run_ahead):
    cluster = Cluster(run_ahead=run_ahead, num_blocks=2000, max_num_batched_tokens=256)
    running = [cluster.add([value] * 4, max_tokens=60) for value in range(30)]
    for _ in range(3):
        cluster.step()
    number = 100
    for _ in range(50):
        if len(cluster.scheduler._queue) < 2:
            cluster.add([number] * 1000, max_tokens=1)
            number += 1
        before = [len(cluster.tokens(request)) for request in running]
        cluster.step()
        told = [len(cluster.tokens(r)) - b for r, b in zip(running, before, strict=True)]
        assert all(count == 1 for count in told)


def test_e39_victims_are_chosen_before_anything_is_scheduled(run_ahead):
    chance = random.Random(39)
    cluster = Cluster(run_ahead=run_ahead, block_size=4, num_blocks=24, watermark=0.0)
    for _ in range(150):
        length = chance.randrange(1, 30)
        cluster.add(
            [chance.randrange(5) for _ in range(length)],
            max_tokens=chance.randrange(1, 40),
            priority=chance.randrange(3),
        )
        for _ in range(chance.randrange(6)):
            cluster.step()
            step = cluster.steps[-1]
            assert not set(step.rows.tolist()) & (
                set(step.removed_rows.tolist()) - {new.row for new in step.new_rows}
            )
    cluster.run()
    cluster.assert_oracle()
    assert cluster.scheduler.stats().preemptions > 5
    cluster.assert_idle()


def test_e43_aborted_samples_leave_no_record(run_ahead):
    chance = random.Random(43)
    cluster = Cluster(run_ahead=run_ahead, block_size=4, num_blocks=100, max_num_sequences=16)
    for _ in range(300):
        request = cluster.add(6, n=4, max_tokens=10, deadline_s=1000.0)
        for _ in range(chance.randrange(5)):
            cluster.step()
        assert cluster.scheduler.abort_request(request.request_key) or (
            cluster.sample(request).finish_reason is not None
        )
        cluster.take()
    cluster.run()
    cluster.assert_idle()
    scheduler = cluster.scheduler
    assert not scheduler._requests and not scheduler._sequences
    assert not len(scheduler._books.ledger) and not len(scheduler._batch)
    assert len(scheduler._deadlines) < 200


def test_e52_expired_requests_never_prefill(run_ahead):
    cluster = Cluster(run_ahead=run_ahead, max_num_sequences=1)
    long = cluster.add(5, max_tokens=100)
    expiring = [cluster.add(5 + i, max_tokens=5, deadline_s=0.1) for i in range(50)]
    cluster.run()
    cluster.assert_oracle(long)
    for request in expiring:
        assert cluster.sample(request).finish_reason is FinishReason.DEADLINE
        assert not cluster.tokens(request)
    assert sum(len(step.new_rows) for step in cluster.steps) == 1
    cluster.assert_idle()


def test_e52_running_request_ends_at_its_deadline(run_ahead):
    cluster = Cluster(run_ahead=run_ahead)
    request = cluster.add(5, max_tokens=1000, deadline_s=0.2)
    cluster.run()
    assert cluster.sample(request).finish_reason is FinishReason.DEADLINE
    assert 10 < len(cluster.tokens(request)) < 30
    cluster.assert_idle()


def test_e54_shared_blocks_are_counted_once_when_they_become_idle():
    cluster = Cluster(block_size=4, num_blocks=20)
    for _ in range(2):
        cluster.add(13, max_tokens=3)
        cluster.step()
    while cluster.step():
        counts = cluster.scheduler.stats().device
        assert counts.total == 20
        assert counts.free <= 20
    cluster.assert_idle()


def test_e55_estimate_of_blocks_holds_for_wide_blocks(run_ahead):
    chance = random.Random(55)
    cluster = Cluster(run_ahead=run_ahead, block_size=64, num_blocks=14, watermark=0.0)
    for value in range(10):
        cluster.add([value] * chance.randrange(1, 130), max_tokens=chance.randrange(1, 130))
    while cluster.step():
        scheduler = cluster.scheduler
        for row in scheduler._batch.rows():
            used = scheduler._books.manager.num_blocks_for(int(scheduler._batch.num_computed[row]))
            assert scheduler._books.manager.num_blocks(row) >= used
    cluster.assert_oracle()
    cluster.assert_idle()


def test_e57_preempted_request_keeps_its_place(run_ahead):
    cluster = Cluster(run_ahead=run_ahead, block_size=4, num_blocks=40)
    chance = random.Random(57)
    requests = []
    for value in range(60):
        requests.append(cluster.add([value] * 12, max_tokens=chance.randrange(10, 40)))
        for _ in range(4):
            cluster.step()
    cluster.run()
    cluster.assert_oracle()
    preemptions = [cluster.sample(r).last.usage.preemptions for r in requests]
    assert max(preemptions) <= 4
    ends = [cluster.sample(r).last.usage for r in requests]
    assert max(usage.queued_s + usage.prefill_s + usage.decode_s for usage in ends) < 4.0


def test_e59_two_requests_of_sixty_percent_each_both_finish(run_ahead):
    cluster = Cluster(run_ahead=run_ahead, block_size=4, num_blocks=20)
    first = cluster.add([1] * 48, max_tokens=8)
    second = cluster.add([2] * 48, max_tokens=8)
    cluster.run()
    cluster.assert_oracle(first, second)
    cluster.assert_idle()


def test_c14_thousand_random_cancels_leave_every_block_free(run_ahead):
    chance = random.Random(14)
    cluster = Cluster(run_ahead=run_ahead, block_size=4, num_blocks=60, max_num_sequences=12)
    alive: list[str] = []
    for _ in range(1000):
        request = make_request(
            [chance.randrange(2) for _ in range(chance.randrange(1, 40))],
            n=chance.choice((1, 1, 2)),
            max_tokens=chance.randrange(0, 20),
        )
        cluster.submit(request)
        alive.append(request.request_key)
        cluster.step()
        if len(alive) > 6:
            cluster.scheduler.abort_request(alive.pop(chance.randrange(len(alive))))
            cluster.scheduler.check_integrity()
    for key in alive:
        cluster.scheduler.abort_request(key)
    cluster.run()
    cluster.assert_idle()
    assert not cluster.scheduler._requests and not cluster.scheduler._sequences


@pytest.mark.parametrize("where", ["queue", "prefill", "decode"])
def test_c15_cancelled_blocks_are_back_within_two_steps(run_ahead, where):
    cluster = Cluster(run_ahead=run_ahead, max_num_batched_tokens=32, max_num_sequences=2)
    other = cluster.add(4, max_tokens=60)
    if where == "queue":
        cluster.add([5] * 4, max_tokens=60)
    request = cluster.add([9] * 100, max_tokens=60)
    for _ in range(9 if where == "decode" else 2):
        cluster.step()
    assert cluster.scheduler.abort_request(request.request_key)
    cluster.step()
    cluster.step()
    held = cluster.scheduler.stats().device
    assert held.referenced + held.fenced <= 2 * 4
    cluster.run()
    cluster.assert_oracle(other)
