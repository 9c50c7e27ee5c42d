"""Where the samples of rows with guesses belong, and which of them count."""

import numpy as np

from pagefleet.scheduler.output import SchedulerOutput
from pagefleet.workers.drafts import DraftSamples


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


OUTPUT = SchedulerOutput(
    step=1,
    rows=ids(4, 6, 5, 3),
    num_scheduled_tokens=ids(1, 7, 3, 2),
    sample_entries=ids(0, 2, 2, 2, 3, 3),
    sample_rows=ids(4, 5, 5, 5, 3, 3),
    draft_token_ids=ids(-1, -1, -1, -1, 10, 11, 20, -1).reshape(4, 2),
)


def counting(*token_ids: int) -> list[bool]:
    drafts = DraftSamples.of(OUTPUT)
    assert drafts is not None
    return drafts.counting(ids(*token_ids)).tolist()


def test_a_step_without_guesses_has_none() -> None:
    assert DraftSamples.of(SchedulerOutput(step=1)) is None


def test_each_sample_has_its_place_and_its_guess() -> None:
    drafts = DraftSamples.of(OUTPUT)
    assert drafts is not None
    assert drafts.offsets.tolist() == [0, 0, 1, 2, 0, 1]
    assert drafts.guesses.tolist() == [-1, 10, 11, -1, 20, -1]


def test_samples_count_up_to_the_first_behind_a_wrong_guess() -> None:
    assert counting(1, 10, 11, 12, 20, 21) == [True] * 6
    assert counting(1, 10, 99, 12, 99, 21) == [True, True, True, False, True, False]
    assert counting(1, 99, 11, 12, 20, 21) == [True, True, False, False, True, True]
    assert counting(10, 99, 99, 99, 99, 99) == [True, True, False, False, True, False]
