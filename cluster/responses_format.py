"""The answers of `/v1/responses`: one object, or the events that build it.

    response.created, in_progress ─► per item: added, deltas, done ─► completed, incomplete, failed

An item is a message, a function call, or the model's reasoning. Knows shapes only.
"""

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from ..protos.errors import PagefleetError
from ..protos.messages import FinishReason, TokenLogprobs
from .chat_reader import ChatPart, ChatReader
from .generation import GenerationUsage, OutputDelta
from .http_errors import error_body
from .live_generation import LiveGeneration
from .openai_format import Json, ShownTokens, sample_details, token_logprobs, usage_body
from .responses_schema import ResponsesBody
from .tool_calls import ToolCall


@dataclass(slots=True)
class _OpenText:
    """An item that grows: the message, or the reasoning."""

    id: str
    index: int
    kind: str  # of its part: output_text or reasoning_text
    text: str = ""
    logprobs: list[Json] = field(default_factory=list[Json])

    @property
    def part(self) -> Json:
        """Its only part, as far as it has come."""
        if self.kind == "reasoning_text":
            return {"type": self.kind, "text": self.text}
        return {
            "type": self.kind,
            "text": self.text,
            "annotations": [],
            "logprobs": self.logprobs,
        }

    def item(self, status: str) -> Json:
        """The whole item."""
        content = [self.part] if status != "in_progress" else []
        if self.kind == "reasoning_text":
            return {
                "id": self.id,
                "type": "reasoning",
                "summary": [],
                "content": content,
                "status": status,
            }
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "status": status,
        }


