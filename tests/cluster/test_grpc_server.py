"""The gRPC front: statuses with their details, deadlines, cancellation, health, reflection."""

import asyncio

import grpc
import grpc.aio
import pytest
from gateway_fakes import EOS, FakeCluster, ids_of, make_card, until
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pagefleet.cluster.generation import GenerateCall, TextPrompt
from pagefleet.cluster.grpc_server import GrpcServer
from pagefleet.protos import inference_pb2 as pb
from pagefleet.protos.inference_pb2_grpc import InferenceStub
from pagefleet.protos.messages import Refused, SamplingParams

GENERATE = "/pagefleet.v1.Inference/Generate"


class GrpcFront(FakeCluster):
    """A fake cluster with a real gRPC server and a channel to it."""

    async def __aenter__(self) -> "GrpcFront":
        await super().__aenter__()
        self.server = GrpcServer(self.gateway)
        port = await self.server.start("127.0.0.1", 0)
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self.stub = InferenceStub(self.channel)
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.channel.close()
        await self.server.stop(0)
        await super().__aexit__(*failure)

    async def send_raw(self, data: bytes, method: str = GENERATE) -> bytes:
        return await self.channel.unary_unary(method)(data)


@pytest.fixture
async def front():
    async with GrpcFront() as made:
        yield made


def request(text: str = "hello", **sampling: object) -> pb.GenerateRequest:
    sampling = {"max_tokens": 20, "seed": 7} | sampling
    return pb.GenerateRequest(text=text, sampling=pb.Sampling(**sampling))


def details_of(error: grpc.aio.AioRpcError) -> dict[str, object]:
    """The `google.rpc` details by kind, and the retry trailer."""
    found: dict[str, object] = {}
    for name, value in error.trailing_metadata() or ():
        if name == "retry-after-ms":
            found["trailer_ms"] = int(value)
        if name == "grpc-status-details-bin":
            status = status_pb2.Status.FromString(value)
            assert status.code == error.code().value[0]
            for detail in status.details:
                for kind in ("ErrorInfo", "BadRequest", "RetryInfo"):
                    message = getattr(error_details_pb2, kind)()
                    if detail.Unpack(message):
                        found[kind] = message
    return found


# -- answers ---------------------------------------------------------------------------------


async def test_generate_and_stream_agree(front):
    whole = await front.stub.Generate(request(n=2))
    parts = [part async for part in front.stub.GenerateStream(request(n=2))]
    for index in (0, 1):
        (output,) = [o for o in whole.outputs if o.index == index]
        mine = [o for part in parts for o in part.outputs if o.index == index]
        assert output.text == "".join(o.text for o in mine)
        assert list(output.token_ids) == [i for o in mine for i in o.token_ids]
        assert (output.finish_reason, mine[-1].finish_reason) == ("length", "length")
        assert mine[-1].usage.completion_tokens == 20
        assert not any(o.HasField("usage") for o in mine[:-1])
    assert whole.seed == parts[0].seed == 7
    assert all(part.request_id == parts[0].request_id for part in parts)
    assert whole.request_id != parts[0].request_id


async def test_usage_has_its_timings(front):
    reply = await front.stub.Generate(request())
    usage = reply.outputs[0].usage
    assert (usage.prompt_tokens, usage.replica) == (6, "r0")
    assert usage.timings.prefill_s == 0.5
    assert 0 < usage.timings.first_token_s <= usage.timings.total_s
    nothing = await front.stub.Generate(request(max_tokens=0))
    assert not nothing.outputs[0].usage.timings.HasField("first_token_s")


async def test_logprobs_on_the_wire(front):
    reply = await front.stub.Generate(request(logprobs=2, prompt_logprobs=1, max_tokens=3))
    entries = reply.outputs[0].logprobs
    assert [entry.token_id for entry in entries] == list(reply.outputs[0].token_ids)
    assert entries[0].top[0].token_id == entries[0].token_id
    assert len(entries[0].top) == 2
    assert [entry.rank for entry in reply.prompt_logprobs] == [0, 1, 1, 1, 1, 1]
    assert reply.prompt_logprobs[0].token_id == 256


