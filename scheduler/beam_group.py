"""The beams of one request as sequences: each offers tokens, then all go on, fork or end at once.

A beam that is preempted computes again like any sequence; one that has made its offer needs its
row only so that its children may share its blocks, and may lose it: they then find them in the
cache or compute them. Knows rows and blocks through the books; which beams go on is
`BeamSearch`'s choice.
"""

from typing import Protocol

import numpy as np

from .beam_search import BeamSearch, Continuation
from .books import Books
from .output import BeamCandidates, Int32Array
from .request import Request, Sequence


class SequenceLife(Protocol):
    """Makes and ends sequences, and tells the runner of rows that changed behind its back."""

    def new_beam(self, request: Request, token_ids: Int32Array) -> Sequence:
        """A sequence with these tokens, neither waiting nor running yet."""
        ...

    def drop(self, sequence: Sequence) -> None:
        """Take everything from a sequence."""
        ...

    def announce(self, row: int, is_known: bool) -> None:
        """Send the row anew with the next step. is_known: the runner has it already."""
        ...


class BeamGroup:
    """One request's beams, in the order in which `search` knows them."""

    def __init__(self, search: BeamSearch, first: Sequence) -> None:
        self.search = search
        self.sequences = [first]
        self._offers: dict[int, BeamCandidates] = {}

    def has_offered(self, sequence: Sequence) -> bool:
        """Whether it has done its part of this step."""
        return sequence.id in self._offers

    def offer(self, sequence: Sequence, candidates: BeamCandidates) -> None:
        """A beam has computed its last token."""
        self._offers[sequence.id] = candidates

    @property
    def is_complete(self) -> bool:
        """Whether every beam has offered."""
        return all(sequence.id in self._offers for sequence in self.sequences)

    def remove(self, sequence: Sequence) -> None:
        """One beam cannot go on."""
        place = self.sequences.index(sequence)
        del self.sequences[place]
        self._offers.pop(sequence.id, None)
        self.search.drop(place)

    def advance(self, books: Books, life: SequenceLife) -> bool:
        """Let the beams go on as the search decides. False: it is over, and nothing has changed."""
        continuations = self.search.advance([self._offers[s.id] for s in self.sequences])
        if not continuations:
            return False
        parents = self.sequences
        self.sequences = [
            self._child(books, life, parents[c.parent], c, c is self._last_of(continuations, c))
            for c in continuations
        ]
        for parent in parents:
            if parent not in self.sequences:
                life.drop(parent)
        self._offers.clear()
        return True

    @staticmethod
    def _last_of(continuations: list[Continuation], one: Continuation) -> Continuation:
        """The last child of the same parent: it takes the parent's place, the others fork."""
        return [other for other in continuations if other.parent == one.parent][-1]

    def _child(
        self,
        books: Books,
        life: SequenceLife,
        parent: Sequence,
        continuation: Continuation,
        takes_over: bool,
    ) -> Sequence:
        token = np.int32(continuation.token)
        row = parent.row
        if row is None:
            child = life.new_beam(parent.request, np.append(parent.token_ids, token))
            books.queue.add(child)
            return child
        batch = books.batch
        length = int(batch.num_tokens[row])
        if takes_over:
            batch.token_ids[row, length] = token
            batch.num_tokens[row] = length + 1
            life.announce(row, is_known=True)
            return parent
        child = life.new_beam(
            parent.request, np.append(batch.token_ids[row, :length], token).astype(np.int32)
        )
        if not batch.num_free:
            books.queue.add(child)
            return child
        child.admitted_s, child.cached_tokens = parent.admitted_s, parent.cached_tokens
        life.announce(books.manager.fork(row, child, length), is_known=False)
        return child
