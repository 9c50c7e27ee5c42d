"""The data plane over a real socket: a grpc.aio client against a server on a real engine."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import grpc.aio
import pytest
from engine_fakes import TOKEN, FakeExecutor, assert_at_rest, make_request, make_scheduler

from pagefleet.protos import engine_pb2, engine_pb2_grpc
from pagefleet.protos.codec import decode_outputs, encode_engine_request
from pagefleet.protos.messages import EngineRequest, FinishReason, SequenceDelta
from pagefleet.workers.engine import Engine
from pagefleet.workers.engine_server import EngineServer

INCARNATION, SECRET = "inc-1", "s3cret"
WAIT_S = 20.0


class Gateway:
    """A test's end of a stream."""

    def __init__(self, address: str, gateway_id: str = "gw") -> None:
        self.channel = grpc.aio.insecure_channel(
            address, options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self.gateway_id = gateway_id
        self.messages: list[engine_pb2.EngineOutputs] = []
        self.received_sequence = 0
        self.call: grpc.aio.StreamStreamCall | None = None

    async def attach(self, **hello: object) -> bool:
        """Open a stream; whether the earlier session was kept."""
        self.call = engine_pb2_grpc.EngineStub(self.channel).Attach()
        fields = {
            "gateway_id": self.gateway_id,
            "incarnation": INCARNATION,
            "stream_secret": SECRET,
            "received_sequence": self.received_sequence,
            **hello,
        }
        await self.call.write(engine_pb2.EngineCommand(hello=engine_pb2.Hello(**fields)))
        answer = await self.call.read()
        assert isinstance(answer, engine_pb2.EngineOutputs), await self.call.code()
        assert answer.HasField("attached")
        assert not answer.deltas
        return answer.attached.kept

    async def status(self) -> grpc.StatusCode:
        return await asyncio.wait_for(self.call.code(), WAIT_S)

    async def submit(self, request: EngineRequest) -> None:
        await self.send(submit=encode_engine_request(request))

    async def send(self, **command: object) -> None:
        await self.call.write(engine_pb2.EngineCommand(**command))

    async def read(self) -> list[SequenceDelta]:
        message = await asyncio.wait_for(self.call.read(), WAIT_S)
        assert isinstance(message, engine_pb2.EngineOutputs), await self.call.code()
        assert message.sequence == self.received_sequence + 1
        self.received_sequence = message.sequence
        self.messages.append(message)
        return decode_outputs(message)

    async def read_until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await self.read()

    def deltas(self, key: str) -> list[SequenceDelta]:
        every = (delta for message in self.messages for delta in decode_outputs(message))
        return [delta for delta in every if delta.request_key == key]

    def tokens(self, key: str, index: int = 0) -> list[int]:
        tokens: list[int] = []
        for delta in self.deltas(key):
            if delta.index == index:
                assert delta.first_position == len(tokens), "lost or doubled"
                tokens += delta.token_ids
        return tokens

    def has_ended(self, key: str) -> bool:
        return any(delta.finish_reason is not None for delta in self.deltas(key))

    async def leave(self) -> None:
        """Break the stream as a dying process does."""
        self.call.cancel()
        await self.channel.close()


class Leader:
    """An engine with a fake executor, and its server."""

    def __init__(self, **options: object) -> None:
        self.scheduler = make_scheduler()
        self.executor = FakeExecutor()
        self.engine = Engine(self.scheduler, self.executor)
        self.server = EngineServer(
            self.engine, incarnation=INCARNATION, stream_secret=SECRET, **options
        )
        self.address = ""
        self.gateways: list[Gateway] = []

    async def start(self) -> None:
        self.engine.start()
        self.address = await self.server.start("127.0.0.1")

    def gateway(self, gateway_id: str = "gw") -> Gateway:
        self.gateways.append(Gateway(self.address, gateway_id))
        return self.gateways[-1]

    async def stop(self) -> None:
        self.executor.release()
        for gateway in self.gateways:
            await gateway.channel.close()
        await asyncio.to_thread(self.engine.shutdown)
        await self.server.stop(0.0)

    async def has_requests(self, number: int) -> None:
        """Wait until the commands that make it so have been read."""
        async with asyncio.timeout(WAIT_S):
            while self.engine.num_requests != number:
                await asyncio.sleep(0)

    async def rest(self) -> None:
        """Wait until nothing is left of any request."""
        assert await asyncio.to_thread(self.engine.wait_until_empty, WAIT_S)
        await asyncio.wrap_future(self.engine.call(assert_at_rest))


MakeLeader = Callable[..., Awaitable[Leader]]


@pytest.fixture
async def make_leader() -> AsyncIterator[MakeLeader]:
    leaders: list[Leader] = []

    async def make(**options: object) -> Leader:
        leader = Leader(**options)
        leaders.append(leader)
        await leader.start()
        return leader

    yield make
    for leader in leaders:
        await leader.stop()


async def test_streams_a_request_in_one_message_per_step(make_leader: MakeLeader) -> None:
    leader = await make_leader()
    gateway = leader.gateway()
    assert not await gateway.attach()
    leader.executor.hold()
    for key in ("a", "b"):
        await gateway.submit(make_request(key, max_tokens=6, n=2))
    await leader.has_requests(2)
    leader.executor.release()
    await gateway.read_until(lambda: gateway.has_ended("a") and gateway.has_ended("b"))
    for key in ("a", "b"):
        await gateway.read_until(
            lambda key=key: sum(d.finish_reason is not None for d in gateway.deltas(key)) == 2
        )
        for index in (0, 1):
            assert gateway.tokens(key, index) == [TOKEN] * 6
    steps = [message.step for message in gateway.messages]
    assert steps == sorted(set(steps))
    assert max(len(message.deltas) for message in gateway.messages) == 4
    end = next(d for d in gateway.deltas("a") if d.finish_reason)
    assert end.finish_reason is FinishReason.LENGTH
    assert end.usage.completion_tokens == 6
    await leader.rest()


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        ({"stream_secret": "wrong"}, grpc.StatusCode.UNAUTHENTICATED),
        ({"stream_secret": ""}, grpc.StatusCode.UNAUTHENTICATED),
        ({"stream_secret": "s3crét"}, grpc.StatusCode.UNAUTHENTICATED),
        ({"incarnation": "inc-0"}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"gateway_id": ""}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_only_a_gateway_that_proves_itself_is_attached(
    make_leader: MakeLeader, hello: dict[str, str], code: grpc.StatusCode
) -> None:
    leader = await make_leader()
    gateway = leader.gateway()
    with pytest.raises((AssertionError, grpc.aio.AioRpcError)):
        await gateway.attach(**hello)
    assert await gateway.status() is code
    assert SECRET not in await gateway.call.details()
    assert leader.server.num_gateways == 0


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        b"\x1a\x04\x0a\x02\xff\xfe",  # a cancel whose key is no UTF-8
        engine_pb2.EngineCommand().SerializeToString(),
        engine_pb2.EngineCommand(hello=engine_pb2.Hello(gateway_id="gw")).SerializeToString(),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
async def test_a_message_that_makes_no_sense_ends_the_stream_with_a_status(
    make_leader: MakeLeader, data: bytes, is_first: bool
) -> None:
    leader = await make_leader()
    gateway = leader.gateway()
    method = gateway.channel.stream_stream("/pagefleet.engine.v1.Engine/Attach")
    call = method()
    if not is_first:
        hello = engine_pb2.Hello(gateway_id="gw", incarnation=INCARNATION, stream_secret=SECRET)
        await call.write(engine_pb2.EngineCommand(hello=hello).SerializeToString())
        await call.read()
    await call.write(data)
    code = await asyncio.wait_for(call.code(), WAIT_S)
    assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
    other = leader.gateway("other")
    await other.attach()
    await other.submit(make_request("a"))
    await other.read_until(lambda: other.has_ended("a"))


async def test_a_bad_submit_is_one_error(make_leader: MakeLeader) -> None:
    leader = await make_leader()
    gateway = leader.gateway()
    await gateway.attach()
    odd = encode_engine_request(make_request("odd", n=2))
    odd.prompt_token_ids = b"\x01\x02\x03"
    await gateway.send(submit=odd)
    nobody = encode_engine_request(make_request("nobody"))
    del nobody.samples[:]
    await gateway.send(submit=nobody)
    await gateway.submit(make_request("huge", num_prompt=1000))
    await gateway.submit(make_request("good"))
    await gateway.read_until(lambda: gateway.has_ended("good") and gateway.has_ended("huge"))
    for key, count in (("odd", 2), ("nobody", 1), ("huge", 1)):
        ends = gateway.deltas(key)
        assert len(ends) == count
        assert all(end.finish_reason is FinishReason.ERROR for end in ends)
        assert all(end.error_class == "InvalidArgument" for end in ends)
    assert gateway.tokens("good") == [TOKEN] * 4
    await leader.rest()


async def test_nothing_is_sent_for_a_cancelled_key(make_leader: MakeLeader) -> None:
    leader = await make_leader()
    gateway = leader.gateway()
    await gateway.attach()
    leader.executor.hold(after=3)
    await gateway.submit(make_request("a", max_tokens=200))
    await gateway.read_until(lambda: gateway.tokens("a"))
    await gateway.send(cancel=engine_pb2.Cancel(request_key="a"))
    await leader.has_requests(0)
    leader.executor.release()
    await gateway.submit(make_request("b"))
    await gateway.read_until(lambda: gateway.has_ended("b"))
    assert not gateway.has_ended("a")
    keys = [{delta.request_key for delta in message.deltas} for message in gateway.messages]
    later = gateway.messages[keys.index({"b"}) :]
    assert {delta.request_key for message in later for delta in message.deltas} == {"b"}
    await leader.rest()


async def test_a_stop_string_found_by_the_gateway_ends_the_sample(make_leader: MakeLeader) -> None:
    leader = await make_leader()
    gateway = leader.gateway()
    await gateway.attach()
    leader.executor.hold(after=5)
    await gateway.submit(make_request("a", max_tokens=200))
    await gateway.read_until(lambda: len(gateway.tokens("a")) >= 3)
    await asyncio.to_thread(leader.executor.wait_for_step, 6)  # which does not end before "b" is in
    await gateway.send(finish=engine_pb2.Finish(request_key="gone", index=0, num_tokens=2))
    await gateway.send(finish=engine_pb2.Finish(request_key="a", index=0, num_tokens=2))
    await gateway.submit(make_request("b"))
    await leader.has_requests(2)
    leader.executor.release()
    await gateway.read_until(lambda: gateway.has_ended("a"))
    end = gateway.deltas("a")[-1]
    assert end.finish_reason is FinishReason.STOP
    assert end.usage.completion_tokens == 2
    await leader.rest()


async def test_sequences_of_a_gateway_that_stays_away_are_aborted(make_leader: MakeLeader) -> None:
    leader = await make_leader(grace_s=0.05)
    gone, stays = leader.gateway("gone"), leader.gateway("stays")
    await gone.attach()
    await stays.attach()
    leader.executor.hold(after=2)
    await gone.submit(make_request("a", max_tokens=240))
    await stays.submit(make_request("b", max_tokens=100))
    await gone.read()
    await gone.leave()
    leader.executor.release()
    await stays.read_until(lambda: stays.has_ended("b"))
    assert len(stays.tokens("b")) == 100
    await leader.rest()
    while leader.server.num_gateways > 1:
        await asyncio.sleep(0)
    returned = leader.gateway("gone")
    returned.received_sequence = gone.received_sequence
    assert not await returned.attach()


async def test_attaching_again_misses_nothing(make_leader: MakeLeader) -> None:
    leader = await make_leader(grace_s=WAIT_S)
    gateway = leader.gateway()
    await gateway.attach()
    leader.executor.hold(after=6)
    await gateway.submit(make_request("a", max_tokens=200, n=3))
    for _ in range(3):
        await gateway.read()
    await gateway.leave()
    leader.executor.release()
    # meanwhile everything is computed, and some of it was on its way when the stream broke
    assert await asyncio.to_thread(leader.engine.wait_until_empty, WAIT_S)
    again = leader.gateway()
    again.messages, again.received_sequence = gateway.messages, gateway.received_sequence
    assert await again.attach()
    await again.read_until(lambda: sum(d.finish_reason is not None for d in again.deltas("a")) == 3)
    for index in range(3):
        assert again.tokens("a", index) == [TOKEN] * 200
    await leader.rest()


async def test_a_second_stream_of_a_gateway_takes_over(make_leader: MakeLeader) -> None:
    leader = await make_leader()
    first, second = leader.gateway(), leader.gateway()
    await first.attach()
    leader.executor.hold(after=3)
    await first.submit(make_request("a", max_tokens=20))
    await first.read()
    second.messages, second.received_sequence = first.messages, first.received_sequence
    assert await second.attach()
    leader.executor.release()
    await second.read_until(lambda: second.has_ended("a"))
    assert second.tokens("a") == [TOKEN] * 20
    with pytest.raises(grpc.aio.AioRpcError):
        while True:
            await first.call.read()
    assert await first.status() is grpc.StatusCode.ABORTED
    await leader.rest()


async def test_a_submit_sent_twice_runs_once(make_leader: MakeLeader) -> None:
    leader = await make_leader()
    gateway = leader.gateway()
    await gateway.attach()
    leader.executor.hold()
    for _ in range(3):
        await gateway.submit(make_request("a", max_tokens=5))
    await gateway.submit(make_request("b"))
    await leader.has_requests(2)
    leader.executor.release()
    await gateway.read_until(lambda: gateway.has_ended("a") and gateway.has_ended("b"))
    assert gateway.tokens("a") == [TOKEN] * 5
    await leader.rest()


async def test_a_gateway_that_does_not_come_back_for_its_messages_is_dropped(
    make_leader: MakeLeader,
) -> None:
    """What is kept for it is bounded, whatever it asked for."""
    leader = await make_leader(grace_s=WAIT_S, max_messages=20)
    gateway = leader.gateway()
    await gateway.attach()
    leader.executor.hold(after=1)
    await gateway.submit(make_request("a", max_tokens=240))
    await gateway.read()
    await gateway.leave()
    leader.executor.release()
    await leader.rest()
    again = leader.gateway()
    again.received_sequence = gateway.received_sequence
    assert not await again.attach()


async def test_a_failed_engine_tells_its_gateways(make_leader: MakeLeader) -> None:
    leader = await make_leader()
    gateway = leader.gateway()
    await gateway.attach()
    leader.executor.hold(after=2)
    await gateway.submit(make_request("a", max_tokens=100))
    await gateway.read()
    leader.executor.fail_with = RuntimeError("device lost")
    leader.executor.release()
    await gateway.read_until(lambda: gateway.has_ended("a"))
    assert gateway.deltas("a")[-1].error_class == "Unavailable"
    await gateway.submit(make_request("late"))
    await gateway.read_until(lambda: gateway.has_ended("late"))
    assert gateway.deltas("late")[-1].error_class == "Unavailable"


async def test_stopping_ends_streams(make_leader: MakeLeader) -> None:
    leader = await make_leader()
    gateway = leader.gateway()
    await gateway.attach()
    leader.executor.hold(after=1)
    await gateway.submit(make_request("a", max_tokens=100))
    await gateway.read()
    leader.executor.release()
    await asyncio.to_thread(leader.engine.shutdown)
    stopping = asyncio.create_task(leader.server.stop(WAIT_S))
    await gateway.read_until(lambda: gateway.has_ended("a"))
    assert gateway.deltas("a")[-1].error_class == "Unavailable"
    await gateway.leave()
    await stopping
    assert leader.server.num_gateways == 0