async def test_token_ids_chat_and_options_reach_the_engine(front):
    await front.stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6])))
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    await front.stub.Generate(
        pb.GenerateRequest(
            chat=chat,
            sampling=pb.Sampling(max_tokens=1, top_p=0.5, logit_bias={3: -1.0}),
            cache_salt="salt",
            priority=-4,
            admission_class="guaranteed",
        ),
        metadata=(("pagefleet-tenant", "me"), ("retry-token", "rt")),
    )
    first, second = front.engine.submitted
    assert first.prompt_token_ids == (5, 6)
    assert first.sampling.max_tokens is None
    assert second.prompt_token_ids == tuple(ids_of("<user>hi\n<assistant>"))
    assert (second.sampling.top_p, second.sampling.logit_bias) == (0.5, ((3, -1.0),))
    assert (second.cache_salt, second.priority, second.admission_class) == (
        "salt",
        -4,
        "guaranteed",
    )
    reserved = front.controller.reserved[1]
    assert (reserved.tenant, reserved.retry_token) == ("me", "rt")
    assert reserved.route_hashes != front.controller.reserved[0].route_hashes


async def test_tokenize_and_detokenize(front):
    reply = await front.stub.Tokenize(pb.TokenizeRequest(text="hé"))
    assert list(reply.token_ids) == [256, *ids_of("hé")]
    assert reply.max_context == 512
    bare = await front.stub.Tokenize(pb.TokenizeRequest(text="hé", add_special_tokens=False))
    assert list(bare.token_ids) == ids_of("hé")
    back = await front.stub.Detokenize(pb.DetokenizeRequest(token_ids=[*reply.token_ids, 257]))
    assert back.text == "hé"
    full = pb.DetokenizeRequest(token_ids=[257], skip_special_tokens=False)
    assert (await front.stub.Detokenize(full)).text == EOS
    too_many = pb.DetokenizeRequest(token_ids=[97] * 513)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await front.stub.Detokenize(too_many)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_models_and_cluster_state(front):
    (model,) = (await front.stub.ListModels(pb.ListModelsRequest())).models
    assert (model.id, model.block_size, model.bos_token_id) == ("tiny", 16, 256)
    assert model.has_chat_template
    state = await front.stub.GetClusterState(pb.GetClusterStateRequest())
    assert [replica.state for replica in state.replicas] == ["ready", "ready"]
    device = state.replicas[0].device
    assert device.clean + device.cached_idle + device.referenced + device.fenced == device.total
    assert (state.queued_requests, state.policy) == (1, "default")


async def test_watch_cluster_streams_what_changes(front):
    call = front.stub.WatchCluster(pb.WatchClusterRequest(period_s=0.2))
    first = await call.read()
    assert first.state.policy == "default" and len(first.state.replicas) == 2
    maps = {(pool.replica_id, pool.tier): pool for pool in first.pools}
    assert len(maps) == 4 and maps["replica-0", "host"].num_blocks == 8
    assert len(maps["replica-1", "device"].cells) == 16
    assert [waiting.tenant for waiting in first.waiting] == ["acme", "globex"]
    assert (len(first.leases), first.num_leases) == (2, 102)
    assert [decision.number for decision in first.decisions] == list(range(1, 41))
    grant = first.decisions[0]
    assert (grant.decision, grant.replicas[0].replica_id) == ("grant", grant.replica_id)
    assert not first.prefixes[0].HasField("parent") and first.prefixes[1].parent == 0
    assert first.rates.tokens_per_s == 0.0 and not first.rates.HasField("ttft_p50_s")
    await front.run(GenerateCall(TextPrompt("hi"), sampling=SamplingParams(max_tokens=3)))
    second = await call.read()
    assert (len(second.pools), len(second.decisions)) == (0, 0), "nothing of these has changed"
    assert second.rates.tokens_per_s > 0.0 and second.rates.ttft_p50_s > 0.0
    call.cancel()


async def test_watch_cluster_refuses_an_odd_period(front):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await front.stub.WatchCluster(pb.WatchClusterRequest(period_s=0.01)).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details_of(caught.value)["BadRequest"].field_violations[0].field == "period_s"


