"""The gateway's end of the data plane: one long-lived stream per leader, many requests on it.

Commands out, one message per step in, told apart by request key. A stream that breaks is attached
again once, within the leader's grace time, and goes on without a gap; if that fails every request
on it learns `ReplicaLost` and is resumed elsewhere by who owns it. Knows nothing of text.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

import grpc
import grpc.aio

from ..protos import engine_pb2
from ..protos.codec import decode_delta, encode_engine_request
from ..protos.messages import EngineRequest, Lease, SequenceDelta
from ..workers import stream_tls
from ..workers.stream_tls import StreamTls

logger = logging.getLogger(__name__)

_ATTACH_TIMEOUT_S = 5.0
_REATTACH_TIMEOUT_S = 1.5  # inside the grace time of the leader
_CANCEL_MEMORY_S = 10.0
_MAX_MESSAGE_BYTES = 64 * 2**20

# A frozen process keeps its sockets open: only unanswered pings show it. Without its own limit a
# ping may stay unanswered for a minute, whatever the keepalive's timeout says.
_CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 4_000),
    ("grpc.keepalive_timeout_ms", 8_000),
    ("grpc.http2.ping_timeout_ms", 8_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
)

_Attach = grpc.aio.StreamStreamMultiCallable[engine_pb2.EngineCommand, engine_pb2.EngineOutputs]
_Call = grpc.aio.StreamStreamCall[engine_pb2.EngineCommand, engine_pb2.EngineOutputs]
ChannelFactory = Callable[[str], grpc.aio.Channel]


class ReplicaLost(Exception):
    """The stream to a leader is gone and what was submitted on it will not be answered."""


def insecure_channel(address: str) -> grpc.aio.Channel:
    """A plaintext channel with pings."""
    return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)


def secure_channels(tls: StreamTls) -> ChannelFactory:
    """Channels with pings on which both ends show certificates of the cluster's authority."""
    credentials, options = (
        tls.channel_credentials(),
        (*_CHANNEL_OPTIONS, *stream_tls.CHANNEL_OPTIONS),
    )
    return lambda address: grpc.aio.secure_channel(address, credentials, options=options)


class EngineClient:
    """Streams from one gateway to the leaders it has leases for."""

    def __init__(self, gateway_id: str, make_channel: ChannelFactory = insecure_channel) -> None:
        self._gateway_id = gateway_id
        self._make_channel = make_channel
        self._links: dict[tuple[str, str], _Link] = {}

    def submit(self, lease: Lease, request: EngineRequest) -> "EngineStream":
        """Send a request to the leader its lease names; attaches first where need be."""
        key = (lease.address, lease.incarnation)
        link = self._links.get(key)
        if link is None or link.is_lost:
            self._links = {k: other for k, other in self._links.items() if not other.is_lost}
            link = _Link(self._make_channel(lease.address), self._gateway_id, lease)
            self._links[key] = link
            link.start()
        return link.submit(request)

    async def close(self) -> None:
        """End every stream."""
        links, self._links = list(self._links.values()), {}
        for link in links:
            await link.close()


class EngineStream:
    """One submitted request: its deltas, in order, and the commands that concern it."""

    def __init__(self, link: "_Link", submit: engine_pb2.Submit) -> None:
        self._link = link
        self._deltas: list[SequenceDelta] = []
        self._wakeup = asyncio.Event()
        self._lost: str | None = None
        self.submit = submit
        self.finishes: list[engine_pb2.Finish] = []
        self.has_answer = False

    async def next_deltas(self) -> list[SequenceDelta]:
        """All that came since the last call, at least one; raises ReplicaLost."""
        while not self._deltas:
            if self._lost is not None:
                raise ReplicaLost(self._lost)
            self._wakeup.clear()
            await self._wakeup.wait()
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self, index: int, num_tokens: int) -> None:
        """A sample is done by the gateway's judgement and keeps so many output tokens."""
        key = self.submit.request_key
        finish = engine_pb2.Finish(request_key=key, index=index, num_tokens=num_tokens)
        self.finishes.append(finish)
        self._link.send(engine_pb2.EngineCommand(finish=finish))

    def close(self, *, cancel: bool) -> None:
        """No more deltas are wanted; with `cancel` the engine has to be told."""
        self._link.forget(self.submit.request_key, cancel=cancel)

    def put(self, delta: SequenceDelta) -> None:
        """A delta of this request arrived."""
        self.has_answer = True
        self._deltas.append(delta)
        self._wakeup.set()

    def lose(self, reason: str) -> None:
        """Nothing more will come."""
        self._lost = reason
        self._wakeup.set()


