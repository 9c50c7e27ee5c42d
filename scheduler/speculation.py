"""Who guesses ahead, and how far: only where a guess is worth more than it costs.

Knows rows, how often their guesses were right and how long steps take; not blocks, and not what
becomes of a guess. What is guessed never changes what is said, only how soon.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from .books import Books
from .ngram_proposer import NgramProposer
from .output import Int32Array
from .request import Sequence
from .running_batch import Int64Array

# A right guess saves at most one token's share of a step; below this chance it is not worth the
# work around it, however little computing one more position costs.
_MIN_CHANCE = 0.2
_FIRST_CHANCE = 0.5
_WEIGHT = 0.15  # of one guess in the running mean
_MAX_PAUSE = 32  # steps: what is tried all the same costs a thirtieth of a position each
_MAX_MISS_PAUSE = 32
_NEVER = np.iinfo(np.int32).max


@dataclass(slots=True)
class Guesser:
    """One sequence's guesses: where from, how often they are right, when to try again.

    pause, miss_pause: steps to wait after the next wrong guess, or search in vain.
    """

    proposer: NgramProposer
    chance: float = _FIRST_CHANCE
    pause: int = 1
    miss_pause: int = 1

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        """So many guesses were right, then one was wrong, unless they all were right."""
        self.chance = 1.0 - (1.0 - self.chance) * (1.0 - _WEIGHT) ** num_accepted
        if num_accepted < num_drafts:
            self.chance *= 1.0 - _WEIGHT


@dataclass(slots=True)
class StepCost:
    """What one more position costs, as a share of what one more token is worth.

    A step of n rows that takes t seconds gives n tokens: one is worth t / n.
    """

    share: float = 0.0
    _seconds_per_row: float = field(default=0.0)

    def observe(self, num_rows: int, num_drafts: int, elapsed_s: float, position_s: float) -> None:
        """Learn from a step without prompts."""
        plain_s = elapsed_s - num_drafts * position_s
        if plain_s <= 0.0 or num_rows == 0:
            return
        weight = 0.1 if self._seconds_per_row else 1.0
        self._seconds_per_row += weight * (plain_s / num_rows - self._seconds_per_row)
        self.share = min(1.0, position_s / self._seconds_per_row)


class Speculation:
    """Proposes drafts for rows whose tokens are all known, and learns from what came of them."""

    def __init__(self, books: Books) -> None:
        self._config = books.config
        self._batch = books.batch
        self._costs = books.costs
        self._step_cost = StepCost()
        self._guessers: list[Guesser | None] = [None] * books.batch.num_rows
        self._owners: Int64Array = np.zeros(books.batch.num_rows, dtype=np.int64)
        # Steps that a row goes without a guess.
        self._pauses: Int32Array = np.zeros(books.batch.num_rows, dtype=np.int32)
        self.overlaps = False

    def waiting_rows(self) -> Int32Array:
        """Rows that had better know the token in flight, since they may guess behind it."""
        batch = self._batch
        waits = (self._pauses == 0) & (batch.num_pending > 0)
        waits &= self._owners == batch.sequence_ids
        return waits.nonzero()[0]

    def propose(self, rows: Int32Array, budget: int) -> list[tuple[int, list[int]]]:
        """Drafts for some of `rows`, each about to compute its last known token; at most
        `budget` tokens in all, and none beyond a row's limit."""
        batch, pauses = self._batch, self._pauses
        for row in rows[self._owners[rows] != batch.sequence_ids[rows]].tolist():
            self._meet(row, batch.sequence(row))
        paused = pauses[rows]
        due = rows[(paused == 0) & (batch.num_pending[rows] == 0)]
        pauses[rows] = paused - (paused > 0)
        room = batch.compute_limit[due] - batch.num_computed[due] - 1
        drafts: list[tuple[int, list[int]]] = []
        for row, limit in zip(due.tolist(), room.tolist(), strict=True):
            depth = min(self._depth(row), limit, budget)
            draft = self._propose(row, depth) if depth > 0 else []
            if draft:
                drafts.append((row, draft))
                budget -= len(draft)
        return drafts

    def learn(self, row: int, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """What came of a draft of a row that still has its sequence."""
        guesser = self._guessers[row]
        if guesser is None or self._owners[row] != sequence.id:
            return
        guesser.learn(num_drafts, num_accepted)
        if self._worthwhile_depth(guesser):
            guesser.pause = 1
        else:
            self._pauses[row] = guesser.pause
            guesser.pause = min(_MAX_PAUSE, 2 * guesser.pause)

    def observe_step(self, num_rows: int, num_drafts: int, elapsed_s: float) -> None:
        """A step without prompts took so long."""
        if elapsed_s > 0.0:
            position_s = self._costs.recompute_ms(1) / 1000.0
            self._step_cost.observe(num_rows, num_drafts, elapsed_s, position_s)

    def _meet(self, row: int, sequence: Sequence) -> None:
        """A row has another sequence than before."""
        self._owners[row] = sequence.id
        sampling = sequence.request.sampling
        can_guess = not sequence.request.is_beam_search and not sampling.grammar
        self._pauses[row] = 0 if can_guess else _NEVER
        config = self._config
        proposer = NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
        self._guessers[row] = Guesser(proposer) if can_guess else None

    def _depth(self, row: int) -> int:
        guesser = self._guessers[row]
        return 0 if guesser is None else max(1, self._worthwhile_depth(guesser))

    def _worthwhile_depth(self, guesser: Guesser) -> int:
        """So many guesses in a row are right with more than the chance that pays. 0 = none;
        after its pause one is tried all the same."""
        needed = max(_MIN_CHANCE, self._step_cost.share)
        chance = guesser.chance
        if chance <= needed:
            return 0
        depth = math.log(needed) / math.log(chance) if chance < 1.0 else math.inf
        return min(self._config.num_speculative_tokens, int(min(depth, 1e6)))

    def _propose(self, row: int, depth: int) -> list[int]:
        guesser = self._guessers[row]
        assert guesser is not None, f"row {row} cannot guess"
        known = self._batch.num_known(row)
        draft = guesser.proposer.propose(self._batch.token_ids[row], known, depth)
        if draft:
            guesser.miss_pause = 1
        elif self.overlaps:  # a search in vain made the row miss a step
            self._pauses[row] = guesser.miss_pause
            guesser.miss_pause = min(_MAX_MISS_PAUSE, 2 * guesser.miss_pause)
        return draft
