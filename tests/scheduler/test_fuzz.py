"""A seeded slice of the fuzzer, and that it would notice a bug.

FUZZ_SEED and FUZZ_STEPS choose another slice.
"""

import os
import sys
from pathlib import Path

import pytest
from scheduler_fuzz import Episode, fuzz

sys.path.append(str(Path(__file__).parent))
import plant_bugs

SEED = int(os.environ.get("FUZZ_SEED", "1"))
STEPS = int(os.environ.get("FUZZ_STEPS", "4000"))


def test_random_load_on_random_replicas():
    totals = fuzz(SEED, STEPS)
    # A slice that never met these would prove nothing about them.
    for name in ("preemptions_recompute", "preemptions_swap", "copies_on_write", "blocks_evicted"):
        assert totals.counts[name] > 0, totals
    for name in ("blocks_imported", "imports_failed", "exports_read"):
        assert totals.counts[name] > 0, totals
    for name in ("blocks_loaded", "copies_failed", "collisions_refused", "hit_tokens"):
        assert totals.counts[name] > 0, totals


@pytest.mark.parametrize(
    "episode",
    [
        2495492486487,  # every row that had its turn was preempted, while others could run
        3976349929097,  # a beam without a block for its next token was taken for one that waits
    ],
)
def test_an_episode_that_once_failed(episode):
    Episode(episode).run(150)


@pytest.mark.slow
@pytest.mark.parametrize("bug", plant_bugs.BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(bug):
    finding = plant_bugs.hunt(bug, seed=0, max_steps=10_000)
    assert finding.steps is not None
