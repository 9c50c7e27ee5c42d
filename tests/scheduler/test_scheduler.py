"""A request's life in the scheduler, over a fake model and against an oracle."""

import numpy as np
import pytest
from scheduler_harness import Cluster, make_request

from pagefleet.protos.errors import InvalidArgument
from pagefleet.protos.messages import AdmissionClass, FinishReason
from pagefleet.scheduler.lease_ledger import LeaseRefused
from pagefleet.scheduler.output import ModelRunnerOutput


@pytest.fixture(params=[False, True], ids=["in-step", "run-ahead"])
def run_ahead(request) -> bool:
    return request.param


def test_one_request_comes_to_its_end(run_ahead):
    cluster = Cluster(run_ahead=run_ahead)
    request = cluster.add(20, max_tokens=40)
    cluster.run()
    cluster.assert_oracle()
    cluster.assert_idle()
    last = cluster.sample(request).last
    assert last.finish_reason is FinishReason.LENGTH
    assert last.usage.prompt_tokens == 20
    assert last.usage.completion_tokens == 40


def test_a_decode_step_carries_only_what_changed():
    cluster = Cluster(block_size=4)
    cluster.add(5, max_tokens=20)
    cluster.step()
    cluster.step()
    step = cluster.steps[-1]
    assert not step.new_rows and not step.device_copies and not len(step.table_rows)
    assert step.rows.tolist() == step.sample_rows.tolist() == [0]
    assert step.num_computed_tokens.tolist() == [5]
    assert step.rows.dtype == np.int32


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunked_prefill_beside_decodes(run_ahead, chunk):
    cluster = Cluster(run_ahead=run_ahead, prefill_chunk=chunk, max_num_batched_tokens=64)
    cluster.add(50, max_tokens=30)
    for _ in range(4):
        cluster.step()
    cluster.add([7] * 100, max_tokens=10)
    cluster.run()
    cluster.assert_oracle()
    assert max(int(step.num_tokens) for step in cluster.steps) <= 64


def test_eos_stops_and_ignore_eos_does_not(run_ahead):
    cluster = Cluster(run_ahead=run_ahead, vocab_size=8, eos=(5, 6))
    stopped = cluster.add(3, max_tokens=100)
    ignoring = cluster.add(3, max_tokens=100, ignore_eos=True)
    late = cluster.add(3, max_tokens=100, min_tokens=60)
    cluster.run()
    cluster.assert_oracle()
    assert cluster.sample(stopped).finish_reason is FinishReason.STOP
    assert cluster.sample(ignoring).finish_reason is FinishReason.LENGTH
    assert len(cluster.tokens(late)) >= 60
    cluster.assert_idle()


def test_stop_token_ids_end_the_output(run_ahead):
    cluster = Cluster(run_ahead=run_ahead, vocab_size=10)
    request = cluster.add(3, max_tokens=100, stop_token_ids=(4,))
    cluster.run()
    cluster.assert_oracle()
    assert cluster.tokens(request)[-1] == 4
    assert cluster.sample(request).finish_reason is FinishReason.STOP


def test_second_request_starts_from_the_firsts_blocks(run_ahead):
    cluster = Cluster(run_ahead=run_ahead)
    cluster.add(64)
    cluster.run()
    computed = cluster.model.num_computed_tokens
    request = cluster.add(100)
    cluster.run()
    cluster.assert_oracle()
    assert cluster.cached_tokens(request) == 64
    assert cluster.model.num_computed_tokens - computed == 100 - 64 + 3


def test_who_shares_a_prompt_waits_for_the_step_that_computes_it(run_ahead):
    cluster = Cluster(run_ahead=run_ahead)
    requests = [cluster.add(64), cluster.add(64), cluster.add([*range(1, 33), 7]), cluster.add(20)]
    cluster.run()
    cluster.assert_oracle()
    assert [cluster.cached_tokens(request) for request in requests] == [0, 48, 32, 16]
    assert cluster.model.num_computed_tokens == 64 + 16 + 1 + 4 + 4 * 3
    assert cluster.steps[0].num_scheduled_tokens.tolist() == [64]
    assert max(len(step.rows) for step in cluster.steps) == 4


def test_nobody_waits_for_a_prompt_that_takes_more_than_this_step():
    cluster = Cluster(prefill_chunk=32)
    cluster.add(100)
    cluster.add(100)
    cluster.step()
    assert cluster.steps[0].num_scheduled_tokens.tolist() == [32, 32]
    cluster.run()
    cluster.assert_oracle()


def test_a_block_is_not_found_before_its_step_was_processed():
    cluster = Cluster(prefill_chunk=16)
    cluster.add(64)
    cluster.launch()
    other = cluster.add(64)
    cluster.launch()
    cluster.land()
    cluster.land()
    cluster.run()
    assert cluster.cached_tokens(other) == 0
    cluster.assert_oracle()


