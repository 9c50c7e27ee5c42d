"""The leader's end of the data plane: streams of gateways in front of one engine.

Checks who attaches, turns commands into calls of the engine, and sends each gateway one message
per step. Knows sockets and sessions; nothing of blocks, text or Ray. Lives on one asyncio loop;
the engine's thread reaches it only through `call_soon_threadsafe`.
"""

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from functools import partial

import grpc
import grpc.aio

from ..protos import engine_pb2
from ..protos.codec import decode_engine_request
from ..protos.deserializer import Malformed, make_deserializer
from ..protos.errors import InvalidArgument, PagefleetError
from ..protos.messages import SequenceDelta
from .engine import Engine
from .gateway_session import GatewaySession
from .live_request import DeltaSink, error_deltas
from .request_spans import RequestSpans
from .stream_tls import StreamTls

logger = logging.getLogger(__name__)

SERVICE = "pagefleet.engine.v1.Engine"
MAX_MESSAGE_BYTES = 64 * 2**20  # a long prompt with many resumed samples; prompt logprobs
_HELLO_TIMEOUT_S = 10.0

_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # a gateway whose node is gone sends no FIN: ask, so that its grace time can begin
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.so_reuseport", 0),
]

Command = engine_pb2.EngineCommand | Malformed
Context = grpc.aio.ServicerContext[Command, engine_pb2.EngineOutputs]