async def test_explain_reserves_nothing(front):
    reply = await front.stub.Explain(request("x" * 20))
    assert (reply.decision, reply.replica_id, reply.prompt_tokens) == ("grant", "r0", 21)
    assert reply.reason == "21 tokens"
    costs = reply.replicas[1]
    terms = ("prefill_ms", "load_ms", "queue_ms", "blocks_ms", "batch_ms", "affinity_ms")
    assert sum(getattr(costs, term) for term in terms) == costs.total_ms
    assert not front.controller.reserved
    front.controller.answers.append(Refused("k", 1, "Overloaded", "full", 1.0))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await front.stub.Explain(request())
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


# -- the table of errors ---------------------------------------------------------------------

BIG = 17 * 2**20
UTF8 = pb.GenerateRequest(text="MARK").SerializeToString().replace(b"MARK", b"a\xffbc")

BAD_REQUESTS = [
    (UTF8, "text"),
    (b"\x0a\xff", "request"),
    (b"\x12" + b"x" * BIG, "request"),
    (pb.GenerateRequest(), "prompt"),
    (pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 258])), "token_ids.ids"),
    (pb.GenerateRequest(text="", add_special_tokens=False), "text"),
    (request("x" * 600), "text"),
    (request(max_tokens=2**31), "sampling.max_tokens"),
    (request(temperature=float("nan")), "sampling.temperature"),
    (request(top_p=0.0), "sampling.top_p"),
    (request(n=4096), "sampling.n"),
    (pb.GenerateRequest(text="x", admission_class="gold"), "admission_class"),
]


