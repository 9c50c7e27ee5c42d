"""The gateway: what both fronts, gRPC and HTTP, stand on.

    front ─ GenerateCall ─► PreparedCall ─► GenerationRun ─► LiveGeneration ─ OutputDelta ─► front

Knows models, limits and who may cancel what; nothing of protobuf or HTTP. Every call ends in one
of three ways: all its samples ended, one error of the tree, or its client stopped listening.
"""

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..protos.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    PagefleetError,
)
from ..protos.messages import CacheReset, ClusterState, Explanation, Refused, SamplingParams
from ..workers.tracing import Span, Tracing
from .cluster_watch import ClusterUpdate, ClusterWatch
from .config import HUB_ID
from .controller_client import ControllerClient
from .draining import DRAIN_S, LAST_DRAIN_S
from .engine_client import ChannelFactory, EngineClient, insecure_channel
from .gateway_spec import OnDemand
from .generation import ChatPrompt, GenerateCall, TextPrompt, TokenPrompt
from .generation_run import Clock, Emit, GenerationRun, RetryPolicy
from .grammar import check_grammar
from .live_generation import LiveGeneration
from .metrics import GatewayMetrics, RequestMeter
from .model_catalog import LoadTokenizer, ModelCatalog, ServedModel
from .prepared_call import PreparedCall
from .quotas import Quotas
from .request_books import RequestBooks
from .reservations import Reservations, error_of
from .tokenizer import Tokenizer
from .tool_calls import forced_grammar
from .validation import RequestLimits, check_call, check_for_model, check_token_ids

logger = logging.getLogger(__name__)

