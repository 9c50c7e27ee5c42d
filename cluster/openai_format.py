"""OpenAI-style answers out of the gateway's deltas: whole bodies and stream chunks.

Knows shapes only. What OpenAI has no word for stands under the key "pagefleet".
"""

from collections.abc import Sequence
from typing import Protocol

from ..protos.messages import FinishReason, TokenLogprobs
from .chat_reader import ChatReader
from .detokenizer import TokenPieces
from .generation import GenerationUsage, OutputDelta, best_tokens
from .live_generation import LiveGeneration
from .tool_calls import Tool, ToolCall

Json = dict[str, object]


class ShownTokens:
    """The tokens of one sample whose text may be shown by now, with their log-probabilities.

    A token whose text is withheld for a stop string would give it away, so it waits for its text;
    one that belongs to a stop string is never shown.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, TokenLogprobs]] = []
        self._shown = 0

    def push(self, delta: OutputDelta) -> list[tuple[int, TokenLogprobs]]:
        """(offset of its text's end, log-probabilities) of each token that can be shown now."""
        self._waiting.extend(zip(delta.text_ends, delta.logprobs, strict=False))
        self._shown += len(delta.text)
        count = 0
        while count < len(self._waiting) and self._waiting[count][0] <= self._shown:
            count += 1
        ready, self._waiting = self._waiting[:count], self._waiting[count:]
        return ready


class Choice(Protocol):
    """One sample on its way into an answer."""

    def whole(self, delta: OutputDelta) -> Json:
        """A complete choice, without its index."""
        ...

    def first(self) -> Json | None:
        """What its stream begins with, if anything."""
        ...

    def chunk(self, delta: OutputDelta) -> Json | None:
        """What a delta adds to its stream; None if nothing can be shown."""
        ...


class Format(Protocol):
    """How one endpoint writes its choices."""

    whole_object: str
    chunk_object: str

    def choice(self, generation: LiveGeneration) -> Choice:
        """A new one."""
        ...


class ChatFormat:
    """`/v1/chat/completions`. tools: what the model may call."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        self._tools = tools

    def choice(self, generation: LiveGeneration) -> Choice:
        """See Format."""
        return _ChatChoice(generation, ChatReader.of(generation, self._tools))


class _ChatChoice:
    def __init__(self, generation: LiveGeneration, reader: ChatReader) -> None:
        self._generation = generation
        self._reader = reader
        self._shown = ShownTokens()
        self._num_calls = 0

    def whole(self, delta: OutputDelta) -> Json:
        part = self._reader.read(delta.text, is_end=True)
        message: Json = {"role": "assistant", "content": part.content, "refusal": None}
        if part.calls:
            message["content"] = part.content or None
            message["tool_calls"] = self._calls(part.calls, with_index=False)
        if part.reasoning:
            message["reasoning_content"] = part.reasoning
        logprobs = self._logprobs(self._shown.push(delta))
        return {"message": message, "logprobs": logprobs} | self._finish(delta)

    def first(self) -> Json | None:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def chunk(self, delta: OutputDelta) -> Json | None:
        ready = self._shown.push(delta)
        part = self._reader.read(delta.text, is_end=delta.finish_reason is not None)
        added: Json = {}
        if part.reasoning:
            added["reasoning_content"] = part.reasoning
        if part.calls:
            added["tool_calls"] = self._calls(part.calls, with_index=True)
        if part.content or (ready and not added):
            added["content"] = part.content
        if not (added or delta.finish_reason):
            return None
        return {"delta": added, "logprobs": self._logprobs(ready)} | self._finish(delta)

    def _calls(self, calls: Sequence[ToolCall], *, with_index: bool) -> list[Json]:
        written: list[Json] = []
        for call in calls:
            function = {"name": call.name, "arguments": call.arguments}
            entry: Json = {"id": call.id, "type": "function", "function": function}
            written.append({"index": self._num_calls} | entry if with_index else entry)
            self._num_calls += 1
        return written

    def _finish(self, delta: OutputDelta) -> Json:
        if self._num_calls and delta.finish_reason is FinishReason.STOP:
            return {"finish_reason": "tool_calls"}
        return finish(delta.finish_reason)

    def _logprobs(self, ready: list[tuple[int, TokenLogprobs]]) -> Json | None:
        num_best = self._generation.sampling.logprobs
        if num_best is None:
            return None
        pieces = self._generation.model.tokenizer.pieces
        return {"content": token_logprobs(pieces, ready, num_best), "refusal": None}


def token_logprobs(
    pieces: TokenPieces, ready: Sequence[tuple[int, TokenLogprobs]], num_best: int
) -> list[Json]:
    """Each token with its log-probability and the best ones in its place."""
    content: list[Json] = []
    for _, entry in ready:
        best = [_token(pieces, i, logprob) for i, logprob in best_tokens(entry, num_best)]
        token = _token(pieces, entry.token_ids[0], entry.logprobs[0])
        content.append(token | {"top_logprobs": best})
    return content


class CompletionFormat:
    """`/v1/completions`."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, generation: LiveGeneration) -> Choice:
        """See Format."""
        return _CompletionChoice(generation)


class _CompletionChoice:
    def __init__(self, generation: LiveGeneration) -> None:
        self._generation = generation
        self._shown = ShownTokens()

    def whole(self, delta: OutputDelta) -> Json:
        logprobs = self._logprobs(self._shown.push(delta))
        return {"text": delta.text, "logprobs": logprobs} | finish(delta.finish_reason)

    def first(self) -> Json | None:
        return None

    def chunk(self, delta: OutputDelta) -> Json | None:
        ready = self._shown.push(delta)
        if not (delta.text or ready or delta.finish_reason):
            return None
        logprobs = self._logprobs(ready)
        return {"text": delta.text, "logprobs": logprobs} | finish(delta.finish_reason)

    def _logprobs(self, ready: list[tuple[int, TokenLogprobs]]) -> Json | None:
        num_best = self._generation.sampling.logprobs
        if num_best is None:
            return None
        pieces = self._generation.model.tokenizer.pieces
        tokens = [_text(pieces, entry.token_ids[0]) for _, entry in ready]
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprobs[0] for _, entry in ready],
            "top_logprobs": [
                {_text(pieces, i): logprob for i, logprob in best_tokens(entry, num_best)}
                for _, entry in ready
            ],
            "text_offset": [
                max(end - len(token), 0) for (end, _), token in zip(ready, tokens, strict=True)
            ],
        }


