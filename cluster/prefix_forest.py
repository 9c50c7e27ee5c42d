"""What recent prompts have in common: a tree of prefixes for each model and tenant.

Knows route chains only, never a token of a prompt. Bounded: the runs with the most requests stay.

    a b c d      ─►   a b ─┬─ c d     2 + 2 hashes, 1 request
    a b e             │    └─ e       2 requests pass a b
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..protos.messages import ReserveRequest

_MAX_NODES = 160


@dataclass(slots=True)
class Run:
    """Hashes without a branch between them. depth: hashes from the root to its end."""

    model: str
    tenant: str
    parent: "Run | None"
    hashes: Sequence[bytes]
    depth: int
    num_requests: int = 0
    children: list["Run"] = field(default_factory=list["Run"])

    @property
    def last_hash(self) -> bytes:
        """Stands for the whole prefix."""
        return self.hashes[-1]


def grow_forest(requests: Iterable[ReserveRequest], max_nodes: int = _MAX_NODES) -> list[Run]:
    """The largest runs, parents first. Prompts too short for one hash are left out."""
    chains: dict[tuple[str, str], list[tuple[bytes, ...]]] = {}
    for request in requests:
        if request.route_hashes:
            chains.setdefault((request.model, request.tenant), []).append(request.route_hashes)
    roots: list[Run] = []
    for (model, tenant), group in sorted(chains.items()):
        group.sort()
        roots += _split(model, tenant, None, group, 0)
    return _largest(roots, max_nodes)


def _split(
    model: str, tenant: str, parent: Run | None, chains: list[tuple[bytes, ...]], start: int
) -> list[Run]:
    """The runs that begin behind `start` hashes which all (sorted) chains have in common."""
    runs: list[Run] = []
    todo = [(parent, chains, start)]
    while todo:
        above, group, depth = todo.pop()
        first = 0
        while first < len(group):
            if len(group[first]) == depth:  # ends here: its run is `above`
                first += 1
                continue
            last = first
            while last < len(group) and group[last][depth] == group[first][depth]:
                last += 1
            end = _common_length(group[first], group[last - 1], depth + 1)
            run = Run(model, tenant, above, group[first][depth:end], end, last - first)
            (runs if above is None else above.children).append(run)
            if last - first > 1:
                todo.append((run, group[first:last], end))
            first = last
    return runs


def _common_length(one: tuple[bytes, ...], other: tuple[bytes, ...], at_least: int) -> int:
    """How many leading hashes two chains share; of sorted ones the first and last tell for all."""
    low, high = at_least, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:  # a hash stands for all before it
            low = middle
        else:
            high = middle - 1
    return low


def _largest(roots: list[Run], max_nodes: int) -> list[Run]:
    """Best first, a child only after its parent."""
    kept: list[Run] = []
    heap = [(-root.num_requests, -root.depth, number, root) for number, root in enumerate(roots)]
    heapq.heapify(heap)
    number = len(heap)
    while heap and len(kept) < max_nodes:
        run = heapq.heappop(heap)[-1]
        kept.append(run)
        for child in run.children:
            number += 1
            heapq.heappush(heap, (-child.num_requests, -child.depth, number, child))
    return kept