class _StreamEnd(Exception):
    """A stream ends with a status; its session may outlive it."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


def _new_end() -> asyncio.Future[_StreamEnd]:
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False, slots=True)
class _Stream:
    """One call of Attach. `end` resolves when the server itself has to end it."""

    end: asyncio.Future[_StreamEnd] = field(default_factory=_new_end)
    pumps: tuple[asyncio.Task[None], ...] = ()

    def close(self, end: _StreamEnd) -> None:
        """Stop reading and writing at once; the call then ends with this status."""
        for pump in self.pumps:
            pump.cancel()
        if not self.end.done():
            self.end.set_result(end)


@dataclass(eq=False, slots=True)
class _Attachment:
    """A session and the stream that serves it now, or the timer that will end it."""

    session: GatewaySession
    sink: DeltaSink
    stream: _Stream | None = None
    expiry: asyncio.TimerHandle | None = None


class EngineServer:
    """Serves `Engine.Attach` on one address.

    Args:
        grace_s: how long a gateway's sequences run on after its stream broke.
        tls: of the streams; None = plaintext.
        max_messages: messages kept for a gateway that is away or slow; beyond, it is dropped.
        spans: of traced requests; None = nothing is traced.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        incarnation: str,
        stream_secret: str,
        grace_s: float = 2.0,
        max_messages: int = 4096,
        tls: StreamTls | None = None,
        spans: RequestSpans | None = None,
    ) -> None:
        self._spans = spans
        self._engine = engine
        self._incarnation = incarnation
        self._secret = stream_secret.encode()
        self._grace_s = grace_s
        self._max_messages = max_messages
        self._tls = tls
        self._attachments: dict[str, _Attachment] = {}
        self._server: grpc.aio.Server | None = None

    @property
    def num_gateways(self) -> int:
        """Gateways that are attached or in their grace time."""
        return len(self._attachments)

    async def start(self, host: str, port: int = 0) -> str:
        """Listen on `host`; answers the address with the port that was taken."""
        handler = grpc.stream_stream_rpc_method_handler(
            self._attach,
            request_deserializer=make_deserializer(engine_pb2.EngineCommand, MAX_MESSAGE_BYTES),
            response_serializer=engine_pb2.EngineOutputs.SerializeToString,
        )
        server = grpc.aio.server(options=_OPTIONS)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Attach": handler}),)
        )
        address = f"{host}:{port}"
        if self._tls is None:
            bound_port = server.add_insecure_port(address)
        else:
            bound_port = server.add_secure_port(address, self._tls.server_credentials())
        await server.start()
        self._server = server
        return f"{host}:{bound_port}"

    async def stop(self, grace_s: float = 0.5) -> None:
        """Let streams send what is queued, end them, and forget every gateway."""
        if self._server is not None:
            await self._server.stop(grace_s)
        for attachment in list(self._attachments.values()):
            self._drop(attachment)

    # -- one stream --------------------------------------------------------------------------

    async def _attach(self, commands: AsyncIterator[Command], context: Context) -> None:
        try:
            hello = await self._read_hello(commands)
            await self._serve(hello, commands, context)
        except _StreamEnd as end:
            await context.abort(end.code, end.details)

    async def _read_hello(self, commands: AsyncIterator[Command]) -> engine_pb2.Hello:
        try:
            command = await asyncio.wait_for(anext(commands, None), _HELLO_TIMEOUT_S)
        except TimeoutError:
            raise _StreamEnd(grpc.StatusCode.DEADLINE_EXCEEDED, "no hello came") from None
        if command is None or _well_formed(command).WhichOneof("command") != "hello":
            raise _StreamEnd(grpc.StatusCode.INVALID_ARGUMENT, "the first command is hello")
        hello = _well_formed(command).hello
        if hello.incarnation != self._incarnation:
            raise _StreamEnd(grpc.StatusCode.FAILED_PRECONDITION, "another incarnation serves here")
        if not hmac.compare_digest(hello.stream_secret.encode(), self._secret):
            raise _StreamEnd(grpc.StatusCode.UNAUTHENTICATED, "wrong stream secret")
        if not hello.gateway_id:
            raise _StreamEnd(grpc.StatusCode.INVALID_ARGUMENT, "hello.gateway_id is empty")
        return hello

    async def _serve(
        self, hello: engine_pb2.Hello, commands: AsyncIterator[Command], context: Context
    ) -> None:
        stream = _Stream()
        attachment, kept = self._take_over(hello, stream)
        try:
            attached = engine_pb2.Attached(kept=kept)
            await context.write(engine_pb2.EngineOutputs(attached=attached))
            await self._pump(stream, attachment, commands, context)
        finally:
            if attachment.stream is stream:
                self._start_grace(attachment)

    async def _pump(
        self,
        stream: _Stream,
        attachment: _Attachment,
        commands: AsyncIterator[Command],
        context: Context,
    ) -> None:
        """Read and write until the gateway leaves or the server ends the stream."""
        reader = asyncio.create_task(self._read(attachment, commands))
        writer = asyncio.create_task(self._write(attachment.session, context))
        stream.pumps = (reader, writer)
        try:
            await asyncio.wait({*stream.pumps, stream.end}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reader.cancel()
            writer.cancel()
            outcomes = await asyncio.gather(*stream.pumps, return_exceptions=True)
        if stream.end.done():
            raise stream.end.result()
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _read(self, attachment: _Attachment, commands: AsyncIterator[Command]) -> None:
        async for command in commands:
            self._obey(attachment, _well_formed(command))

    async def _write(self, session: GatewaySession, context: Context) -> None:
        while True:
            await context.write(await session.next_message())

    # -- commands ----------------------------------------------------------------------------

    def _obey(self, attachment: _Attachment, command: engine_pb2.EngineCommand) -> None:
        session = attachment.session
        match command.WhichOneof("command"):
            case "submit":
                self._submit(attachment, command.submit)
            case "cancel":
                if session.is_live(command.cancel.request_key):
                    session.discard(command.cancel.request_key)
                    self._cancel(command.cancel.request_key)
            case "finish":
                finish = command.finish
                if session.is_live(finish.request_key):
                    self._engine.finish(finish.request_key, finish.index, finish.num_tokens)
            case _:
                problem = "expected submit, cancel or finish"
                raise _StreamEnd(grpc.StatusCode.INVALID_ARGUMENT, problem)

    def _submit(self, attachment: _Attachment, message: engine_pb2.Submit) -> None:
        session, key = attachment.session, message.request_key
        if session.is_live(key):
            return  # sent again after a broken stream, because the gateway could not know
        session.add(key, [sample.index for sample in message.samples] or [0])
        try:
            request = decode_engine_request(message)
            if self._spans is not None:
                self._spans.begin(request)
            self._engine.submit(request, attachment.sink)
        except ValueError as error:
            self._refuse(session, message, InvalidArgument("submit", str(error)))
        except PagefleetError as error:
            self._refuse(session, message, error)

    def _refuse(
        self, session: GatewaySession, message: engine_pb2.Submit, error: PagefleetError
    ) -> None:
        indices: Iterable[int] = [sample.index for sample in message.samples] or [0]
        num_sent = dict.fromkeys(indices, 0)
        deltas = error_deltas(message.request_key, num_sent, error)
        if self._spans is not None:
            self._spans.note(deltas)
        session.put(self._engine.steps_done, deltas)

    def _cancel(self, request_key: str) -> None:
        self._engine.cancel(request_key)
        if self._spans is not None:
            self._spans.abandon(request_key)

    # -- gateways come and go ----------------------------------------------------------------

    def _take_over(self, hello: engine_pb2.Hello, stream: _Stream) -> tuple[_Attachment, bool]:
        """Make `stream` the one of its gateway; True if the gateway's session goes on."""
        attachment = self._attachments.get(hello.gateway_id)
        if attachment is not None and attachment.stream is not None:
            end = _StreamEnd(grpc.StatusCode.ABORTED, "the gateway attached again")
            attachment.stream.close(end)
        kept = attachment is not None and attachment.session.rewind(hello.received_sequence)
        if attachment is not None and not kept:
            self._drop(attachment)
        if attachment is None or not kept:
            attachment = self._new_attachment(hello.gateway_id)
        attachment.stream = stream
        if attachment.expiry is not None:
            attachment.expiry.cancel()
            attachment.expiry = None
        return attachment, kept

    def _new_attachment(self, gateway_id: str) -> _Attachment:
        session = GatewaySession(gateway_id, max_messages=self._max_messages)
        loop = asyncio.get_running_loop()
        put = partial(self._put, session)
        attachment = _Attachment(session, partial(loop.call_soon_threadsafe, put))
        self._attachments[gateway_id] = attachment
        return attachment

    def _put(self, session: GatewaySession, step: int, deltas: list[SequenceDelta]) -> None:
        if self._spans is not None:
            self._spans.note(deltas)
        session.put(step, deltas)
        attachment = self._attachments.get(session.gateway_id)
        if session.is_overrun and attachment is not None and attachment.session is session:
            logger.warning("gateway %s does not keep up and is dropped", session.gateway_id)
            self._drop(attachment)

    def _start_grace(self, attachment: _Attachment) -> None:
        attachment.stream = None
        if self._attachments.get(attachment.session.gateway_id) is attachment:
            loop = asyncio.get_running_loop()
            attachment.expiry = loop.call_later(self._grace_s, self._drop, attachment)

    def _drop(self, attachment: _Attachment) -> None:
        """Forget a gateway: its sequences are aborted, its stream, if any, ends."""
        session = attachment.session
        del self._attachments[session.gateway_id]
        if attachment.expiry is not None:
            attachment.expiry.cancel()
        if attachment.stream is not None:
            end = _StreamEnd(grpc.StatusCode.RESOURCE_EXHAUSTED, "too much was left unread")
            attachment.stream.close(end)
        for request_key in session.live_keys:
            self._cancel(request_key)


def _well_formed(command: Command) -> engine_pb2.EngineCommand:
    if isinstance(command, Malformed):
        raise _StreamEnd(grpc.StatusCode.INVALID_ARGUMENT, command.error.message)
    return command
