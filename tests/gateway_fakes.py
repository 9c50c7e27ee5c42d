"""What the gateway talks to, without models or Ray: a controller and leaders, over real sockets.

A `FakeLeader` is the real engine server in front of a scripted engine: each token is a function
of prompt, seed, sample and position, so an undisturbed run tells what any other must equal.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors
from view_factories import make_cluster_view

from pagefleet.cluster.chat_template import ChatTemplate
from pagefleet.cluster.engine_client import EngineStream
from pagefleet.cluster.gateway import Gateway
from pagefleet.cluster.generation import GenerateCall, merge_deltas
from pagefleet.cluster.generation_run import RetryPolicy
from pagefleet.cluster.live_generation import LiveGeneration
from pagefleet.cluster.tokenizer import Tokenizer
from pagefleet.protos.errors import Overloaded, Unavailable
from pagefleet.protos.messages import (
    BlockCounts,
    CacheIdentity,
    CallTimes,
    ClusterState,
    ClusterView,
    EngineRequest,
    Explanation,
    FinishReason,
    Lease,
    ModelCard,
    Refused,
    ReplicaExplanation,
    ReplicaState,
    ReplicaStatus,
    ReserveRequest,
    SampleStart,
    SamplingParams,
    SequenceDelta,
    Ticket,
    TokenLogprobs,
    Usage,
)
from pagefleet.workers.engine_server import EngineServer
from pagefleet.workers.live_request import DeltaSink, LiveRequest
from pagefleet.workers.stream_tls import StreamTls

MAX_CONTEXT = 512
BOS, EOS = "<s>", "</s>"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no bad roles') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
)


def make_tokenizer(*, with_bos: bool = True, template: str | None = TEMPLATE) -> Tokenizer:
    """Byte-level: every byte is a token, ids 0 to 255; then BOS and EOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = HuggingFaceTokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([BOS, EOS])
    if with_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, 256)]
        )
    chat = None if template is None else ChatTemplate(template, {"bos_token": BOS})
    return Tokenizer(backend, bos_token=BOS, chat_template=chat)


TOKENIZER = make_tokenizer()


def ids_of(text: str) -> list[int]:
    """The ids of a text, without BOS."""
    return TOKENIZER.encode(text, add_special_tokens=False)


def make_card(model: str = "tiny", **changes: object) -> ModelCard:
    """A model of 258 tokens."""
    fields: dict[str, object] = {
        "model": model,
        "tokenizer_dir": f"/{model}",
        "identity": CacheIdentity("fingerprint", 0, "float32", 16),
        "max_context": MAX_CONTEXT,
        "vocab_size": 258,
        "eos_token_ids": (257,),
        "bos_token_id": 256,
    }
    return ModelCard(**(fields | changes))


Script = Callable[[EngineRequest, int, int], int]


def text_script(text: str) -> Script:
    """Every sample says this, then EOS."""
    ids = [*ids_of(text), 257]
    return lambda request, index, position: ids[min(position, len(ids) - 1)]


def seeded_script(request: EngineRequest, index: int, position: int) -> int:
    """Letters that depend on all that a token may depend on."""
    seed = request.sampling.seed or 0
    mixed = (hash(request.prompt_token_ids) ^ seed) * 31 + index * 1009 + position * 37
    mixed = (mixed ^ mixed >> 7) * 2654435761
    return ids_of("abcdefghijklmnopqrstuvwxyz")[mixed % 26]