class ResponseWriter:
    """Writes one response from its deltas; every event and the whole come from here."""

    def __init__(self, body: ResponsesBody, generation: LiveGeneration, response_id: str) -> None:
        self._body = body
        self._generation = generation
        self._id = response_id
        self._created_at = int(time.time())
        self._reader = ChatReader.of(generation, body.offered)
        self._shown = ShownTokens()
        self._items: list[Json] = []
        self._open: _OpenText | None = None
        self._usage: GenerationUsage | None = None
        self._reason: FinishReason | None = None
        self._sequence_number = 0
        self._thoughts = ""
        self._num_reasoning_tokens = 0

    def begin(self) -> Iterator[Json]:
        """The events before anything is there."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def push(self, delta: OutputDelta) -> Iterator[Json]:
        """The events of what a delta brings."""
        is_end = delta.finish_reason is not None
        part = self._reader.read(delta.text, is_end=is_end)
        ready = self._shown.push(delta)
        yield from self._push_part(part, ready)
        if is_end:
            self._reason, self._usage = delta.finish_reason, delta.usage
            yield from self._close()
            self._count_reasoning()
            kind = "response.completed" if self._is_complete else "response.incomplete"
            yield self._event(kind, response=self.response)

    def fail(self, error: PagefleetError) -> Iterator[Json]:
        """The events of an error after the first one: what it was, and how the response ends."""
        problem = cast(Json, error_body(error)["error"])
        message = problem["message"]
        yield self._event("error", code=problem["code"], message=message, param=problem["param"])
        code = "rate_limit_exceeded" if error.http_status == 429 else "server_error"
        failed = self._response("failed") | {"error": {"code": code, "message": message}}
        yield self._event("response.failed", response=failed)

    @property
    def response(self) -> Json:
        """The whole object, once the last delta was pushed."""
        return self._response("completed" if self._is_complete else "incomplete")

    @property
    def _is_complete(self) -> bool:
        return self._reason is FinishReason.STOP

    # -- items -------------------------------------------------------------------------------

    def _push_part(
        self, part: ChatPart, ready: Sequence[tuple[int, TokenLogprobs]]
    ) -> Iterator[Json]:
        if part.reasoning:
            self._thoughts += part.reasoning
            yield from self._grow("reasoning_text", part.reasoning, ())
        if part.content:
            yield from self._grow("output_text", part.content, ready)
        elif self._open is not None and self._open.kind == "output_text":
            self._open.logprobs += self._logprobs(ready)  # of what ends the text
        for call in part.calls:
            yield from self._close()
            yield from self._add_call(call)

    def _grow(
        self, kind: str, text: str, ready: Sequence[tuple[int, TokenLogprobs]]
    ) -> Iterator[Json]:
        if self._open is None or self._open.kind != kind:
            yield from self._close()
            prefix = "msg" if kind == "output_text" else "rs"
            self._open = _OpenText(_new_id(prefix), len(self._items), kind)
            item = self._open.item("in_progress")
            yield self._event(
                "response.output_item.added", output_index=self._open.index, item=item
            )
            yield self._part_event("response.content_part.added", part=self._open.part)
        self._open.text += text
        logprobs = self._logprobs(ready)
        self._open.logprobs += logprobs
        extra: Json = {"logprobs": logprobs} if kind == "output_text" else {}
        yield self._part_event(f"response.{kind}.delta", delta=text, **extra)

    def _close(self) -> Iterator[Json]:
        """End the item that grows, if there is one."""
        if self._open is None:
            return
        item = self._open
        extra: Json = {"logprobs": item.logprobs} if item.kind == "output_text" else {}
        yield self._part_event(f"response.{item.kind}.done", text=item.text, **extra)
        yield self._part_event("response.content_part.done", part=item.part)
        is_cut = self._reason not in (None, FinishReason.STOP)
        done = item.item("incomplete" if is_cut else "completed")
        self._items.append(done)
        self._open = None
        yield self._event("response.output_item.done", output_index=item.index, item=done)

    def _add_call(self, call: ToolCall) -> Iterator[Json]:
        index, item_id = len(self._items), _new_id("fc")
        item: Json = {
            "id": item_id,
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        yield self._event("response.output_item.added", output_index=index, item=item)
        place: Json = {"item_id": item_id, "output_index": index}
        kind = "response.function_call_arguments"
        yield self._event(f"{kind}.delta", delta=call.arguments, **place)
        done = item | {"arguments": call.arguments, "status": "completed"}
        self._items.append(done)
        yield self._event(f"{kind}.done", arguments=call.arguments, name=call.name, **place)
        yield self._event("response.output_item.done", output_index=index, item=done)

    def _count_reasoning(self) -> None:
        """As its text would be tokenized: tags and line breaks apart, that is what it took."""
        encode = self._generation.model.tokenizer.encode
        self._num_reasoning_tokens = len(encode(self._thoughts, add_special_tokens=False))

    # -- shapes ------------------------------------------------------------------------------

    def _logprobs(self, ready: Sequence[tuple[int, TokenLogprobs]]) -> list[Json]:
        num_best = self._generation.sampling.logprobs
        if num_best is None:
            return []
        return token_logprobs(self._generation.model.tokenizer.pieces, ready, num_best)

    def _event(self, kind: str, **fields: object) -> Json:
        self._sequence_number += 1
        return {"type": kind, "sequence_number": self._sequence_number - 1} | fields

    def _part_event(self, kind: str, **fields: object) -> Json:
        assert self._open is not None, f"{kind} without an item"
        place = {"item_id": self._open.id, "output_index": self._open.index, "content_index": 0}
        return self._event(kind, **place, **fields)

    def _response(self, status: str) -> Json:
        body, usage = self._body, self._usage
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        output = [*self._items, *([] if self._open is None else [self._open.item("incomplete")])]
        response: Json = {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "model": self._generation.model.card.model,
            "output": output,
            "error": None,
            "incomplete_details": details,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "tool_choice": _as_sent(body, "tool_choice") or "auto",
            "tools": _as_sent(body, "tools") or [],
            "text": _as_sent(body, "text") or {"format": {"type": "text"}},
            "reasoning": _as_sent(body, "reasoning"),
            "max_output_tokens": body.max_output_tokens,
            "previous_response_id": None,
            "store": False,
            "usage": None if usage is None else _usage(usage, self._num_reasoning_tokens),
        }
        if usage is not None:
            response["pagefleet"] = sample_details([self._generation], [usage])
        return response


def _as_sent(body: ResponsesBody, name: str) -> object:
    return body.model_dump(include={name}, by_alias=True, exclude_none=True).get(name)


def _usage(usage: GenerationUsage, num_reasoning_tokens: int) -> Json:
    counted = usage_body([usage], 1)
    written = usage.prompt_tokens - usage.cached_tokens  # what was not there yet
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": written,
        },
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": counted["total_tokens"],
    }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
