"""Plants bugs in the scheduler, one at a time, and prints how soon the fuzzer finds each.

    python tests/scheduler/plant_bugs.py [--steps 10000] [--seed 0]

Exit status 1 if one was not found within so many steps.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))

from scheduler_fuzz import fuzz

from pagefleet.scheduler.block_pool import BlockPool
from pagefleet.scheduler.content import Content, Tier
from pagefleet.scheduler.content_index import ContentIndex
from pagefleet.scheduler.host_tier import HostTier
from pagefleet.scheduler.output import SchedulerOutput
from pagefleet.scheduler.running_batch import RunningBatch
from pagefleet.scheduler.scheduler import Scheduler
from pagefleet.scheduler.step_plan import StepPlan, StepRecord
from pagefleet.scheduler.step_results import StepResults


def skip_a_reference_decrement() -> AbstractContextManager[object]:
    release = BlockPool.release

    def planted(self: BlockPool, blocks: Sequence[int], fence: int = 0) -> None:
        release(self, blocks[:-1] if len(blocks) > 4 else blocks, fence)

    return patch.object(BlockPool, "release", planted)


def publish_a_hash_early() -> AbstractContextManager[object]:
    schedule = Scheduler.schedule

    def planted(self: Scheduler, now: float) -> SchedulerOutput | None:
        output = schedule(self, now)
        if output is not None:
            self._publish(self._in_flight[-1])
        return output

    return patch.object(Scheduler, "schedule", planted)


def reuse_a_fenced_block() -> AbstractContextManager[object]:
    release = BlockPool.release

    def planted(self: BlockPool, blocks: Sequence[int], fence: int = 0) -> None:
        release(self, blocks)

    return patch.object(BlockPool, "release", planted)


def drop_a_copy_on_write() -> AbstractContextManager[object]:
    launch = StepPlan.launch

    def planted(
        self: StepPlan, batch: RunningBatch, removed_rows: list[int], cut_rows: dict[int, int]
    ) -> StepRecord:
        self.device_copies = self.device_copies[1:]
        return launch(self, batch, removed_rows, cut_rows)

    return patch.object(StepPlan, "launch", planted)


def forget_a_tail_slot_in_swap() -> AbstractContextManager[object]:
    swap_out = HostTier.swap_out

    def planted(self: HostTier, sequence: object, blocks: list[int], num_computed: int) -> bool:
        return swap_out(self, sequence, blocks[: max(1, len(blocks) - 1)], num_computed)

    return patch.object(HostTier, "swap_out", planted)


def keep_an_evicted_hash() -> AbstractContextManager[object]:
    detach_all = ContentIndex.detach_all

    def planted(
        self: ContentIndex, contents: list[Content | None], tier: Tier, blocks: list[int]
    ) -> None:
        evicted = [content for block in blocks if (content := contents[block]) is not None]
        detach_all(self, contents, tier, blocks)
        self._contents.update((content.key, content) for content in evicted)

    return patch.object(ContentIndex, "detach_all", planted)


def run_before_the_load_is_done() -> AbstractContextManager[object]:
    return patch.object(RunningBatch, "set_loading", lambda self, row, is_loading: None)


def lose_the_token_in_flight() -> AbstractContextManager[object]:
    return patch.object(StepResults, "_append_to_waiting", lambda *arguments: None)


def serve_a_hit_on_the_hash_alone() -> AbstractContextManager[object]:
    return patch.object(
        ContentIndex, "_first_refused", lambda self, root, found, blocks: len(found)
    )


def reuse_the_source_of_an_open_copy() -> AbstractContextManager[object]:
    settle = BlockPool._settle

    def planted(self: BlockPool, blocks: Sequence[int], evict_first: bool = False) -> None:
        pins, self._pins = self._pins, [0] * self.num_blocks
        settle(self, blocks, evict_first)
        self._pins = pins

    return patch.object(BlockPool, "_settle", planted)


def publish_a_wrong_guess() -> AbstractContextManager[object]:
    take_run = StepResults._take_run

    def planted(
        self: StepResults,
        sequence: object,
        row: int,
        tokens: list[int],
        num_drafts: int,
        *others: object,
    ) -> None:
        batch, manager = self._batch, self._books.manager
        end = int(batch.num_computed[row]) + num_drafts
        if batch.sequence_ids[row] == sequence.id and end >= batch.next_publish[row]:
            known = batch.num_known(row)
            batch.token_ids[row, known : known + len(tokens)] = tokens
            manager.publish(row, min(end, int(batch.capacity[row])))
        take_run(self, sequence, row, tokens, num_drafts, *others)

    return patch.object(StepResults, "_take_run", planted)


def keep_a_wrong_guess_in_the_count() -> AbstractContextManager[object]:
    accept = RunningBatch.accept

    def planted(self: RunningBatch, row: int, tokens: list[int]) -> None:
        num_drafts = int(self.num_drafts[row])
        accept(self, row, tokens)
        if num_drafts > len(tokens):
            self.num_computed[row] += 1

    return patch.object(RunningBatch, "accept", planted)


BUGS: tuple[Callable[[], AbstractContextManager[object]], ...] = (
    skip_a_reference_decrement,
    publish_a_hash_early,
    reuse_a_fenced_block,
    drop_a_copy_on_write,
    forget_a_tail_slot_in_swap,
    keep_an_evicted_hash,
    run_before_the_load_is_done,
    lose_the_token_in_flight,
    serve_a_hit_on_the_hash_alone,
    reuse_the_source_of_an_open_copy,
    publish_a_wrong_guess,
    keep_a_wrong_guess_in_the_count,
)


@dataclass
class Finding:
    """steps: None = not found."""

    bug: str
    steps: int | None
    message: str


def hunt(plant: Callable[[], AbstractContextManager[object]], seed: int, max_steps: int) -> Finding:
    """Fuzz with a bug planted, in growing runs, until something is wrong."""
    name = plant.__name__.replace("_", " ")
    done = 0
    with plant():
        while done < max_steps:
            try:
                done += fuzz(seed, min(500, max_steps - done)).steps
            except AssertionError as error:
                return Finding(name, done + 500, str(error).splitlines()[0])
            seed += 1
    return Finding(name, None, "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    findings = [hunt(bug, options.seed, options.steps) for bug in BUGS]
    print(f"{'planted bug':<36}{'found within':>14}  by")
    for finding in findings:
        steps = "not found" if finding.steps is None else f"{finding.steps} steps"
        print(f"{finding.bug:<36}{steps:>14}  {finding.message[:90]}")
    return int(any(finding.steps is None for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
