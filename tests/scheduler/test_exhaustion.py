"""Each way to run out of blocks can be chosen, and is counted."""

import pytest
from scheduler_harness import Cluster

from pagefleet.protos.errors import Overloaded
from pagefleet.protos.messages import FinishReason
from pagefleet.scheduler.config import AdmissionRule, PreemptionMode, SchedulerConfig


def run_four(**config: object) -> Cluster:
    """Four sequences of 3 blocks at first and 8 at last, over 16."""
    settings = {"block_size": 4, "num_blocks": 16, "watermark": 0.0, "write_back_blocks": 0}
    cluster = Cluster(**{**settings, **config})
    for value in range(4):
        cluster.add([value] * 12, max_tokens=20)
    cluster.run()
    cluster.assert_oracle()
    cluster.assert_idle()
    return cluster


def most_rows(cluster: Cluster) -> int:
    return max(len(step.rows) for step in cluster.steps)


@pytest.mark.parametrize("run_ahead", [False, True], ids=["in-step", "run-ahead"])
def test_full_length_rule_admits_fewer_and_preempts_nobody(run_ahead):
    eager = run_four(run_ahead=run_ahead)
    assert most_rows(eager) == 4
    assert eager.scheduler.stats().preemptions > 0
    careful = run_four(
        run_ahead=run_ahead, admission_rule=AdmissionRule.FULL_LENGTH, watermark=0.25
    )
    assert most_rows(careful) < 4
    assert careful.scheduler.stats().preemptions == 0
    assert careful.scheduler.stats().admissions_deferred > 0


def test_full_length_rule_lets_a_lone_sequence_in():
    cluster = Cluster(block_size=4, num_blocks=4, admission_rule=AdmissionRule.FULL_LENGTH)
    request = cluster.add(8, max_tokens=60)
    cluster.run()
    assert cluster.sample(request).finish_reason is FinishReason.KV_EXHAUSTED
    assert cluster.scheduler.stats().kv_exhausted == 1


def test_watermark_holds_admissions_back():
    eager = run_four()
    careful = run_four(watermark=0.5)
    assert most_rows(careful) < most_rows(eager)
    assert careful.scheduler.stats().preemptions < eager.scheduler.stats().preemptions


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_victims_go_the_chosen_way(mode):
    stats = run_four(preemption_mode=mode, num_host_blocks=64).scheduler.stats()
    swaps = mode is PreemptionMode.SWAP
    assert (stats.preemptions_swap > 0) is swaps
    assert (stats.preemptions_recompute > 0) is not swaps


def test_full_queue_refuses_with_a_hint():
    cluster = Cluster(max_num_waiting=2, prefill_tokens_per_s=100.0)
    for value in range(2):
        cluster.add([value] * 50)
    with pytest.raises(Overloaded) as refusal:
        cluster.add([3] * 50)
    assert refusal.value.retry_after_s == pytest.approx(1.0)
    assert cluster.scheduler.stats().queue_full == 1
    cluster.run()
    cluster.assert_oracle()


def test_a_queue_for_nobody_is_no_setting():
    with pytest.raises(ValueError, match="max_num_waiting"):
        SchedulerConfig(8, max_num_waiting=0)