MAX_DRAIN_S = 86_400.0  # a day
_SCRAPE_TIMEOUT_S = 2.0
_PROMPT_FIELDS = {TextPrompt: "text", TokenPrompt: "token_ids", ChatPrompt: "chat.messages"}


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as its model reads it."""

    model: ServedModel
    token_ids: Sequence[int]


class Gateway:
    """One gateway process. `start` it in the loop that its fronts run in."""

    def __init__(
        self,
        gateway_id: str,
        controller: ControllerClient,
        *,
        limits: RequestLimits | None = None,
        retry: RetryPolicy | None = None,
        load_tokenizer: LoadTokenizer = Tokenizer.load,
        make_channel: ChannelFactory = insecure_channel,
        clock: Clock = time.monotonic,
        tracing: Tracing | None = None,
        on_demand: OnDemand | None = None,
    ) -> None:
        self._tracing = tracing
        self.gateway_id = gateway_id
        self._controller = controller
        self.limits = limits or RequestLimits()
        self._retry = retry or RetryPolicy()
        self._clock = clock
        self._models = ModelCatalog(controller, load_tokenizer, clock, on_demand)
        self._reservations = Reservations(controller, gateway_id, clock=clock, models=self._models)
        self._engines = EngineClient(gateway_id, make_channel)
        self.metrics = GatewayMetrics()
        self._watch = ClusterWatch(controller, self.metrics.recent, clock)
        self._quotas = Quotas(clock)
        self._running: dict[tuple[str, str], set[LiveGeneration]] = {}
        self._counter = itertools.count()
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    # -- lifecycle ---------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to take grants and to follow the models."""
        loops = (self._reservations.run(), self._models.run())
        self._tasks = tuple(asyncio.create_task(loop) for loop in loops)

    async def close(self) -> None:
        """End what still runs, and every stream to a leader."""
        for generation in self._generations():
            await generation.aclose()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._reservations.drain()
        await self._engines.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    @property
    def is_ready(self) -> bool:
        """Some model has a replica, or would once somebody asks."""
        return self._models.is_ready

    @property
    def held(self) -> dict[str, int]:
        """Requests by model that wait for its first replica, unknown to the controller."""
        return self._models.held

    @property
    def num_running(self) -> int:
        """Requests that have not ended."""
        return len(self._generations())

    # -- calls -------------------------------------------------------------------------------

    async def generate(self, call: GenerateCall) -> LiveGeneration:
        """Check and begin; errors that need no replica are raised here."""
        span = None
        if self._tracing is not None:
            span = self._tracing.start("gateway.generate", trace=call.trace)
        try:
            generation = LiveGeneration(await self._prepare(call))
            generation.books = self._open_books(generation.prepared, span)
        except BaseException as error:
            if span is not None:
                span.fail(str(error) or type(error).__name__)
            raise
        run = self._make_run(generation.prepared, generation.put, span)
        generation.start(self._supervise(generation, run))
        return generation

    async def explain(self, call: GenerateCall) -> tuple[PreparedCall, Explanation]:
        """What would happen to the call now; it is not begun."""
        prepared = await self._prepare(call)
        run = self._make_run(prepared, emit=lambda deltas: None, span=None)
        answer = await self._controller.explain(run.reserve_request())
        if isinstance(answer, Refused):
            raise error_of(answer)
        return prepared, answer

    async def _prepare(self, call: GenerateCall) -> PreparedCall:
        """Everything that is wrong with a call is found here."""
        arrived = self._clock()
        check_call(call, self.limits)
        await check_grammar(call.sampling.grammar)
        try:
            async with asyncio.timeout(call.deadline_s):
                prompt = await self.tokenize(call.model, call.prompt)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while the prompt was tokenized") from None
        model, field = prompt.model, _PROMPT_FIELDS[type(call.prompt)]
        check_for_model(call, prompt.token_ids, model.card, field)
        sampling = await _with_forced_call(call, model)
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(64))
        return PreparedCall(
            call,
            model,
            prompt.token_ids,
            sampling,
            request_id=call.request_id or f"req-{secrets.token_hex(12)}",
            request_key=f"{self.gateway_id}-{next(self._counter)}",
            arrived=arrived,
            deadline=None if call.deadline_s is None else arrived + call.deadline_s,
        )

    async def tokenize(
        self, model_name: str, prompt: TextPrompt | TokenPrompt | ChatPrompt
    ) -> TokenizedPrompt:
        """A prompt's token ids; those of a `TokenPrompt` are not checked here."""
        model = await self._models.resolve(model_name)
        if isinstance(prompt, TokenPrompt):
            return TokenizedPrompt(model, prompt.token_ids)
        token_ids = await model.tokenizer.tokenize(prompt, model.card.max_context)
        return TokenizedPrompt(model, token_ids)

    async def detokenize(
        self, model_name: str, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> tuple[ServedModel, str]:
        """The text of token ids."""
        model = await self._models.resolve(model_name)
        if len(token_ids) > model.card.max_context:  # decoding holds up everyone else
            raise InvalidArgument("token_ids", f"more than {model.card.max_context}, the context")
        check_token_ids("token_ids", token_ids, model.card)
        decode = model.tokenizer.decode
        return model, decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def models(self) -> tuple[ServedModel, ...]:
        """Every model that has a replica."""
        return await self._models.all()

    async def cluster_state(self) -> ClusterState:
        """The controller's view."""
        return await self._controller.cluster_state()

    def watch_cluster(self, period_s: float) -> AsyncGenerator[ClusterUpdate]:
        """The controller's view as it changes; read-only, for whoever may see the whole cluster."""
        return self._watch.updates(period_s)

    def end_watches(self) -> None:
        """Whoever watches the cluster here has to go elsewhere."""
        self._watch.close()

    async def render_metrics(self) -> bytes:
        """Prometheus' text; without the cluster's figures if the controller is away."""
        try:
            async with asyncio.timeout(_SCRAPE_TIMEOUT_S):
                state = await self._controller.cluster_state()
        except (PagefleetError, TimeoutError):
            state = None
        return self.metrics.render(state)

    async def drain(self, replica_id: str, drain_s: float = DRAIN_S) -> None:
        """Take a replica out of the cluster; raises InvalidArgument where there is none."""
        if not 0.0 <= drain_s <= MAX_DRAIN_S:
            raise InvalidArgument("drain_s", f"must be from 0 to {MAX_DRAIN_S:g}")
        if not await self._controller.drain(replica_id, True, drain_s):
            raise InvalidArgument("replica_id", f"there is no replica {replica_id!r}")

    async def reset_prefix_cache(self, model: str) -> tuple[CacheReset, ...]:
        """Forget every cached prefix, of one model or of all; raises ModelNotFound."""
        return await self._controller.reset_prefix_cache(model)

    async def update_weights(
        self, model: str, checkpoint: str, drain_s: float = LAST_DRAIN_S
    ) -> int:
        """New weights for a model; raises ModelNotFound, and InvalidArgument for no checkpoint."""
        if not 0.0 <= drain_s <= MAX_DRAIN_S:
            raise InvalidArgument("drain_s", f"must be from 0 to {MAX_DRAIN_S:g}")
        card = (await self._models.resolve(model)).card
        checked = await asyncio.to_thread(_check_checkpoint, checkpoint)
        return await self._controller.update_weights(card.model, checked, drain_s)

    def cancel(self, tenant: str, request_id: str) -> int:
        """End the tenant's requests of that id; how many there were."""
        found = self._running.get((tenant, request_id), set())
        for generation in found:
            generation.cancel()
        return len(found)

    # -- one generation ----------------------------------------------------------------------

    def _make_run(self, prepared: PreparedCall, emit: Emit, span: Span | None) -> GenerationRun:
        return GenerationRun(
            prepared,
            gateway_id=self.gateway_id,
            reservations=self._reservations,
            engines=self._engines,
            emit=emit,
            clock=self._clock,
            retry=self._retry,
            span=span,
        )

    def _open_books(self, prepared: PreparedCall, span: Span | None) -> RequestBooks:
        """Raises Overloaded where the tenant is over its quota."""
        call, card = prepared.call, prepared.model.card
        use = None
        if call.quota is not None:
            block_size = card.identity.block_size
            num_prompt_tokens = prepared.num_prompt_tokens
            use = self._quotas.admit(call.tenant, call.quota, num_prompt_tokens, block_size)
        meter = RequestMeter(self.metrics, card.model, self._clock)
        return RequestBooks(prepared, self.metrics, meter, use, span)

    async def _supervise(self, generation: LiveGeneration, run: GenerationRun) -> None:
        """Run it to its end and tell the generation how it went."""
        prepared = generation.prepared
        key, deadline = (prepared.call.tenant, prepared.request_id), prepared.deadline
        self._running.setdefault(key, set()).add(generation)
        try:
            async with asyncio.timeout(None if deadline is None else deadline - self._clock()):
                await run.run()
        except TimeoutError:
            generation.fail(DeadlineExceeded("the deadline passed"))
        except PagefleetError as error:
            generation.fail(error)
        except Exception:  # the edge of a request: its client must hear of it
            fields = {
                "request_id": prepared.request_id,
                "request_key": prepared.request_key,
            }
            logger.exception("a request failed", extra={"fields": fields})
            generation.fail(InternalError(f"request {prepared.request_id} failed"))
        finally:
            self._running[key].discard(generation)
            if not self._running[key]:
                del self._running[key]

    def _generations(self) -> list[LiveGeneration]:
        return [generation for group in self._running.values() for generation in group]


def _check_checkpoint(checkpoint: str) -> str:
    """A folder with a model and a tokenizer, or a hub's id: found out before a replica goes."""
    folder = Path(checkpoint).expanduser()
    if folder.is_absolute():
        if not (folder / "config.json").is_file():
            raise InvalidArgument("checkpoint", f"{folder} is no checkpoint folder")
        try:
            Tokenizer.load(folder)
        except (OSError, ValueError) as error:
            raise InvalidArgument("checkpoint", str(error)) from None
        return str(folder)
    if HUB_ID.fullmatch(checkpoint) is None:
        raise InvalidArgument("checkpoint", "is neither an absolute path nor an id like org/name")
    return checkpoint


async def _with_forced_call(call: GenerateCall, model: ServedModel) -> SamplingParams:
    """Sampling whose answer has to be a call in the model's own format, if the client says so."""
    prompt, template = call.prompt, model.tokenizer.chat_template
    if not isinstance(prompt, ChatPrompt) or prompt.forced is None or template is None:
        return call.sampling
    if call.sampling.grammar:
        raise InvalidArgument("tool_choice", "cannot be forced together with response_format")
    grammar = forced_grammar(template.tool_format, prompt.tools, prompt.forced)
    try:
        await check_grammar(grammar)
    except InvalidArgument as error:
        raise InvalidArgument("tools", error.problem) from error
    return replace(call.sampling, grammar=grammar)
