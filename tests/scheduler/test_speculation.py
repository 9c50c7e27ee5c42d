"""Guesses: the output is that of no guesses, and wrong ones leave nothing behind."""

from dataclasses import replace

import pytest
from scheduler_harness import Cluster

from pagefleet.protos.messages import AdmissionClass, FinishReason
from pagefleet.scheduler.output import ModelRunnerOutput, SchedulerOutput


def speculating(**settings: object) -> Cluster:
    fields = {"num_blocks": 64, "block_size": 4, "num_speculative_tokens": 4, "watermark": 0.0}
    return Cluster(**(fields | settings))


def counts(cluster: Cluster) -> tuple[int, int]:
    stats = cluster.scheduler.stats()
    return stats.draft_tokens, stats.accepted_tokens


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_the_output_is_that_of_no_guesses(run_ahead: bool, share: float) -> None:
    cluster = speculating(run_ahead=run_ahead)
    cluster.guess_by_oracle(share)
    for prompt in (3, 8, 17):
        cluster.add(prompt, max_tokens=40, n=2)
    cluster.run()
    cluster.assert_oracle()
    cluster.assert_idle()
    drafted, accepted = counts(cluster)
    assert drafted > 0 and (accepted == 0 if share == 0.0 else accepted > 0)
    assert share < 1.0 or accepted == drafted


def test_right_guesses_save_steps() -> None:
    cluster = speculating()
    cluster.guess_by_oracle(1.0)
    cluster.add(8, max_tokens=41)
    cluster.run()
    assert len(cluster.steps) <= 12  # a prompt, then five tokens at a time
    cluster.assert_oracle()


def test_text_that_repeats_itself_is_guessed_from_itself() -> None:
    cluster = speculating(vocab_size=1)
    cluster.add([0] * 6, max_tokens=30)
    cluster.run()
    cluster.assert_oracle()
    assert counts(cluster)[1] > 20


def test_wrong_guesses_are_made_ever_more_rarely() -> None:
    cluster = speculating()
    cluster.guess_by_oracle(0.0)
    cluster.add(8, max_tokens=200)
    cluster.run()
    cluster.assert_oracle()
    assert counts(cluster)[0] < 30


def test_right_guesses_bring_them_back() -> None:
    cluster = speculating()
    cluster.guess_by_oracle(0.0)
    request = cluster.add(8, max_tokens=200)
    while len(cluster.tokens(request)) < 60:
        cluster.step()
    cluster.guess_by_oracle(1.0)
    before = counts(cluster)[1]
    cluster.run()
    cluster.assert_oracle()
    assert counts(cluster)[1] - before > 60


def test_a_stop_token_among_the_guesses_is_the_last_one_told() -> None:
    plain = Cluster()
    tokens = plain.oracle(plain.add(9, max_tokens=30, ignore_eos=True))
    cluster = speculating()
    cluster.guess_by_oracle(1.0)
    request = cluster.add(9, max_tokens=30, stop_token_ids=(tokens[7],))
    early = cluster.add(9, max_tokens=30, stop_token_ids=(tokens[1], tokens[7]), min_tokens=5)
    cluster.run()
    assert cluster.tokens(request) == cluster.tokens(early) == tokens[:8]
    assert cluster.sample(request).finish_reason is FinishReason.STOP
    cluster.assert_idle()


def test_nothing_is_guessed_beyond_max_tokens() -> None:
    cluster = speculating()
    cluster.guess_by_oracle(1.0)
    requests = [cluster.add(9, max_tokens=count) for count in range(1, 9)]
    cluster.run()
    cluster.assert_oracle()
    assert all(cluster.sample(r).finish_reason is FinishReason.LENGTH for r in requests)
    cluster.assert_idle()


def test_blocks_of_wrong_guesses_are_back_before_the_next_step() -> None:
    cluster = speculating(block_size=1)
    cluster.guess_by_oracle(0.0)
    request = cluster.add(6, max_tokens=20)
    while not counts(cluster)[0]:
        cluster.step()
    referenced = cluster.scheduler.stats().device.referenced
    assert referenced == 6 + len(cluster.tokens(request)) - 1
    assert cluster.scheduler.stats().device.fenced == 0


def test_nothing_of_a_wrong_guess_is_found_by_others() -> None:
    cluster = speculating(block_size=2)
    cluster.guess_by_oracle(0.0)
    first = cluster.add(4, max_tokens=9)
    cluster.run()
    prompt = [*first.prompt_token_ids, *cluster.tokens(first)]
    # its guesses were each token's successor: a prompt that goes on with one hits up to it
    for place in range(4, len(prompt) - 1):
        other = cluster.add([*prompt[:place], prompt[place] + 1, 5, 5, 5], max_tokens=1)
        cluster.run()
        assert cluster.cached_tokens(other) <= place
        cluster.assert_oracle(other)