class ScriptedEngine:
    """Says what its script says, a token of every sample per step. Stands where `Engine` does.

    gate: steps are taken only while it is set. token_budget: after so many tokens it stands
    still and calls `on_budget`, for tests that break it just there.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.gate = asyncio.Event()
        self.gate.set()
        self.token_budget: int | None = None
        self.on_budget: Callable[[], None] = lambda: None
        self.submitted: list[EngineRequest] = []
        self.cancelled: list[str] = []
        self.finished: list[tuple[str, int, int]] = []
        self.reject: list[Overloaded | Unavailable] = []  # errors for the next submits
        self.steps_done = 0
        self.tokens_done = 0
        self.cached_tokens = 0
        self._live: dict[str, LiveRequest] = {}
        self._stops: dict[tuple[str, int], int] = {}
        self._wakeup = asyncio.Event()
        self.changed = asyncio.Event()  # set at each submit, cancel and finish

    @property
    def num_live(self) -> int:
        return len(self._live)

    def submit(self, request: EngineRequest, sink) -> None:
        self.submitted.append(request)
        self.changed.set()
        if self.reject:
            raise self.reject.pop(0)
        self._live[request.request_key] = LiveRequest(request, sink)
        self._wakeup.set()

    def cancel(self, request_key: str) -> None:
        self.cancelled.append(request_key)
        self._live.pop(request_key, None)
        self.changed.set()

    def finish(self, request_key: str, index: int, num_tokens: int) -> None:
        self.finished.append((request_key, index, num_tokens))
        self._stops[request_key, index] = num_tokens
        self.changed.set()

    async def run(self) -> None:
        while True:
            await self.gate.wait()
            if not self._live:
                self._wakeup.clear()
                await self._wakeup.wait()
                continue
            self.steps_done += 1
            for sink, deltas in self._step_all():
                sink(self.steps_done, deltas)
            if self.token_budget is not None and self.tokens_done >= self.token_budget:
                self.token_budget = None
                self.gate.clear()
                self.on_budget()
            await asyncio.sleep(0)

    def _step_all(self) -> list[tuple[DeltaSink, list[SequenceDelta]]]:
        """A token of every sample: one message for each gateway."""
        by_sink: list[tuple[DeltaSink, list[SequenceDelta]]] = []
        for key, live in list(self._live.items()):
            deltas = [self._step(live, index) for index in list(live.num_sent)]
            for delta in deltas:
                live.note(delta)
            if not live.num_sent:
                del self._live[key]
            known = next((found for sink, found in by_sink if sink == live.sink), None)
            if known is None:
                by_sink.append((live.sink, deltas))
            else:
                known.extend(deltas)
        return by_sink

    def _step(self, live: LiveRequest, index: int) -> SequenceDelta:
        request, position = live.request, live.num_sent[index]
        sampling = request.sampling
        max_tokens = MAX_CONTEXT if sampling.max_tokens is None else sampling.max_tokens
        max_tokens = min(max_tokens, MAX_CONTEXT - len(request.prompt_token_ids))
        stop_at = self._stops.get((request.request_key, index))
        if stop_at is not None or position >= max_tokens:
            reason = FinishReason.LENGTH if stop_at is None else FinishReason.STOP
            usage = self._usage(request, position if stop_at is None else stop_at)
            return SequenceDelta(
                request.request_key, index, position, finish_reason=reason, usage=usage
            )
        token = self.script(request, index, position)
        self.tokens_done += 1
        ends = token == 257 and not sampling.ignore_eos
        reason = FinishReason.STOP if ends else None
        if not ends and position + 1 == max_tokens:
            reason = FinishReason.LENGTH
        first = position == 0 and index == 0 and sampling.prompt_logprobs is not None
        return SequenceDelta(
            request.request_key,
            index,
            position,
            (token,),
            logprobs=() if sampling.logprobs is None else (_logprobs(token, sampling.logprobs),),
            prompt_logprobs=_prompt_logprobs(request) if first else (),
            finish_reason=reason,
            usage=None if reason is None else self._usage(request, position + 1),
        )

    def _usage(self, request: EngineRequest, num_tokens: int) -> Usage:
        return Usage(
            len(request.prompt_token_ids), self.cached_tokens, num_tokens, 0, 0.25, 0.5, 1.0
        )


def _logprobs(token: int, best: int) -> TokenLogprobs:
    others = [i for i in range(65, 65 + best + 1) if i != token][: max(best - 1, 0)]
    values = [-0.5, *(-1.0 - 0.5 * i for i in range(len(others)))]
    return TokenLogprobs((token, *others), tuple(values), 1)


def _prompt_logprobs(request: EngineRequest) -> tuple[TokenLogprobs | None, ...]:
    best = request.sampling.prompt_logprobs or 0
    return (None, *(_logprobs(token, best) for token in request.prompt_token_ids[1:]))


class FlakyPort:
    """A TCP relay in front of a leader, whose connections a test can cut or block."""

    def __init__(self) -> None:
        self._target = ""
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self.refuses = False
        self.flowing = asyncio.Event()  # cleared: bytes are taken and not passed on
        self.flowing.set()
        self.num_connections = 0

    async def start(self, target: str) -> str:
        self._target = target
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Reset every connection; new ones are let through unless `refuses`."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def stop(self) -> None:
        self.cut()
        assert self._server is not None
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            writer.transport.abort()
            return
        self.num_connections += 1
        host, port = self._target.split(":")
        inner_reader, inner_writer = await asyncio.open_connection(host, int(port))
        self._writers += [writer, inner_writer]
        for source, target in ((reader, inner_writer), (inner_reader, writer)):
            task = asyncio.create_task(_pump(source, target, self.flowing))
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)


async def _pump(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, flowing: asyncio.Event
) -> None:
    try:
        while data := await source.read(65536):
            await flowing.wait()
            target.write(data)
            await target.drain()
    except ConnectionError:
        pass
    finally:
        target.close()


class FakeLeader:
    """A replica: scripted engine, real engine server, flaky port."""

    def __init__(
        self, replica_id: str, script: Script = seeded_script, tls: StreamTls | None = None
    ) -> None:
        self.replica_id = replica_id
        self.incarnation = f"{replica_id}-life-1"
        self.engine = ScriptedEngine(script)
        self.port = FlakyPort()
        self.address = ""
        self.is_dead = False
        self.server = EngineServer(
            self.engine,
            incarnation=self.incarnation,
            stream_secret="s3cret",
            grace_s=0.5,
            tls=tls,
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.address = await self.port.start(await self.server.start("127.0.0.1"))
        self._task = asyncio.create_task(self.engine.run())

    def kill(self) -> None:
        """Gone at once, connections reset, as after SIGKILL."""
        self.is_dead = True
        self.port.refuses = True
        self.engine.gate.clear()
        self.port.cut()

    async def stop(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.port.stop()
        await self.server.stop(0)


def lease_of(leader: FakeLeader, **changes: object) -> Lease:
    """A lease that the leader accepts."""
    lease = Lease(
        1, "k", 1, "r0", leader.incarnation, leader.address, "s3cret", 4, 0, expires_in_s=5.0
    )
    return replace(lease, **changes)


def engine_request(key: str, max_tokens: int = 5) -> EngineRequest:
    """One sample of so many tokens."""
    sampling = SamplingParams(seed=1, max_tokens=max_tokens)
    return EngineRequest(key, (1, 2), sampling, (SampleStart(0),))


async def read_tokens(stream: EngineStream) -> list[int]:
    """Until the end; deltas must come in order."""
    tokens: list[int] = []
    while True:
        for delta in await stream.next_deltas():
            assert delta.first_position == len(tokens)
            tokens += delta.token_ids
            if delta.finish_reason is not None:
                return tokens


@dataclass
class FakeController:
    """Grants on the first live replica; or queues, or refuses, as told.

    is_full: reservations get tickets until `grant_all`. answers: what the next reserves get.
    """

    leaders: list[FakeLeader]
    cards: tuple[ModelCard, ...] = field(default_factory=lambda: (make_card(),))
    is_full: bool = False
    answers: list[Refused | Exception] = field(default_factory=list)
    reserved: list[ReserveRequest] = field(default_factory=list)
    released: list[tuple[str, int]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    queue: dict[tuple[str, int], ReserveRequest] = field(default_factory=dict)
    grants: list[Lease | Refused] = field(default_factory=list)
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def reserve(self, request: ReserveRequest) -> Lease | Ticket | Refused:
        self.reserved.append(request)
        self.changed.set()
        await asyncio.sleep(0)
        key = (request.request_key, request.attempt)
        if self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        if self.is_full:
            self.queue[key] = request
            return Ticket(*key, len(self.queue), 1.0)
        return self._lease(request)

    def grant_all(self) -> None:
        """Room for everyone who waits."""
        self.is_full = False
        self.grants += [self._lease(request) for request in self.queue.values()]
        self.queue.clear()
        self.woken.set()

    async def next_grants(self, gateway_id: str) -> tuple[Lease | Refused, ...]:
        while not self.grants:
            self.woken.clear()
            await self.woken.wait()
        grants, self.grants = tuple(self.grants), []
        return grants

    async def release(self, request_key: str, attempt: int) -> None:
        self.released.append((request_key, attempt))
        self.queue.pop((request_key, attempt), None)
        self.changed.set()

    async def model_cards(self) -> tuple[ModelCard, ...]:
        return self.cards

    async def replica_failed(self, replica_id: str, incarnation: str) -> None:
        self.failed.append(replica_id)

    async def cluster_state(self) -> ClusterState:
        calls = (CallTimes("reserve", (1e-5, 1e-3), (1, 2, 1), 0.01),)
        replicas = tuple(map(_status, self.leaders))
        return ClusterState(replicas, 1, 20, 5, 2, 3, "default", 60.0, 4.0, calls)

    async def watch(self) -> ClusterView:
        view = make_cluster_view(2, 16, 8, num_rows=2)
        return replace(view, state=await self.cluster_state())

    async def explain(self, request: ReserveRequest) -> Explanation | Refused:
        if self.answers:
            return self.answers.pop(0)
        replicas = tuple(
            ReplicaExplanation(
                leader.replica_id, True, 16, 0, 9, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 21.0
            )
            for leader in self.leaders
        )
        reason = f"{request.num_tokens} tokens"
        return Explanation("default", "grant", reason, "r0", 3, 20, 0.0, 0, replicas)

    def _lease(self, request: ReserveRequest) -> Lease | Refused:
        key = (request.request_key, request.attempt)
        for leader in self.leaders:
            if not leader.is_dead and leader.replica_id not in request.excluded:
                return Lease(
                    len(self.reserved),
                    *key,
                    leader.replica_id,
                    leader.incarnation,
                    leader.address,
                    "s3cret",
                    8,
                    0,
                    10.0,
                    self.cards[0].identity.weights,
                )
        return Refused(*key, "Unavailable", "no replica is ready", 2.0)


def _status(leader: FakeLeader) -> ReplicaStatus:
    return ReplicaStatus(
        replica_id=leader.replica_id,
        incarnation=leader.incarnation,
        model="tiny",
        state=ReplicaState.DEAD if leader.is_dead else ReplicaState.READY,
        address=leader.address,
        device=BlockCounts(1, 2, 3, 4),
        host=BlockCounts(5),
        num_waiting=0,
        num_running=leader.engine.num_live,
        leased_blocks=6,
        available_blocks=2,
        hit_tokens=16,
        query_tokens=64,
        preemptions=0,
        steps_done=leader.engine.steps_done,
        indexed_device=2,
        indexed_host=0,
        report_age_s=None if leader.is_dead else 0.5,
    )


def load_fake_tokenizer(folder: Path) -> Tokenizer:
    """By the card's folder: "/no-bos" has no BOS, "/no-chat" no template."""
    match folder.name:
        case "no-bos":
            return make_tokenizer(with_bos=False)
        case "no-chat":
            return make_tokenizer(template=None)
        case _:
            return TOKENIZER


