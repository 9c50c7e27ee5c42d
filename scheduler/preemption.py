"""Who is preempted when blocks run out. Knows costs and tables, not how blocks live."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running sequence that may be preempted.

    cost_ms: what taking its KV away and bringing it back would cost.
    arrival: later ones go first among equals, so that the oldest always gets on.
    """

    row: int
    class_rank: int
    priority: int
    num_preemptions: int
    cost_ms: float
    arrival: int

    @property
    def order(self) -> tuple[int, int, int, float, int]:
        """Smallest first: lowest class, lowest priority, least often preempted, cheapest.

        The number of preemptions stands before the cost: the cheapest would otherwise be the
        same one again and again.
        """
        return (
            -self.class_rank,
            self.priority,
            self.num_preemptions,
            self.cost_ms,
            -self.arrival,
        )


class VictimChoice:
    """Chooses among candidates. table: a row's blocks; ref_count: who holds a block."""

    def __init__(self, table: Callable[[int], list[int]], ref_count: Callable[[int], int]) -> None:
        self._table = table
        self._ref_count = ref_count

    def choose(self, candidates: Sequence[Candidate], num_needed: int) -> list[Candidate]:
        """The first in order whose blocks add up to `num_needed`, without those that turn out
        not to be needed; all of them if they do not add up."""
        chosen: list[Candidate] = []
        for candidate in sorted(candidates, key=lambda c: c.order):
            chosen.append(candidate)
            if self.num_freed(chosen) >= num_needed:
                break
        for candidate in reversed(chosen[:-1]):  # the dearest may go free first
            others = [c for c in chosen if c is not candidate]
            if self.num_freed(others) >= num_needed:
                chosen = others
        return chosen

    def num_freed(self, victims: Sequence[Candidate]) -> int:
        """Blocks that nobody holds once these have let go: a shared one needs all its holders."""
        holders: dict[int, int] = {}
        for victim in victims:
            for block in self._table(victim.row):
                holders[block] = holders.get(block, 0) + 1
        return sum(1 for block, count in holders.items() if self._ref_count(block) == count)