class _Link:
    """One leader's incarnation: the stream to it now, and the requests on it."""

    def __init__(self, channel: grpc.aio.Channel, gateway_id: str, lease: Lease) -> None:
        self._channel = channel
        self._open: _Attach = channel.stream_stream(
            "/pagefleet.engine.v1.Engine/Attach",
            request_serializer=engine_pb2.EngineCommand.SerializeToString,
            response_deserializer=engine_pb2.EngineOutputs.FromString,
        )
        self._hello = engine_pb2.Hello(
            gateway_id=gateway_id,
            incarnation=lease.incarnation,
            stream_secret=lease.stream_secret,
        )
        self._name = f"replica {lease.replica_id} at {lease.address}"
        self._streams: dict[str, EngineStream] = {}
        self._cancelled: dict[str, float] = {}  # request key → when
        self._commands: deque[engine_pb2.EngineCommand] = deque()
        self._wakeup = asyncio.Event()
        self._attached = False
        self._task: asyncio.Task[None] | None = None
        self.is_lost = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # -- requests ----------------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> EngineStream:
        stream = EngineStream(self, encode_engine_request(request))
        self._streams[request.request_key] = stream
        self.send(engine_pb2.EngineCommand(submit=stream.submit))
        return stream

    def forget(self, request_key: str, *, cancel: bool) -> None:
        if self._streams.pop(request_key, None) is not None and cancel:
            self._cancel(request_key)

    def send(self, command: engine_pb2.EngineCommand) -> None:
        self._commands.append(command)
        self._wakeup.set()

    def _cancel(self, request_key: str) -> None:
        now = time.monotonic()
        while self._cancelled:
            oldest = next(iter(self._cancelled))
            if now - self._cancelled[oldest] < _CANCEL_MEMORY_S:
                break
            del self._cancelled[oldest]
        self._cancelled[request_key] = now
        self.send(_cancel_command(request_key))

    # -- the stream --------------------------------------------------------------------------

    async def _run(self) -> None:
        """Attach; again each time an attached stream breaks; end when attaching fails."""
        reason = "the gateway is closing"
        timeout_s = _ATTACH_TIMEOUT_S
        try:
            while True:
                self._attached = False
                reason = await self._attach(timeout_s)
                if not self._attached or not self._streams:
                    break
                logger.warning("the stream to %s broke (%s), attaching again", self._name, reason)
                timeout_s = _REATTACH_TIMEOUT_S
        finally:
            self.is_lost = True
            streams, self._streams = self._streams, {}
            for stream in streams.values():
                stream.lose(f"{self._name}: {reason}")
            await self._channel.close()

    async def _attach(self, timeout_s: float) -> str:
        """One stream from Hello to its end; tells why it ended."""
        call = self._open()
        try:
            self._attached = await asyncio.wait_for(self._greet(call), timeout_s)
            if self._attached:
                await self._exchange(call)
            return f"ended with {(await call.code()).name}"
        except TimeoutError:
            return "no answer to hello"
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except asyncio.InvalidStateError:
            return f"ended with {(await call.code()).name}"  # between two of our writes
        finally:
            call.cancel()

    async def _greet(self, call: _Call) -> bool:
        """Say who we are; False if the leader ended the stream instead of an answer."""
        await call.write(engine_pb2.EngineCommand(hello=self._hello))
        answer = await call.read()
        if not isinstance(answer, engine_pb2.EngineOutputs):
            return False
        if not answer.attached.kept:
            self._lose_submitted()
            self._hello.received_sequence = 0
        self._repeat_commands()
        return True

    def _lose_submitted(self) -> None:
        """The leader knows no session of ours: what was answered already cannot go on there."""
        for key, stream in list(self._streams.items()):
            if stream.has_answer:
                del self._streams[key]
                stream.lose(f"{self._name} lost the gateway's session")

    def _repeat_commands(self) -> None:
        """What was written to the broken stream may have been lost; the leader drops repeats."""
        self._commands.clear()
        for stream in self._streams.values():
            if not stream.has_answer:
                self._commands.append(engine_pb2.EngineCommand(submit=stream.submit))
            for finish in stream.finishes:
                self._commands.append(engine_pb2.EngineCommand(finish=finish))
        self._commands.extend(_cancel_command(key) for key in self._cancelled)
        self._wakeup.set()

    async def _exchange(self, call: _Call) -> None:
        """Write and read until the stream ends."""
        writer = asyncio.create_task(self._write(call))
        try:
            await self._read(call)
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, call: _Call) -> None:
        while True:
            while self._commands:
                await call.write(self._commands.popleft())
            self._wakeup.clear()
            await self._wakeup.wait()

    async def _read(self, call: _Call) -> None:
        while True:
            outputs = await call.read()
            if not isinstance(outputs, engine_pb2.EngineOutputs):
                return
            self._hello.received_sequence = outputs.sequence
            for delta in outputs.deltas:
                self._dispatch(delta)

    def _dispatch(self, delta: engine_pb2.Delta) -> None:
        stream = self._streams.get(delta.request_key)
        if stream is not None:
            stream.put(decode_delta(delta))
        elif delta.request_key not in self._cancelled:
            # a submit that was sent twice and had ended already the first time
            self._cancel(delta.request_key)


def _cancel_command(request_key: str) -> engine_pb2.EngineCommand:
    return engine_pb2.EngineCommand(cancel=engine_pb2.Cancel(request_key=request_key))