def test_samples_share_the_prompt_and_its_logits(run_ahead):
    cluster = Cluster(run_ahead=run_ahead, block_size=4)
    request = cluster.add(10, n=3, max_tokens=9, seed=5)
    cluster.run()
    cluster.assert_oracle()
    assert len({tuple(cluster.tokens(request, i)) for i in range(3)}) == 3
    assert cluster.model.num_computed_tokens == 10 + 3 * 8
    assert cluster.scheduler.stats().copies_on_write == 2
    first = cluster.steps[0]
    assert first.sample_entries.tolist() == [0, 0, 0]
    assert first.sample_rows.tolist() == [0, 1, 2]
    cluster.assert_idle()


def test_resumed_samples_go_on_where_they_were(run_ahead):
    whole = Cluster()
    request = whole.add(10, n=3, max_tokens=12, seed=9, key="r")
    whole.run()
    said = [tuple(whole.tokens(request, i)) for i in range(3)]
    cluster = Cluster(run_ahead=run_ahead)
    resumed = cluster.add(
        10, n=3, max_tokens=12, seed=9, key="r", outputs=[said[0][:5], (), said[2][:11]]
    )
    cluster.run()
    cluster.assert_oracle()
    firsts = [cluster.sample(resumed, i).deltas[0].first_position for i in range(3)]
    assert firsts == [5, 0, 11]
    cluster.assert_idle()


def test_sample_resumed_at_its_limit_ends_at_once():
    cluster = Cluster()
    request = cluster.add(4, max_tokens=3, outputs=[(1, 2, 3), ()], n=2)
    cluster.run()
    assert cluster.tokens(request, 0) == [1, 2, 3]
    assert cluster.sample(request, 0).finish_reason is FinishReason.LENGTH
    assert cluster.tokens(request, 1) == cluster.oracle(request, 1)
    cluster.assert_idle()


def test_finish_sequence_keeps_what_the_gateway_kept(run_ahead):
    cluster = Cluster(run_ahead=run_ahead)
    request = cluster.add(10, max_tokens=50, n=2)
    while len(cluster.tokens(request)) < 10:
        cluster.step()
    cluster.scheduler.finish_sequence(request.request_key, 0, 7, cluster.now)
    cluster.run()
    sample = cluster.sample(request)
    assert sample.finish_reason is FinishReason.STOP
    assert sample.last.usage.completion_tokens == 7
    assert len(sample.tokens) <= 11
    assert cluster.tokens(request, 1) == cluster.oracle(request, 1)
    cluster.assert_idle()


def test_prompt_logprobs_compute_every_position(run_ahead):
    cluster = Cluster(run_ahead=run_ahead, max_num_batched_tokens=20)
    cluster.add(33)
    cluster.run()
    for _ in range(2):
        request = cluster.add(33, prompt_logprobs=1)
        cluster.run()
        first = cluster.sample(request).deltas[0]
        assert len(first.prompt_logprobs) == 33
        assert first.prompt_logprobs[0] is None
        assert first.prompt_logprobs[32].token_ids == (33,)
        assert cluster.cached_tokens(request) == 0


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("num_steps", range(1, 7))
def test_prompt_logprobs_survive_preemption_with_a_step_in_flight(mode, num_steps):
    cluster = Cluster(
        run_ahead=True,
        block_size=4,
        num_host_blocks=32,
        max_num_batched_tokens=8,
        preemption_mode=mode,
    )
    request = cluster.add(20, prompt_logprobs=1, max_tokens=6)
    for _ in range(num_steps):
        cluster.step()
    assert cluster.in_flight
    cluster.scheduler._life.preempt(cluster.scheduler._batch.sequence(0))
    cluster.scheduler.check_integrity()
    cluster.run()
    cluster.assert_oracle()
    sample = cluster.sample(request)
    told = [entry for delta in sample.deltas for entry in delta.prompt_logprobs]
    assert [entry and entry.token_ids[0] for entry in told] == [None, *range(2, 21)]


def test_prompt_logprobs_survive_preemption_in_the_prompt():
    cluster = Cluster(block_size=4, num_blocks=12, max_num_batched_tokens=4, watermark=0.0)
    cluster.add(16, max_tokens=28)
    asking = cluster.add([3] * 24, max_tokens=3, prompt_logprobs=0, n=1)
    cluster.run()
    cluster.assert_oracle()
    assert len(cluster.sample(asking).deltas[0].prompt_logprobs) == 24


def test_row_whose_logits_are_not_finite_ends_alone():
    cluster = Cluster()
    bad, good = cluster.add(5, max_tokens=9), cluster.add(5, max_tokens=9)
    output = cluster.launch()
    cluster.fences.land(cluster.in_flight.pop())
    result = cluster.model.execute(output)
    row = output.new_rows[0].row
    result = ModelRunnerOutput(output.step, result.token_ids, failed_rows=(row,))
    cluster.scheduler.update(output, result, 0.0)
    cluster.take()
    cluster.run()
    assert cluster.sample(bad).finish_reason is FinishReason.ERROR
    assert cluster.sample(bad).last.error
    assert cluster.tokens(good) == cluster.oracle(good)
    cluster.assert_idle()


def test_duplicate_request_key_is_refused():
    cluster = Cluster()
    cluster.add(5, key="same")
    with pytest.raises(InvalidArgument, match="request_key"):
        cluster.add(5, key="same")


