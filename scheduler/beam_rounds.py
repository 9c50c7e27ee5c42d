"""Rounds of beam search: every beam of a request offers, then the request goes on or ends.

A beam that has offered and lost its row waits for its siblings. Which beams go on is `BeamSearch`'s
choice, how they fork `BeamGroup`'s.
"""

from typing import Protocol

from ..protos.messages import FinishReason
from .beam_group import BeamGroup, SequenceLife
from .beam_search import BeamSearch
from .books import Books
from .outbox import Outbox
from .output import ModelRunnerOutput
from .request import Request, Sequence, SequenceState
from .step_plan import StepRecord


class BeamLife(SequenceLife, Protocol):
    """What beams need of the life of requests."""

    sequences: dict[int, Sequence]

    def vacate(self, sequence: Sequence) -> None:
        """Take blocks and row."""
        ...

    def forget(self, request: Request) -> None:
        """The request is over."""
        ...


class BeamRounds:
    """Takes offers in, and tells the hypotheses at the end."""

    def __init__(self, books: Books, outbox: Outbox, life: BeamLife) -> None:
        self._books = books
        self._batch = books.batch
        self._queue = books.queue
        self._outbox = outbox
        self._life = life
        self._groups: dict[str, BeamGroup] = {}  # by the request's key

    def begin(self, request: Request, search: BeamSearch, first: Sequence) -> None:
        """A request comes, so far with one beam."""
        self._groups[request.key] = BeamGroup(search, first)

    def has_offered(self, sequence: Sequence) -> bool:
        """Whether it is a beam that has done its part of this step."""
        group = self._groups.get(sequence.request.key)
        return group is not None and group.has_offered(sequence)

    def forget(self, request: Request) -> None:
        """The request is over, whatever it was."""
        self._groups.pop(request.key, None)

    def take_offers(self, record: StepRecord, result: ModelRunnerOutput, now: float) -> None:
        """What the beams of this step offer; a request whose beams all have goes on."""
        complete: dict[str, Request] = {}
        for place, candidates in result.beam_candidates.items():
            sequence = self._life.sequences.get(int(record.sample_ids[place]))
            if sequence is None:
                continue
            row = sequence.row
            known = len(sequence.token_ids) if row is None else self._batch.num_known(row)
            if record.ends[record.output.sample_entries[place]] != known:
                continue  # computed twice, and the search has gone on with the first
            if sequence.first_token_s is None:
                sequence.first_token_s = now
            self._groups[sequence.request.key].offer(sequence, candidates)
            if row is None or self._batch.num_computed[row] < known:
                self.park(sequence)  # preempted meanwhile; its part is done
            complete[sequence.request.key] = sequence.request
        for request in complete.values():
            self._advance(request, now)

    def park(self, sequence: Sequence) -> None:
        """A beam that has offered and lost its KV waits for its siblings, not for blocks."""
        if sequence.row is None:
            self._queue.remove(sequence)
            self._books.tier.drop(sequence)
        else:
            self._life.vacate(sequence)
        sequence.state = SequenceState.HELD

    def finish(
        self, request: Request, reason: FinishReason | None, now: float, error: str = ""
    ) -> None:
        """Tell the best hypotheses and forget the request. reason: None = the search is over."""
        count = max(1, request.sampling.n)
        hypotheses = self._groups[request.key].search.best(count)
        usage = request.sequences[0]
        for index in range(count):
            found = hypotheses[index] if index < len(hypotheses) else None
            self._outbox.tell_hypothesis(usage, index, found, reason, error, now)
        for sequence in request.sequences:
            if sequence.state is not SequenceState.FINISHED:
                self._life.drop(sequence)
        self._life.forget(request)

    def lose(self, sequence: Sequence, now: float) -> None:
        """A beam alone outgrew the pool: the others go on without it."""
        request = sequence.request
        group = self._groups[request.key]
        if len(group.sequences) == 1:
            self.finish(request, FinishReason.KV_EXHAUSTED, now)
            return
        group.remove(sequence)
        self._life.drop(sequence)
        request.sequences = list(group.sequences)
        self._advance(request, now)

    def _advance(self, request: Request, now: float) -> None:
        group = self._groups[request.key]
        if not group.is_complete:
            return
        if not group.advance(self._books, self._life):
            self.finish(request, None, now)
            return
        request.sequences = list(group.sequences)
        self._books.leases.settle(request)
