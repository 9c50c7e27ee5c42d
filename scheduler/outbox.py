"""What clients are to be told and have not been yet. Knows no blocks."""

from ..protos.messages import FinishReason, SequenceDelta, TokenLogprobs
from .beam_search import Hypothesis
from .request import Sequence
from .running_batch import RunningBatch


class Outbox:
    """Deltas in the order in which they came about."""

    def __init__(self) -> None:
        self._deltas: list[SequenceDelta] = []

    def take(self) -> list[SequenceDelta]:
        """All of them, once."""
        deltas = self._deltas
        self._deltas = []
        return deltas

    def tell_tokens(
        self, batch: RunningBatch, rows: list[int], tokens: list[int], numbers: list[int]
    ) -> None:
        """One more plain token for each of `rows`; number: its place in the row's output.

        All of a decode step in one pass: this is most of what such a step costs.
        """
        assert len(rows) == len(tokens) == len(numbers), "each row has one token and its place"
        keys = [batch.keys[row] for row in rows]
        indexes = [batch.indexes[row] for row in rows]
        self._deltas += map(SequenceDelta, keys, indexes, numbers, zip(tokens, strict=False))

    def tell(
        self,
        sequence: Sequence,
        tokens: tuple[int, ...],
        number: int,
        logprobs: tuple[TokenLogprobs, ...],
        reason: FinishReason | None,
        now: float,
    ) -> None:
        """More tokens, the first the output's `number`-th counted from 0, and the end if the
        last is that."""
        self._deltas.append(
            SequenceDelta(
                request_key=sequence.request.key,
                index=sequence.index,
                first_position=number,
                token_ids=tokens,
                logprobs=logprobs,
                prompt_logprobs=_take_prompt_logprobs(sequence),
                finish_reason=reason,
                usage=None if reason is None else sequence.usage(number + len(tokens), now),
            )
        )

    def tell_end(
        self,
        sequence: Sequence,
        num_output_tokens: int,
        reason: FinishReason,
        error: str,
        now: float,
    ) -> None:
        """The end without a token."""
        self._deltas.append(
            SequenceDelta(
                request_key=sequence.request.key,
                index=sequence.index,
                first_position=num_output_tokens,
                prompt_logprobs=_take_prompt_logprobs(sequence),
                finish_reason=reason,
                usage=sequence.usage(num_output_tokens, now),
                error=error,
            )
        )

    def tell_hypothesis(
        self,
        sequence: Sequence,
        index: int,
        hypothesis: Hypothesis | None,
        reason: FinishReason | None,
        error: str,
        now: float,
    ) -> None:
        """One of a beam search's results, whole. reason: None = as the hypothesis ended."""
        token_ids = () if hypothesis is None else hypothesis.token_ids
        if reason is None:
            is_stopped = hypothesis is not None and hypothesis.is_stopped
            reason = FinishReason.STOP if is_stopped else FinishReason.LENGTH
        self._deltas.append(
            SequenceDelta(
                request_key=sequence.request.key,
                index=index,
                first_position=0,
                token_ids=token_ids,
                prompt_logprobs=_take_prompt_logprobs(sequence) if index == 0 else (),
                finish_reason=reason,
                usage=sequence.usage(len(token_ids), now),
                error=error,
                score=None if hypothesis is None else hypothesis.score,
            )
        )

    def forget(self, request_key: str, index: int | None = None) -> None:
        """Nothing of this request, or of this sample, is to be told any more."""
        self._deltas[:] = [
            delta
            for delta in self._deltas
            if delta.request_key != request_key or index not in (None, delta.index)
        ]


def _take_prompt_logprobs(sequence: Sequence) -> tuple[TokenLogprobs | None, ...]:
    """All of them, once, with the first delta of the first sample."""
    if not sequence.owes_prompt_logprobs:
        return ()
    sequence.owes_prompt_logprobs = False
    entries = tuple(sequence.prompt_logprobs)
    sequence.prompt_logprobs.clear()
    return entries
