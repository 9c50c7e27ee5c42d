"""Sequences that wait for a row and blocks. Knows their order; decides nothing."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from .integrity import IntegrityError, check
from .request import Sequence, SequenceState

_Key = tuple[int, int, int, int]


def _key(sequence: Sequence) -> _Key:
    return (*sequence.request.queue_key, sequence.id)


class RequestQueue:
    """Ordered by class, priority and arrival; a preempted sequence comes back to its place."""

    def __init__(self) -> None:
        self._entries: list[tuple[_Key, Sequence]] = []
        self.num_tokens = 0  # known tokens still to be computed or found in the cache

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._entries)

    def peek(self) -> Sequence | None:
        """Whose turn it is."""
        return self._entries[0][1] if self._entries else None

    def add(self, sequence: Sequence) -> None:
        """Let it wait."""
        sequence.state = SequenceState.WAITING
        insort(self._entries, (_key(sequence), sequence), key=lambda entry: entry[0])
        self.num_tokens += sequence.num_uncomputed_tokens

    def remove(self, sequence: Sequence) -> None:
        """It has been admitted, or it ends."""
        place = bisect_left(self._entries, _key(sequence), key=lambda entry: entry[0])
        found = self._entries[place][1] if place < len(self._entries) else None
        assert found is sequence, f"{sequence} does not wait"
        del self._entries[place]
        self.num_tokens -= sequence.num_uncomputed_tokens

    def check_integrity(self) -> None:
        """Order and sums hold."""
        keys = [key for key, _ in self._entries]
        check(keys == sorted(keys), "the queue is out of order")
        total = sum(sequence.num_uncomputed_tokens for sequence in self)
        check(total == self.num_tokens, f"{total} tokens wait, {self.num_tokens} counted")
        for sequence in self:
            if sequence.state is not SequenceState.WAITING or sequence.row is not None:
                raise IntegrityError(f"{sequence} is in the queue, row {sequence.row}")
