"""Swap, recompute and auto under a load of three times the pool, on a virtual clock."""

import random
from dataclasses import replace

import pytest
from scheduler_harness import Cluster

from pagefleet.scheduler.config import PreemptionMode

NUM_BLOCKS = 64
BLOCK_SIZE = 4
BLOCK_BYTES = 1 << 20
STEP_S = 0.002  # what a step costs besides its tokens


class VirtualClock:
    """Steps and copies take the time that their sizes and two rates say. Copies run beside the
    steps, one after the other."""

    def __init__(self, cluster: Cluster, *, copy_bytes_per_s: float, tokens_per_s: float) -> None:
        self._cluster = cluster
        self._copy_s = BLOCK_BYTES / copy_bytes_per_s
        self._token_s = 1 / tokens_per_s
        self._copy_ends: list[tuple[float, float]] = []  # when, after how long
        self.now = 0.0
        cluster.model.hold_copies = True

    def run(self) -> float:
        """Step until all is done. Returns when that was."""
        cluster = self._cluster
        while cluster.scheduler.has_unfinished():
            output = cluster.launch()
            if output is None:
                assert self._copy_ends, f"stuck: {cluster.scheduler.stats()}"
                self.now = max(self.now, self._copy_ends[0][0])
            else:
                cluster.in_flight.clear()
                cluster.fences.land(output)
                for job in output.copy_jobs:
                    self._begin_copy(len(job.sources))
                elapsed = STEP_S + output.num_tokens * self._token_s if len(output.rows) else 0.0
                result = cluster.model.execute(output)
                self.now += elapsed
                cluster.scheduler.update(output, replace(result, elapsed_s=elapsed), self.now)
            self._end_copies()
            cluster.take()
        return self.now

    def _begin_copy(self, num_blocks: int) -> None:
        elapsed = num_blocks * self._copy_s
        begin = max(self.now, self._copy_ends[-1][0] if self._copy_ends else 0.0)
        self._copy_ends.append((begin + elapsed, elapsed))

    def _end_copies(self) -> None:
        while self._copy_ends and self._copy_ends[0][0] <= self.now:
            _, elapsed = self._copy_ends.pop(0)
            (done,) = self._cluster.model.finish_copies(1)
            self._cluster.scheduler.copies_done((replace(done, elapsed_s=elapsed),))


def overload(mode: PreemptionMode, *, seed: int = 3, **config: object) -> Cluster:
    """Sequences whose blocks would fill the pool three times over."""
    chance = random.Random(seed)
    cluster = Cluster(
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        num_host_blocks=4 * NUM_BLOCKS,
        preemption_mode=mode,
        watermark=0.0,
        write_back_blocks=0,
        block_bytes=BLOCK_BYTES,
        **config,
    )
    num_blocks = 0
    while num_blocks < 3 * NUM_BLOCKS:
        prompt, max_tokens = chance.randrange(8, 30), chance.randrange(10, 40)
        cluster.add([len(cluster.requests)] * prompt, max_tokens=max_tokens)
        num_blocks += -(-(prompt + max_tokens - 1) // BLOCK_SIZE)
    return cluster


def makespan(mode: PreemptionMode, copy_bytes_per_s: float, tokens_per_s: float) -> float:
    cluster = overload(mode, copy_bytes_per_s=copy_bytes_per_s, prefill_tokens_per_s=tokens_per_s)
    clock = VirtualClock(cluster, copy_bytes_per_s=copy_bytes_per_s, tokens_per_s=tokens_per_s)
    elapsed = clock.run()
    cluster.assert_oracle()
    cluster.assert_idle()
    return elapsed


@pytest.mark.parametrize("run_ahead", [False, True], ids=["in-step", "run-ahead"])
@pytest.mark.parametrize("mode", list(PreemptionMode))
def test_three_times_the_pool_finishes_by_every_policy(run_ahead, mode):
    cluster = overload(mode, run_ahead=run_ahead)
    cluster.run()
    cluster.assert_oracle()
    usages = [cluster.sample(r).last.usage for r in cluster.requests.values()]
    preempted = [usage.preemptions for usage in usages]
    assert sum(preempted) > 0
    assert sum(count > 1 for count in preempted) <= 0.1 * len(preempted)
    cluster.assert_idle()


EXHAUSTIVE = (pytest.mark.slow, pytest.mark.exhaustive)
SETTINGS = [(2e10, 500.0), (1e8, 20_000.0), (2e9, 4_000.0)]
GRID = [
    (copy_bytes_per_s, tokens_per_s)
    for copy_bytes_per_s in (1e8, 5e8, 1e9, 2e9, 4e9, 2e10)
    for tokens_per_s in (500.0, 2_000.0, 4_000.0, 8_000.0, 16_000.0)
]


@pytest.mark.parametrize(
    ("copy_bytes_per_s", "tokens_per_s"),
    [
        *(pytest.param(*setting) for setting in SETTINGS),
        *(pytest.param(*setting, marks=EXHAUSTIVE) for setting in GRID),
    ],
)
def test_auto_is_about_as_fast_as_the_better_policy(copy_bytes_per_s, tokens_per_s):
    times = {mode: makespan(mode, copy_bytes_per_s, tokens_per_s) for mode in PreemptionMode}
    better = min(times[PreemptionMode.SWAP], times[PreemptionMode.RECOMPUTE])
    assert times[PreemptionMode.AUTO] <= 1.05 * better, times