def test_guaranteed_request_is_never_preempted(run_ahead):
    cluster = Cluster(run_ahead=run_ahead, block_size=4, num_blocks=16, watermark=0.0)
    guaranteed = cluster.add(
        8,
        max_tokens=33,
        admission_class=AdmissionClass.GUARANTEED,
        lease_id=7,
        lease_blocks=10,
    )
    for value in range(4):
        cluster.add([value] * 8, max_tokens=20)
    cluster.run()
    cluster.assert_oracle()
    assert cluster.sample(guaranteed).last.usage.preemptions == 0
    assert cluster.scheduler.stats().preemptions > 0
    assert cluster.scheduler.take_finished_leases() == (7,)
    cluster.assert_idle()


def test_guarantee_that_does_not_fit_is_refused():
    cluster = Cluster(block_size=4, num_blocks=16)
    cluster.add(8, max_tokens=25, admission_class=AdmissionClass.GUARANTEED)
    with pytest.raises(LeaseRefused):
        cluster.add(8, max_tokens=41, admission_class=AdmissionClass.GUARANTEED)
    with pytest.raises(InvalidArgument, match="max_tokens"):
        cluster.add(8, max_tokens=None, admission_class=AdmissionClass.GUARANTEED)
    with pytest.raises(InvalidArgument, match="guarantee"):
        cluster.add(8, max_tokens=100, admission_class=AdmissionClass.GUARANTEED)
    cluster.run()
    cluster.assert_idle()


def test_lease_is_refused_where_the_blocks_are_gone():
    cluster = Cluster(block_size=4, num_blocks=16)
    cluster.add(40, max_tokens=9)
    cluster.step()
    with pytest.raises(LeaseRefused):
        cluster.add(40, max_tokens=9, lease_id=3, lease_blocks=12)
    cluster.add(4, max_tokens=9, lease_id=4, lease_blocks=3)
    assert [use.lease_id for use in cluster.scheduler.stats().leases] == [4]
    cluster.step()
    assert cluster.scheduler.stats().leases[0].remaining_blocks == 2
    cluster.run()
    assert cluster.scheduler.take_finished_leases() == (4,)


def test_lease_keeps_what_it_may_take_beside_blocks_that_others_hold():
    cluster = Cluster(block_size=4, num_blocks=32)
    prompt = list(range(17))
    cluster.add(prompt, max_tokens=30)
    cluster.step()
    cluster.step()
    # 4 of its 5 prompt blocks are held already, so the lease is for 1 + 3 of growth.
    cluster.add(prompt, max_tokens=12, lease_id=5, lease_blocks=4)
    cluster.step()
    (use,) = cluster.scheduler.stats().leases
    assert use.remaining_blocks == 3
    cluster.run()
    cluster.assert_idle()


def test_reserved_blocks_of_guaranteed_samples_never_exceed_the_worst_case(run_ahead):
    cluster = Cluster(run_ahead=run_ahead, block_size=4, num_blocks=40, max_num_sequences=3)
    cluster.add(10, n=5, max_tokens=15, admission_class=AdmissionClass.GUARANTEED, lease_id=1)
    worst = cluster.scheduler.stats().leases[0].remaining_blocks
    assert worst == 2 + 5 * 4
    while cluster.step():
        stats = cluster.scheduler.stats()
        if stats.leases:
            assert stats.leases[0].remaining_blocks + stats.device.referenced <= worst
            assert stats.leases[0].remaining_blocks <= stats.device.free + stats.device.fenced
    cluster.assert_oracle()
    cluster.assert_idle()


def test_waiting_tokens_and_routes_are_reported():
    cluster = Cluster(max_num_sequences=1)
    cluster.add(32, max_tokens=3)
    cluster.add(10)
    cluster.step()
    assert cluster.scheduler.stats().waiting_prefill_tokens == 10
    events = cluster.scheduler.take_route_events()
    assert len(events.stored_device) == 2
    snapshot, device, host = cluster.scheduler.route_snapshot()
    assert set(snapshot.stored_device) == set(events.stored_device)
    assert device == int.from_bytes(events.stored_device[0]) ^ int.from_bytes(
        events.stored_device[1]
    )
    assert host == 0


def test_best_effort_goes_first_when_blocks_run_out():
    cluster = Cluster(block_size=4, num_blocks=10, watermark=0.0)
    cheap = cluster.add(8, max_tokens=16, admission_class=AdmissionClass.BEST_EFFORT)
    dear = cluster.add([9] * 8, max_tokens=16)
    cluster.run()
    cluster.assert_oracle()
    assert cluster.sample(cheap).last.usage.preemptions > 0
    assert cluster.sample(dear).last.usage.preemptions == 0


def test_nothing_to_do_is_none():
    cluster = Cluster()
    assert cluster.scheduler.schedule(0.0) is None
    request = make_request(4)
    cluster.submit(request)
    assert cluster.scheduler.abort_request(request.request_key)
    assert not cluster.scheduler.abort_request(request.request_key)
    assert cluster.scheduler.schedule(0.0) is None
    assert not cluster.scheduler.has_unfinished()