@pytest.mark.parametrize(("message", "field"), BAD_REQUESTS)
async def test_a_bad_request_is_invalid_argument_with_its_field(front, message, field):
    data = message if isinstance(message, bytes) else message.SerializeToString()
    for method in (GENERATE, GENERATE + "Stream"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            if method == GENERATE:
                await front.send_raw(data)
            else:
                await front.channel.unary_stream(method)(data).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        details = details_of(caught.value)
        assert details["BadRequest"].field_violations[0].field == field
        assert details["ErrorInfo"].reason == "INVALID_ARGUMENT"
        assert "RetryInfo" not in details
        assert "trailer_ms" not in details
    assert not front.engine.submitted


REFUSALS = [
    (Refused("k", 1, "InvalidArgument", "text: 99 blocks can never fit"), "INVALID_ARGUMENT", None),
    (Refused("k", 1, "ModelNotFound", "no such model"), "NOT_FOUND", None),
    (Refused("k", 1, "PermissionDenied", "not yours"), "PERMISSION_DENIED", None),
    (Refused("k", 1, "Unauthenticated", "who?"), "UNAUTHENTICATED", None),
    (Refused("k", 1, "Overloaded", "queue full", 1.25, "tok"), "RESOURCE_EXHAUSTED", 1250),
    (Refused("k", 1, "Unavailable", "no replica is ready", 2.0), "UNAVAILABLE", 2000),
    (Refused("k", 1, "DeadlineExceeded", "it waited too long"), "DEADLINE_EXCEEDED", None),
    (Refused("k", 1, "NoSuchError", "our bug"), "INTERNAL", None),
]


@pytest.mark.parametrize(("refused", "code", "retry_ms"), REFUSALS)
async def test_a_refusal_has_its_code_and_a_hint_only_where_a_retry_helps(
    front, refused, code, retry_ms
):
    front.controller.answers.append(refused)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await front.stub.Generate(request())
    assert caught.value.code().name == code
    details = details_of(caught.value)
    assert details.get("trailer_ms") == retry_ms
    if retry_ms is None:
        assert "RetryInfo" not in details
    else:
        assert details["RetryInfo"].retry_delay.ToMilliseconds() == retry_ms
    assert details["ErrorInfo"].metadata.get("retry_token", "") == refused.retry_token


async def test_unknown_model_and_no_replica(front):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await front.stub.Generate(pb.GenerateRequest(text="x", model="other"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    front.controller.cards = ()
    await front.gateway.models()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await front.stub.Generate(request())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert details_of(caught.value)["trailer_ms"] > 0


async def test_a_replica_that_crashes_for_good_is_unavailable(front):
    front.engine.token_budget = 5
    front.engine.on_budget = lambda: [leader.kill() for leader in front.leaders]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await front.stub.Generate(request())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "RetryInfo" in details_of(caught.value)


async def test_a_long_message_does_not_burst_the_trailers(front):
    front.controller.answers.append(Refused("k", 1, "Overloaded", "é" * 20_000, 1.0))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await front.stub.Generate(request())
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(caught.value.details()) == 500


async def test_our_own_bug_is_internal_and_tells_nothing(front, caplog):
    front.controller.answers.append(KeyError("/secret/path"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await front.stub.Generate(request())
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in caught.value.details()
    assert "secret" in caplog.text
    assert (await front.stub.Generate(request())).outputs[0].finish_reason == "length"


# -- deadline, cancel, disconnect ------------------------------------------------------------


@pytest.mark.parametrize("queued", [True, False])
async def test_a_deadline_queued_or_running(front, queued):
    front.controller.is_full = queued
    front.engine.gate.clear()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await front.stub.Generate(request(), timeout=0.8)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0 < front.controller.reserved[0].deadline_s <= 0.8
    await until(lambda: front.controller.released, front.controller.changed)
    assert bool(front.engine.submitted) != queued


async def test_without_a_deadline_there_is_none(front):
    await front.stub.Generate(request(max_tokens=1))
    assert front.controller.reserved[0].deadline_s is None
    assert front.engine.submitted[0].deadline_s is None


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("where", ["queue", "prefill", "decode"])
async def test_a_client_that_goes_away_frees_its_place(front, where, is_stream):
    front.controller.is_full = where == "queue"
    front.engine.token_budget = 5
    if where == "prefill":
        front.engine.gate.clear()
    method = front.stub.GenerateStream if is_stream else front.stub.Generate
    call = method(request())
    waiting = asyncio.ensure_future(call.read() if is_stream else call)
    if where == "queue":
        await until(lambda: front.controller.queue, front.controller.changed)
    else:
        await until(lambda: front.engine.submitted, front.engine.changed)
    call.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await until(lambda: front.controller.released, front.controller.changed)
    if where != "queue":
        await until(lambda: front.engine.cancelled, front.engine.changed)
    assert front.gateway.num_running == 0


async def test_cancel_from_another_connection(front):
    front.engine.gate.clear()
    mine = (("pagefleet-tenant", "me"),)
    message = request()
    message.request_id = "chosen"
    call = front.stub.Generate(message, metadata=mine)
    await until(lambda: front.engine.submitted, front.engine.changed)
    cancel = pb.CancelRequest(request_id="chosen")
    assert (await front.stub.Cancel(cancel)).num_cancelled == 0, "another tenant's"
    assert (await front.stub.Cancel(cancel, metadata=mine)).num_cancelled == 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await front.stub.Cancel(pb.CancelRequest())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# -- the standard services -------------------------------------------------------------------


async def test_health_follows_readiness_and_shutdown(front):
    stub = health_pb2_grpc.HealthStub(front.channel)
    check = health_pb2.HealthCheckRequest(service="pagefleet.v1.Inference")
    kinds = health_pb2.HealthCheckResponse
    assert (await stub.Check(check)).status == kinds.NOT_SERVING
    await front.server.set_serving(True)
    assert (await stub.Check(check)).status == kinds.SERVING
    assert (await stub.Check(health_pb2.HealthCheckRequest())).status == kinds.SERVING


async def test_reflection_lists_the_service(front):
    stub = reflection_pb2_grpc.ServerReflectionStub(front.channel)
    call = stub.ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    )
    reply = await call.read()
    names = {service.name for service in reply.list_services_response.service}
    assert {"pagefleet.v1.Inference", "grpc.health.v1.Health"} <= names


async def test_a_stopping_server_lets_a_stream_end():
    async with GrpcFront() as front:
        front.engine.token_budget = 5
        call = aiter(front.stub.GenerateStream(request()))
        assert (await anext(call)).outputs
        stopping = asyncio.ensure_future(front.server.stop(10))
        front.engine.gate.set()
        parts = [part async for part in call]
        assert parts[-1].outputs[0].finish_reason == "length"
        await stopping


async def test_an_alias_is_answered_with_the_models_name(front):
    front.controller.cards = (make_card("tiny", aliases=("small",)),)
    await front.gateway.models()
    reply = await front.stub.Generate(
        pb.GenerateRequest(text="x", model="small", sampling=pb.Sampling(max_tokens=1))
    )
    assert reply.model == "tiny"