def test_a_guess_takes_no_block_that_anybody_would_miss() -> None:
    """Two sequences fill the pool to its last block: neither is preempted for a guess."""
    plain = Cluster(num_blocks=10, block_size=4, watermark=0.0, enable_prefix_caching=False)
    guessing = speculating(num_blocks=10, enable_prefix_caching=False)
    guessing.guess_by_oracle(0.5)
    for cluster in (plain, guessing):
        cluster.add(8, max_tokens=12)
        cluster.add(8, max_tokens=12)
        cluster.run()
        cluster.assert_oracle()
        assert cluster.scheduler.stats().preemptions == 0
    assert counts(guessing)[1] > 0


def test_guesses_stay_within_a_lease() -> None:
    cluster = speculating(block_size=1)
    cluster.guess_by_oracle(0.5)
    cluster.add(4, max_tokens=20, lease_id=1, lease_blocks=10)
    while cluster.launch():
        drafts = int(cluster.steps[-1].num_draft_tokens.sum())
        held = cluster.scheduler.stats().device.referenced
        assert not drafts or held <= 10  # once it is used up, nothing is taken for a guess
        while cluster.in_flight:
            cluster.land()
    assert counts(cluster)[0] > 0
    cluster.assert_oracle()
    cluster.assert_idle()


@pytest.mark.parametrize("run_ahead", [False, True])
def test_guesses_stay_within_a_guarantee(run_ahead: bool) -> None:
    """Two guarantees fill the pool: no guess of the one takes what the other was promised."""
    cluster = speculating(num_blocks=46, block_size=1, run_ahead=run_ahead)
    cluster.guess_by_oracle(0.5)
    requests = [
        cluster.add(4, max_tokens=20, admission_class=AdmissionClass.GUARANTEED, cache_salt=salt)
        for salt in "ab"
    ]
    cluster.run()
    assert all(cluster.sample(r).finish_reason is FinishReason.LENGTH for r in requests)
    assert counts(cluster)[1] > 0
    cluster.assert_oracle()
    cluster.assert_idle()


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_row_may_be_preempted_while_its_guesses_are_in_flight(mode: str, run_ahead: bool) -> None:
    cluster = speculating(
        run_ahead=run_ahead, num_host_blocks=64, preemption_mode=mode, preempt_every=3
    )
    cluster.guess_by_oracle(0.7)
    for prompt in (5, 6, 11):
        cluster.add(prompt, max_tokens=30)
    cluster.run()
    cluster.assert_oracle()
    cluster.assert_idle()
    stats = cluster.scheduler.stats()
    assert stats.preemptions > 3 and stats.accepted_tokens > 0


def test_a_row_may_end_while_its_guesses_are_in_flight() -> None:
    for how in ("abort", "finish"):
        cluster = speculating(run_ahead=True)
        cluster.guess_by_oracle(1.0)
        request, other = cluster.add(7, max_tokens=40), cluster.add(9, max_tokens=40)
        while not (cluster.in_flight and cluster.in_flight[-1].draft_token_ids is not None):
            cluster.step()
        told = len(cluster.tokens(request))
        if how == "abort":
            cluster.scheduler.abort_request(request.request_key)
        else:
            cluster.scheduler.finish_sequence(request.request_key, 0, told, cluster.now)
        cluster.scheduler.check_integrity()
        cluster.run()
        assert len(cluster.tokens(request)) == told
        cluster.assert_oracle(other)
        cluster.assert_idle()


def test_grammars_and_beams_are_not_guessed() -> None:
    cluster = speculating(vocab_size=12)
    cluster.guess_by_oracle(1.0)
    cluster.add(6, max_tokens=10, grammar="start: /a*/")
    cluster.add(6, max_tokens=10, beam_width=2)
    cluster.run()
    cluster.assert_oracle()
    assert counts(cluster) == (0, 0)


def test_a_guess_that_costs_as_much_as_a_token_is_not_made() -> None:
    """Steps as long as their positions are many: even right guesses save nothing."""
    cluster = speculating(prefill_tokens_per_s=100.0)
    execute = cluster.model.execute

    def timed(output: SchedulerOutput) -> ModelRunnerOutput:
        return replace(execute(output), elapsed_s=0.01 * output.num_tokens)

    cluster.model.execute = timed
    cluster.guess_by_oracle(0.9)
    cluster.add(6, max_tokens=100)
    cluster.run()
    cluster.assert_oracle()
    assert counts(cluster)[0] < 20


def test_a_row_that_never_guesses_misses_no_step() -> None:
    """Overlapped: who may guess waits for its token, who has nothing to guess from goes on."""
    cluster = speculating(run_ahead=True)
    cluster.add(list(range(20)), max_tokens=100)
    cluster.run()
    cluster.assert_oracle()
    idle = sum(len(output.rows) == 0 for output in cluster.steps)
    assert idle == 0 and counts(cluster)[0] < 10
