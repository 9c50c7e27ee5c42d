"""Five times too much for a minute, then half: what is served, what is told, who gets how much."""

import pytest
from overload import run_overload, run_preemptions

from pagefleet.protos.messages import AdmissionClass


@pytest.mark.slow
@pytest.mark.parametrize("heavy", [0.5, 0.8])
def test_five_times_the_load_for_a_minute(heavy: float) -> None:
    overload = run_overload(heavy)
    assert min(overload.goodput_overload, overload.goodput_after) >= 0.95
    assert overload.num_hints == overload.num_refusals > 1000
    assert overload.num_appointments > 100 and overload.kept >= 0.8
    assert overload.heavy_share <= 0.55
    assert overload.num_unserved == 0
    assert overload.num_left == 0  # the overload is over


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
def test_no_guaranteed_request_is_preempted(seed: int) -> None:
    preempted = run_preemptions(seed)
    assert preempted[AdmissionClass.GUARANTEED] == 0 < sum(preempted.values())
