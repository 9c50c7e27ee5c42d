"""OpenAI-style HTTP on the gateway: chats, completions, models, health.

    body ─► *_schema ─► GenerateCall ─► gateway ─► OutputDelta ─► *_format ─► client

Turns bodies into calls and errors of the tree into statuses; decides nothing. An error that comes
before the first token has its own status, a later one ends the stream with an error event.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.responses import Response

from ..protos.errors import InvalidArgument, ModelNotFound, PagefleetError
from ..protos.messages import TraceContext
from .access import Access, Caller
from .chat_schema import ChatBody
from .dashboard.pages import add_dashboard
from .gateway import Gateway
from .generation import GenerateCall, GenerationUsage, OutputDelta, Prompt, merge_deltas
from .http_errors import answer_errors, error_body, problem_of
from .http_streams import EventStream, JsonResponse, or_disconnect, read_body
from .live_generation import LiveGeneration
from .metrics import GatewayMetrics
from .model_catalog import ServedModel
from .openai_format import (
    ChatFormat,
    Choice,
    CompletionFormat,
    Format,
    Json,
    envelope,
    finish,
    sample_details,
    usage_body,
)
from .openai_schema import CompletionBody, RequestBody
from .responses_format import ResponseWriter
from .responses_schema import ResponsesBody

logger = logging.getLogger(__name__)

TENANT_HEADER = "x-pagefleet-tenant"
TIMEOUT_HEADER = "x-request-timeout-ms"
RETRY_TOKEN_HEADER = "retry-token"

_MAX_BODY_BYTES = 16 * 2**20

BodyT = TypeVar("BodyT", bound=RequestBody)


def make_app(gateway: Gateway, access: Access | None = None) -> FastAPI:
    """The application; run it in the gateway's loop."""
    app = FastAPI(title="pagefleet", docs_url=None, redoc_url=None, openapi_url=None)
    answer_errors(app, gateway.metrics)
    access = access or Access()
    endpoints = OpenAIEndpoints(gateway, access)
    app.add_api_route("/v1/chat/completions", endpoints.chat, methods=["POST"])
    app.add_api_route("/v1/completions", endpoints.complete, methods=["POST"])
    app.add_api_route("/v1/responses", endpoints.respond, methods=["POST"])
    app.add_api_route("/v1/models", endpoints.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", endpoints.model, methods=["GET"])
    app.add_api_route("/v1/embeddings", endpoints.embeddings, methods=["POST"])
    app.add_api_route("/metrics", endpoints.metrics, methods=["GET"])
    app.add_api_route("/health", endpoints.health, methods=["GET"])
    app.add_api_route("/ready", endpoints.ready, methods=["GET"])
    add_dashboard(app, gateway, access)
    return app


@dataclass(frozen=True, slots=True)
class _Answer:
    """The generations of one HTTP request, and how they are written."""

    request_id: str
    generations: Sequence[LiveGeneration]
    format: Format
    num_samples: int
    created: int

    def envelope(self, kind: str) -> Json:
        """What its body, or each of its chunks, begins with."""
        model = self.generations[0].model.card.model  # all have the same
        return envelope(kind, self.request_id, model, self.created)

    async def close(self) -> None:
        """Stop what still runs."""
        for generation in self.generations:
            await generation.aclose()


class OpenAIEndpoints:
    """One method per route."""

    def __init__(self, gateway: Gateway, access: Access) -> None:
        self._gateway = gateway
        self._access = access

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        caller = self._identify(request)
        body = await _parse(request, ChatBody)
        call = _call(request, caller, body, body.prompt, _name(request, body, "chatcmpl"))
        return await self._answer(request, body, [call], ChatFormat(body.offered))

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions"""
        caller = self._identify(request)
        body = await _parse(request, CompletionBody)
        name = _name(request, body, "cmpl")
        calls = [_call(request, caller, body, prompt, name) for prompt in body.prompts]
        return await self._answer(request, body, calls, CompletionFormat())

    async def respond(self, request: Request) -> Response:
        """POST /v1/responses"""
        caller = self._identify(request)
        body = await _parse(request, ResponsesBody)
        call = _call(request, caller, body, body.prompt, _name(request, body, "resp"))
        generation = await self._gateway.generate(call)
        writer = ResponseWriter(body, generation, call.request_id)
        is_handed_over = False
        try:
            if body.stream:
                events = _events(writer, generation, self._gateway.metrics)
                first = await or_disconnect(request.receive, anext(events))
                is_handed_over = True
                close = partial(_close_response, events, generation)
                return EventStream(_with_first(first, events), close, named=True)
            deltas = await or_disconnect(request.receive, _collect(generation))
            for delta in deltas:
                for _ in writer.push(delta):
                    pass
            return JsonResponse(writer.response)
        finally:
            if not is_handed_over:
                await generation.aclose()

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        self._identify(request)
        models = await self._gateway.models()
        return JsonResponse({"object": "list", "data": [_model(model) for model in models]})

    async def model(self, request: Request, name: str) -> Response:
        """GET /v1/models/{name}"""
        self._identify(request)
        models = await self._gateway.models()
        for model in models:
            if name == model.card.model or name in model.card.aliases:
                return JsonResponse(_model(model))
        raise ModelNotFound(name, tuple(model.card.model for model in models))

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings: no model here makes any."""
        self._identify(request)
        raise InvalidArgument("model", "the models served here generate text, not embeddings")

    async def metrics(self, request: Request) -> Response:
        """GET /metrics, for Prometheus."""
        self._identify(request).require_admin()
        return Response(await self._gateway.render_metrics(), media_type=CONTENT_TYPE_LATEST)

    async def health(self) -> Response:
        """GET /health: the process answers."""
        return JsonResponse({"status": "ok"})

    async def ready(self) -> Response:
        """GET /ready: some model can answer."""
        if not self._gateway.is_ready:
            return JsonResponse({"status": "no replica is ready"}, status_code=503)
        return JsonResponse({"status": "ready"})

    def _identify(self, request: Request) -> Caller:
        """Before the body is read: strangers send nothing here."""
        headers = request.headers
        return self._access.identify(
            headers.get("authorization", ""), headers.get(TENANT_HEADER, "")
        )

    async def _answer(
        self, request: Request, body: RequestBody, calls: list[GenerateCall], form: Format
    ) -> Response:
        generations: list[LiveGeneration] = []
        created = int(time.time())
        answer = _Answer(calls[0].request_id, generations, form, body.num_samples, created)
        is_handed_over = False
        try:
            for call in calls:
                generations.append(await self._gateway.generate(call))
            if body.stream:
                chunks = _chunks(answer, body.wants_usage_chunk, self._gateway.metrics)
                first = await or_disconnect(request.receive, anext(chunks))
                is_handed_over = True
                return EventStream(_with_first(first, chunks), partial(_close, chunks, answer))
            return JsonResponse(await or_disconnect(request.receive, _whole(answer)))
        finally:
            if not is_handed_over:
                await answer.close()


# -- requests --------------------------------------------------------------------------------


async def _parse(request: Request, kind: type[BodyT]) -> BodyT:
    data = await read_body(request, _MAX_BODY_BYTES)
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        problem = problem_of(error, data)
        request.state.names = {problem.field: problem.field}  # it is the client's own name already
        raise problem from None
    request.state.names = body.names
    body.refuse_unsupported()
    return body


def _name(request: Request, body: RequestBody, prefix: str) -> str:
    """One id for all prompts of a body, in its answer and in the answer's headers."""
    name = body.request_id or f"{prefix}-{secrets.token_hex(12)}"
    request.state.request_id = name
    return name


def _call(
    request: Request, caller: Caller, body: RequestBody, prompt: Prompt, request_id: str
) -> GenerateCall:
    assert isinstance(body, ChatBody | CompletionBody | ResponsesBody), (
        f"no endpoint takes {type(body)}"
    )
    headers = request.headers
    call = GenerateCall(
        prompt=prompt,
        model=body.model,
        sampling=body.sampling_params,
        cache_salt=body.cache_salt or "",
        admission_class=body.admission,
        priority=body.priority,
        request_id=request_id,
        deadline_s=_timeout_s(headers.get(TIMEOUT_HEADER)),
        retry_token=headers.get(RETRY_TOKEN_HEADER, ""),
        trace=_trace(headers),
    )
    return caller.own(call)


def _trace(headers: Headers) -> TraceContext:
    tracestate = ",".join(headers.getlist("tracestate"))  # it may come in parts
    return TraceContext(headers.get("traceparent", ""), tracestate)


def _timeout_s(header: str | None) -> float | None:
    if header is None:
        return None
    if not header.isascii() or not header.isdigit() or len(header) > 12:
        raise InvalidArgument(TIMEOUT_HEADER, "must be a number of milliseconds")
    return int(header) / 1000


# -- answers ---------------------------------------------------------------------------------


async def _whole(answer: _Answer) -> Json:
    """One body, when all is there."""
    deltas = await asyncio.gather(*(_collect(generation) for generation in answer.generations))
    choices: list[Json] = []
    usages: list[GenerationUsage] = []
    for generation, outputs in zip(answer.generations, deltas, strict=True):
        for output in outputs:
            choice = answer.format.choice(generation).whole(output)
            choices.append({"index": len(choices)} | choice)
            usages += [output.usage] if output.usage is not None else []
    body = answer.envelope(answer.format.whole_object)
    return body | {
        "choices": choices,
        "usage": usage_body(usages, answer.num_samples),
        "pagefleet": sample_details(answer.generations, usages),
    }


async def _collect(generation: LiveGeneration) -> list[OutputDelta]:
    return merge_deltas([delta async for batch in generation for delta in batch])


async def _chunks(
    answer: _Answer, wants_usage: bool, metrics: GatewayMetrics
) -> AsyncGenerator[object, None]:
    """The events of a stream. Only the first one raises: then no status has been sent."""
    usages: dict[int, GenerationUsage] = {}
    open_choices: dict[int, Choice] = {}
    is_first = True
    try:
        async for which, batch in _batches(answer.generations):
            for delta in merge_deltas(batch):
                index = which * answer.num_samples + delta.index
                if delta.usage is not None:
                    usages[index] = delta.usage
                generation = answer.generations[which]
                for choice in _choices(answer.format, generation, delta, index, open_choices):
                    yield _chunk(answer, [choice], wants_usage)
                    is_first = False
        if wants_usage:
            ordered = [usages[index] for index in sorted(usages)]
            usage = usage_body(ordered, answer.num_samples)
            details = sample_details(answer.generations, ordered)
            yield _chunk(answer, [], False) | {"usage": usage, "pagefleet": details}
        yield "[DONE]"
    except PagefleetError as error:
        if is_first:
            raise
        metrics.count_error("http", error)
        yield error_body(error)


def _choices(
    form: Format,
    generation: LiveGeneration,
    delta: OutputDelta,
    index: int,
    open_choices: dict[int, Choice],
) -> list[Json]:
    """What a delta adds to the stream of its choice."""
    choices: list[Json | None] = []
    if index not in open_choices:
        open_choices[index] = form.choice(generation)
        choices.append(open_choices[index].first())
    choices.append(open_choices[index].chunk(delta))
    no_reason = finish(None)
    return [{"index": index} | no_reason | choice for choice in choices if choice is not None]


def _chunk(answer: _Answer, choices: list[Json], wants_usage: bool) -> Json:
    chunk = answer.envelope(answer.format.chunk_object)
    chunk["choices"] = choices
    if wants_usage:
        chunk["usage"] = None  # OpenAI's chunks have the key, empty, when usage was asked for
    return chunk


async def _batches(
    generations: Sequence[LiveGeneration],
) -> AsyncIterator[tuple[int, list[OutputDelta]]]:
    """The batches of all generations as they come, each with its generation's number."""
    queue: asyncio.Queue[tuple[int, list[OutputDelta]] | PagefleetError | None] = asyncio.Queue()

    async def read(which: int, generation: LiveGeneration) -> None:
        try:
            async for batch in generation:
                queue.put_nowait((which, batch))
            queue.put_nowait(None)
        except PagefleetError as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(read(i, generation)) for i, generation in enumerate(generations)]
    num_open = len(tasks)
    try:
        while num_open:
            item = await queue.get()
            if isinstance(item, PagefleetError):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()


async def _events(
    writer: ResponseWriter, generation: LiveGeneration, metrics: GatewayMetrics
) -> AsyncGenerator[object, None]:
    """The events of a response. Errors before the first token are raised: they have a status."""
    is_first = True
    try:
        async for batch in generation:
            if is_first:
                for event in writer.begin():
                    yield event
                is_first = False
            for delta in merge_deltas(batch):
                for event in writer.push(delta):
                    yield event
    except PagefleetError as error:
        if is_first:
            raise
        metrics.count_error("http", error)
        for event in writer.fail(error):
            yield event


async def _close_response(events: AsyncGenerator[object, None], generation: LiveGeneration) -> None:
    await events.aclose()
    await generation.aclose()


async def _close(chunks: AsyncGenerator[object, None], answer: _Answer) -> None:
    await chunks.aclose()
    await answer.close()


async def _with_first(first: object, rest: AsyncIterator[object]) -> AsyncIterator[object]:
    yield first
    async for item in rest:
        yield item


def _model(model: ServedModel) -> Json:
    card = model.card
    return {
        "id": card.model,
        "object": "model",
        "created": 0,
        "owned_by": "pagefleet",
        "max_model_len": card.max_context,
    }
