"""What happens when blocks run out, in this order:

1. cached-idle blocks are reclaimed (inside allocation);
2. admissions are held (the admission's own rule, and none in a step that preempted);
3. rows wait for blocks that are on their way;
4. the cheapest victims are preempted, no more than needed, by swap or recompute;
5. a sequence that is alone and still outgrows the pool ends with what it has.

Decides who must go; how a sequence goes is the `Evictor`'s business.
"""

from typing import Protocol

import numpy as np

from .books import Books
from .output import Int32Array
from .preemption import Candidate, VictimChoice
from .request import Sequence
from .step_plan import StepPlan
from .swap_policy import SwapPolicy


class Evictor(Protocol):
    """Carries out what was decided."""

    @property
    def fence(self) -> int:
        """The last step in flight; 0 = none."""
        ...

    def is_in_flight(self, step: int) -> bool:
        """Whether the result of a step is still to come."""
        ...

    def preempt(self, sequence: Sequence) -> None:
        """Take its blocks and row; it waits in its old place."""
        ...

    def exhaust(self, sequence: Sequence, now: float) -> None:
        """End it with what it has."""
        ...


class Exhaustion:
    """Finds a block for every row that needs one, or decides who goes without."""

    def __init__(self, books: Books, evictor: Evictor) -> None:
        self._books = books
        self._batch = books.batch
        self._pool = books.pool
        self._manager = books.manager
        self._ledger = books.ledger
        self._evictor = evictor
        self._swap_policy = SwapPolicy(books)
        self._victims = VictimChoice(self._manager.blocks, self._pool.ref_count)

    def grow(self, plan: StepPlan, rows: Int32Array, now: float) -> Int32Array:
        """Give each of `rows`, about to write one position, the block it needs for that.

        The needs of all are summed before any is met, and victims are chosen before anything
        is scheduled. Returns the rows that can run.
        """
        growing = self._manager.needs_block(rows)
        tails = self._manager.shared_tails(rows)
        if not len(growing) and not tails:
            return rows
        wanting: list[int] = growing.tolist() + tails
        short = self._shortage(wanting)
        if short > 0:
            wanting, short = self._make_room(plan, wanting, short, now)
            rows = rows[self._batch.sequence_ids[rows] != 0]
        if short > 0:  # the oldest first, the others wait
            wanting.sort(key=lambda row: int(self._batch.arrival[row]))
        held = [row for row in wanting if not self._give_block(plan, row)]
        if not held:
            return rows
        self._books.counters.rows_held += len(held)
        return rows[~np.isin(rows, held)]

    def room_for_drafts(self, plan: StepPlan, row: int, count: int) -> int:
        """Blocks for up to `count` guessed tokens behind the position that a row computes next.
        Returns for how many there is room: guesses live in blocks that nobody would miss."""
        slack = int(self._batch.capacity[row] - self._batch.num_computed[row]) - 1
        if count <= slack:
            return count
        num_needed = self._manager.num_blocks_for(count - slack)
        request = self._batch.sequence(row).request
        available = self._pool.num_free - self._ledger.reserved_for_others(request.key)
        available -= int(self._books.config.watermark * self._books.config.num_blocks)
        if plan.has_preempted or num_needed > min(available, self._ledger.num_left(request.key)):
            return slack
        for block in self._pool.allocate(num_needed) or ():
            self._manager.append(row, block)
            plan.table_rows.append(row)
            plan.table_blocks.append(block)
        self._books.leases.settle(request)
        return count

    def choose_victim(self, num_needed: int, must_have_progressed: bool = False) -> Sequence | None:
        """The first of the sequences that must go for so many blocks; None if nobody may be.

        must_have_progressed: choose only among those that have a new token since they entered.
        """
        batch = self._batch
        candidates = [
            self._candidate(row)
            for row in batch.rows()
            if not batch.is_loading[row]
            and not batch.sequence(row).request.is_guaranteed
            and (not must_have_progressed or self._has_progressed(row))
        ]
        if not candidates:
            return None
        return self._batch.sequence(self._victims.choose(candidates, num_needed)[0].row)

    def _make_room(
        self, plan: StepPlan, wanting: list[int], short: int, now: float
    ) -> tuple[list[int], int]:
        """Preempt until what is free or on its way is enough. Returns who still wants, and how
        many blocks are missing now."""
        while short > self._num_coming():
            victim = self.choose_victim(short - self._num_coming())
            if victim is None:
                break
            if len(self._batch) == 1 and not self._ledger.num_reserved:
                self._evictor.exhaust(victim, now)
            else:
                self._evictor.preempt(victim)
                plan.has_preempted = True
            wanting = [row for row in wanting if self._batch.sequences[row] is not None]
            short = self._shortage(wanting)
        return wanting, short

    def _num_coming(self) -> int:
        """Blocks given back, or perhaps about to be, when what is in flight has ended."""
        return self._pool.num_fenced + self._manager.num_draft_blocks()

    def _shortage(self, wanting: list[int]) -> int:
        """How many blocks too few there are now for all of `wanting`; less than 1 = none."""
        if not self._ledger.num_reserved:
            tails = [row for row in wanting if not self._is_full(row)]
            num_needed = len(wanting) - len(tails) + self._manager.num_copies_on_write(tails)
            return num_needed - self._pool.num_free
        # A row counts in full here even where it might be the last sharer of its tail.
        guaranteed = sum(self._batch.sequence(row).request.is_guaranteed for row in wanting)
        others = len(wanting) - guaranteed
        reserved = max(self._ledger.num_reserved, guaranteed) if others else guaranteed
        return others + reserved - self._pool.num_free

    def _give_block(self, plan: StepPlan, row: int) -> bool:
        """A block to append, or one for the copy of a shared tail. False: there is none for it."""
        request = self._batch.sequence(row).request
        has_room = self._pool.num_free > self._ledger.reserved_for_others(request.key)
        if self._is_full(row):
            blocks = self._pool.allocate(1) if has_room else None
            if blocks is None:
                return False
            self._manager.append(row, blocks[0])
            plan.table_rows.append(row)
            plan.table_blocks.append(blocks[0])
        elif self._manager.shares_tail(row):
            if not has_room:
                return False
            copy = self._manager.copy_on_write(row, self._evictor.fence)
            plan.device_copies.append(copy)
            plan.tail_rows.append(row)
            plan.tail_blocks.append(copy.target)
            self._books.counters.copies_on_write += 1
        self._books.leases.settle(request)
        return True

    def _is_full(self, row: int) -> bool:
        return bool(self._batch.num_computed[row] >= self._batch.capacity[row])

    def _has_progressed(self, row: int) -> bool:
        return self._batch.num_known(row) > len(self._batch.sequence(row).token_ids)

    def _candidate(self, row: int) -> Candidate:
        sequence = self._batch.sequence(row)
        return Candidate(
            row=row,
            class_rank=sequence.request.class_rank,
            priority=sequence.request.priority,
            num_preemptions=sequence.num_preemptions,
            cost_ms=min(self._swap_policy.costs_ms(row)),
            arrival=sequence.request.arrival,
        )
