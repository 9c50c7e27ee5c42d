"""Beam search over one request: which beams go on, and which hypotheses are the best.

Knows tokens and log-probabilities; no row and no block: the scheduler forks and drops rows as told.
Each step every beam offers its best tokens. Of all offers the best by accumulated score are
looked at, more than there are beams: those that end a sequence become hypotheses if they are
among the first `width`, the best `width` of the others go on. It ends when no running beam can
become better than the worst of `width` hypotheses, as far as the present length tells.
"""

from dataclasses import dataclass

from .output import BeamCandidates


@dataclass(frozen=True, slots=True)
class Continuation:
    """A running beam's next token. parent: its place among the beams of this step."""

    parent: int
    token: int
    score: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished output. score: sum of log-probabilities / length ** length_penalty."""

    score: float
    token_ids: tuple[int, ...]
    is_stopped: bool


class BeamSearch:
    """The beams of one request.

    ends: tokens that end a hypothesis. max_tokens: longest output.
    """

    def __init__(
        self, width: int, length_penalty: float, ends: frozenset[int], max_tokens: int
    ) -> None:
        self.width = width
        self._length_penalty = length_penalty
        self._ends = ends
        self._max_tokens = max_tokens
        self._scores = [0.0]
        self._outputs: list[tuple[int, ...]] = [()]
        self._hypotheses: list[Hypothesis] = []

    @property
    def num_beams(self) -> int:
        """Beams that run now."""
        return len(self._scores)

    def advance(self, offers: list[BeamCandidates]) -> list[Continuation]:
        """One step of all beams. Returns who goes on, best first; nobody = the search is over."""
        offered = self._best_offers(offers)
        length = len(self._outputs[0]) + 1
        is_last = length >= self._max_tokens
        going_on: list[Continuation] = []
        for rank, offer in enumerate(offered):
            is_stopped = offer.token in self._ends
            if is_stopped or is_last:
                if rank < self.width:
                    self._finish(offer, length, is_stopped)
            elif len(going_on) < self.width:
                going_on.append(offer)
        if is_last or not going_on or self._cannot_improve(going_on[0].score, length):
            return []
        self._outputs = [(*self._outputs[c.parent], c.token) for c in going_on]
        self._scores = [c.score for c in going_on]
        return going_on

    def drop(self, beam: int) -> None:
        """A beam cannot go on; the others do."""
        del self._outputs[beam], self._scores[beam]

    def best(self, count: int) -> list[Hypothesis]:
        """The best finished outputs, filled up with unfinished ones where there are too few."""
        running = [
            Hypothesis(self._normalise(score, len(output)), output, is_stopped=False)
            for score, output in zip(self._scores, self._outputs, strict=True)
        ]
        running.sort(key=lambda hypothesis: -hypothesis.score)
        finished = self._hypotheses
        return (finished + running)[:count] if len(finished) < count else finished[:count]

    def _best_offers(self, offers: list[BeamCandidates]) -> list[Continuation]:
        """The best of all beams' offers; equal scores go to the lower beam, then token."""
        offered = [
            Continuation(beam, token, self._scores[beam] + logprob)
            for beam, offer in enumerate(offers)
            for token, logprob in zip(
                offer.token_ids.tolist(), offer.logprobs.tolist(), strict=True
            )
        ]
        offered.sort(key=lambda offer: (-offer.score, offer.parent, offer.token))
        return offered[: len(offers[0].token_ids)]

    def _finish(self, offer: Continuation, length: int, is_stopped: bool) -> None:
        output = (*self._outputs[offer.parent], offer.token)
        score = self._normalise(offer.score, length)
        self._hypotheses.append(Hypothesis(score, output, is_stopped))
        self._hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self._hypotheses[self.width :]

    def _cannot_improve(self, best_running: float, length: int) -> bool:
        if len(self._hypotheses) < self.width:
            return False
        return self._normalise(best_running, length) <= self._hypotheses[-1].score

    def _normalise(self, score: float, length: int) -> float:
        return score / max(1, length) ** self._length_penalty