def finish(reason: FinishReason | None) -> Json:
    """A choice's `finish_reason`; OpenAI knows no other words than stop and length."""
    if reason is None or reason in (FinishReason.STOP, FinishReason.LENGTH):
        return {"finish_reason": None if reason is None else reason.value}
    return {"finish_reason": "length", "pagefleet": {"finish_reason": reason.value}}


def usage_body(usages: Sequence[GenerationUsage], num_samples: int) -> Json:
    """The usage of a whole request; prompts count once, however many samples they have."""
    prompt_tokens = sum(usage.prompt_tokens for usage in usages[::num_samples])
    cached_tokens = sum(usage.cached_tokens for usage in usages[::num_samples])
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def sample_details(
    generations: Sequence[LiveGeneration], usages: Sequence[GenerationUsage]
) -> Json:
    """What a client may want to know of how it was served."""
    return {
        "seeds": [generation.seed for generation in generations],
        "samples": [
            {
                "replica": usage.replica,
                "resumes": usage.resumes,
                "preemptions": usage.preemptions,
                "admission_s": usage.admission_s,
                "queued_s": usage.queued_s,
                "first_token_s": usage.first_token_s,
                "total_s": usage.total_s,
            }
            for usage in usages
        ],
    }


def envelope(kind: str, request_id: str, model: str, created: int) -> Json:
    """What every body and chunk begins with; all chunks of a stream with the same."""
    return {"id": request_id, "object": kind, "created": created, "model": model}


def _token(pieces: TokenPieces, token_id: int, logprob: float) -> Json:
    data = pieces.piece(token_id)
    return {"token": _text(pieces, token_id), "logprob": logprob, "bytes": list(data)}


def _text(pieces: TokenPieces, token_id: int) -> str:
    return pieces.piece(token_id).decode("utf-8", "replace")
