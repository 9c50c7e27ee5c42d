"""Beams on forks: against an oracle that computes whole sequences, tight pools included."""

import numpy as np
import pytest
from scheduler_harness import Cluster

from pagefleet.protos.messages import AdmissionClass, FinishReason
from pagefleet.scheduler.beam_search import BeamSearch
from pagefleet.scheduler.config import PreemptionMode
from pagefleet.scheduler.output import BeamCandidates


@pytest.fixture(params=[False, True], ids=["in-step", "run-ahead"])
def run_ahead(request) -> bool:
    return request.param


def offer(*pairs: tuple[int, float]) -> BeamCandidates:
    return BeamCandidates(
        np.array([token for token, _ in pairs], dtype=np.int32),
        np.array([logprob for _, logprob in pairs], dtype=np.float32),
    )


def test_the_best_offers_of_all_beams_go_on():
    search = BeamSearch(2, 1.0, frozenset({9}), max_tokens=5)
    first = search.advance([offer((1, -0.5), (2, -1.0), (3, -2.0), (4, -3.0))])
    assert [(c.parent, c.token) for c in first] == [(0, 1), (0, 2)]
    second = search.advance(
        [
            offer((5, -0.25), (6, -0.5), (7, -4.0), (8, -5.0)),
            offer((5, -0.125), (6, -4.0), (7, -5.0), (8, -6.0)),
        ]
    )
    assert [(c.parent, c.token) for c in second] == [(0, 5), (0, 6)]


def test_an_end_among_the_first_becomes_a_hypothesis():
    search = BeamSearch(2, 0.0, frozenset({9}), max_tokens=5)
    search.advance([offer((1, -0.5), (9, -1.0), (2, -2.0), (3, -3.0))])
    (best, *_) = search.best(1)
    assert best.token_ids == (9,) and best.is_stopped
    assert search.num_beams == 2


def test_an_end_behind_the_first_is_dropped():
    search = BeamSearch(2, 0.0, frozenset({9}), max_tokens=5)
    search.advance([offer((1, -0.5), (2, -1.0), (9, -2.0), (3, -3.0))])
    assert all(not hypothesis.is_stopped for hypothesis in search.best(4))


def test_it_ends_when_nothing_can_become_better():
    search = BeamSearch(1, 0.0, frozenset({9}), max_tokens=50)
    assert not search.advance([offer((9, -0.5), (1, -1.0))])


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("width", [2, 4])
def test_beams_equal_whole_sequences(run_ahead, width, length_penalty):
    cluster = Cluster(run_ahead=run_ahead, block_size=4, vocab_size=40, eos=(5,))
    for value in range(3):
        cluster.add(
            [value] * (6 + value),
            beam_width=width,
            n=width,
            length_penalty=length_penalty,
            max_tokens=17,
        )
    cluster.run()
    cluster.assert_oracle()
    assert cluster.scheduler.stats().copies_on_write > 0
    cluster.assert_idle()


@pytest.mark.parametrize("mode", list(PreemptionMode))
def test_beams_in_a_pool_that_cannot_hold_them_all(run_ahead, mode):
    cluster = Cluster(
        run_ahead=run_ahead,
        block_size=4,
        num_blocks=14,
        num_host_blocks=40,
        preemption_mode=mode,
        watermark=0.0,
        vocab_size=40,
        eos=(5,),
    )
    for value in range(3):
        cluster.add([value] * 9, beam_width=4, n=2, max_tokens=14)
        cluster.add([value] * 7, max_tokens=12)
    cluster.run()
    cluster.assert_oracle()
    assert cluster.scheduler.stats().preemptions > 0
    cluster.assert_idle()


def test_more_beams_than_rows(run_ahead):
    cluster = Cluster(run_ahead=run_ahead, block_size=4, max_num_sequences=2, vocab_size=40)
    cluster.add(9, beam_width=5, n=5, max_tokens=8)
    cluster.run()
    cluster.assert_oracle()
    cluster.assert_idle()


def test_preemption_at_every_step(run_ahead):
    cluster = Cluster(run_ahead=run_ahead, block_size=4, num_host_blocks=64, vocab_size=40)
    request = cluster.add(9, beam_width=3, n=3, max_tokens=12, ignore_eos=True)
    while cluster.step():
        cluster.scheduler.force_preemption()
        cluster.scheduler.check_integrity()
    cluster.assert_oracle(request)
    cluster.assert_idle()


def test_guaranteed_beams_keep_to_their_worst_case(run_ahead):
    cluster = Cluster(run_ahead=run_ahead, block_size=4, num_blocks=30, vocab_size=40)
    request = cluster.add(
        9, beam_width=3, n=1, max_tokens=12, admission_class=AdmissionClass.GUARANTEED
    )
    for value in range(4):
        cluster.add([value] * 10, max_tokens=20)
    cluster.run()
    cluster.assert_oracle()
    assert cluster.sample(request).last.usage.preemptions == 0
    cluster.assert_idle()


def test_deadline_tells_the_best_so_far(run_ahead):
    cluster = Cluster(run_ahead=run_ahead, vocab_size=40)
    request = cluster.add(9, beam_width=3, n=2, max_tokens=1000, deadline_s=0.1, ignore_eos=True)
    cluster.run()
    for index in range(2):
        sample = cluster.sample(request, index)
        assert sample.finish_reason is FinishReason.DEADLINE
        assert len(sample.tokens) > 3
    cluster.assert_idle()


def test_abort_leaves_nothing(run_ahead):
    cluster = Cluster(run_ahead=run_ahead, block_size=4, vocab_size=40)
    request = cluster.add(9, beam_width=3, n=2, max_tokens=100, ignore_eos=True)
    for _ in range(5):
        cluster.step()
    assert cluster.scheduler.abort_request(request.request_key)
    cluster.run()
    assert not cluster.sample(request).deltas
    assert not cluster.scheduler._sequences
    cluster.assert_idle()
