"""One sample's way from the engine's tokens to the client's text.

Keeps every token it has accepted, so that a sample can go on at another replica, and proves by
positions that none is missing or doubled. Its text is a function of the tokens alone: however
they arrive, and wherever they were computed, the same text is shown at the same token.
"""

from dataclasses import dataclass

from ..protos.messages import FinishReason, SamplingParams, SequenceDelta, TokenLogprobs, Usage
from .detokenizer import IncrementalDetokenizer, TokenPieces
from .stop_strings import StopStrings


class TokensMissing(Exception):
    """The engine's delta begins behind what was received: some tokens were lost on the way."""


@dataclass(frozen=True, slots=True)
class AcceptedTokens:
    """What a delta added: see `generation.OutputDelta` for the fields."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    text_ends: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


class SampleStream:
    """The state of one sample at the gateway.

    max_output_tokens: what `max_tokens` and the context allow.
    finish_reason: set once its text is complete. usage: the engine's count, once it has come.
    has_ended: its last delta was handed on.
    """

    def __init__(
        self,
        index: int,
        pieces: TokenPieces,
        sampling: SamplingParams,
        eos_token_ids: tuple[int, ...],
        max_output_tokens: int,
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.usage: Usage | None = None
        self.first_token_at: float | None = None
        self.has_ended = False
        self._sampling = sampling
        self._max_output_tokens = max_output_tokens
        self._ends = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self._ends |= frozenset(eos_token_ids)
        self._detokenizer = IncrementalDetokenizer(
            pieces, skip_special_tokens=sampling.skip_special_tokens
        )
        self._stops = StopStrings(sampling.stop)
        self._text_length = 0

    @property
    def stopped_by_text(self) -> bool:
        """A stop string was found; the engine does not know until it is told."""
        return self._stops.stopped

    def resume(self, token_ids: tuple[int, ...]) -> None:
        """Take tokens that the client has already; nothing of their text is shown again."""
        self._take(token_ids)
        if self.finish_reason is None:
            self._close_if_complete()

    def accept(self, delta: SequenceDelta) -> AcceptedTokens:
        """Add the new tokens of a delta; those received before are skipped."""
        if self.finish_reason is not None:
            # it ended by its text; the engine had computed further and now says what it counted
            self.usage = delta.usage
            return AcceptedTokens()
        num_known = len(self.token_ids) - delta.first_position
        if num_known < 0:
            raise TokensMissing(f"sample {self.index}: {-num_known} tokens before {delta}")
        token_ids = delta.token_ids[num_known:]
        text, ends = self._take(token_ids)
        if delta.finish_reason is not None:
            self.usage = delta.usage
            if self.finish_reason is None:
                self.finish_reason = delta.finish_reason
                text += self._flush()
        logprobs = delta.logprobs[num_known:]
        return AcceptedTokens(token_ids[: len(ends)], text, ends, logprobs[: len(ends)])

    def end_without_engine(self) -> str:
        """Close a sample whose replica was lost after its last token; the rest of its text."""
        self._close_if_complete()
        return self._flush() if self.finish_reason is not None else ""

    def _take(self, token_ids: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """Tokens up to the end of the text: what of it can be shown, and where each ends."""
        shown: list[str] = []
        ends: list[int] = []
        for token_id in token_ids:
            if self.finish_reason is not None:
                break
            self.token_ids.append(token_id)
            text = self._text_of(token_id)
            self._text_length += len(text)
            ends.append(self._text_length)
            # stop strings count only behind min_tokens, as stop tokens do
            watched = len(self.token_ids) > self._sampling.min_tokens
            shown.append(self._stops.push(text) if watched else text)
            if self._stops.stopped:
                self.finish_reason = FinishReason.STOP
        return "".join(shown), tuple(ends)

    def _text_of(self, token_id: int) -> str:
        if token_id in self._ends and self._sampling.skip_special_tokens:
            return ""  # what ends the text is no part of it
        return self._detokenizer.push(token_id)

    def _flush(self) -> str:
        if self._stops.stopped:
            return ""
        text = self._stops.push(self._detokenizer.flush())
        return text if self._stops.stopped else text + self._stops.flush()

    def _close_if_complete(self) -> None:
        """What the engine would say behind the tokens it has already sent."""
        num_tokens = len(self.token_ids)
        if num_tokens == 0:
            return
        if self.token_ids[-1] in self._ends and num_tokens > self._sampling.min_tokens:
            self.finish_reason = FinishReason.STOP
        elif num_tokens >= self._max_output_tokens:
            self.finish_reason = FinishReason.LENGTH