class FakeCluster:
    """Two leaders, a controller and a gateway; nothing may be left over at the end."""

    def __init__(self, **gateway_options: object) -> None:
        self.leaders = [FakeLeader("r0"), FakeLeader("r1")]
        self.controller = FakeController(self.leaders)
        quick = RetryPolicy(patience_s=0.5, pause_s=0.01)
        options: dict[str, object] = {"retry": quick} | gateway_options
        self.gateway = Gateway("gw", self.controller, load_tokenizer=load_fake_tokenizer, **options)

    async def __aenter__(self) -> "FakeCluster":
        for leader in self.leaders:
            await leader.start()
        await self.gateway.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self.gateway.num_running == 0
        assert self.gateway._reservations.num_waiting == 0
        await self.gateway.close()
        assert not self.controller.queue
        for leader in self.leaders:
            await leader.stop()

    @property
    def engine(self):
        return self.leaders[0].engine

    def say(self, text: str) -> None:
        for leader in self.leaders:
            leader.engine.script = text_script(text)

    async def run(self, call: GenerateCall):
        """All of a call's output, by sample."""
        return merge_deltas(await collect(await self.gateway.generate(call)))


async def collect(generation: LiveGeneration):
    return [delta async for batch in generation for delta in batch]


async def until(condition, *events: asyncio.Event) -> None:
    """Wait for a state that is announced by any of the events."""
    while not condition():
        for event in events:
            event.clear()
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED, timeout=5)
        for wait in waits:
            wait.cancel()
