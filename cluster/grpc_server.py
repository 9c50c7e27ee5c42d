"""`pagefleet.v1.Inference` and `Admin` over grpc.aio: the gateway for gRPC clients.

Turns messages into calls of the gateway and errors into statuses; adds the standard health
service and reflection. Deadlines and cancellation are gRPC's own. Decides nothing.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ..protos import inference_pb2 as pb
from ..protos.deserializer import Malformed, make_deserializer
from ..protos.errors import InternalError, InvalidArgument, PagefleetError
from ..protos.messages import TraceContext
from . import proto_conversion as convert
from .access import Access, Caller
from .cluster_watch import DEFAULT_PERIOD_S
from .draining import DRAIN_S, LAST_DRAIN_S
from .gateway import Gateway
from .generation import GenerateCall, OutputDelta, merge_deltas
from .grpc_errors import status_of
from .metrics import GatewayMetrics
from .tls import TlsFiles, grpc_credentials
from .validation import RequestLimits
from .watch_conversion import update_to_proto

logger = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
ADMIN_SERVICE = pb.DESCRIPTOR.services_by_name["Admin"].full_name
KEY_METADATA = "authorization"
TENANT_METADATA = "pagefleet-tenant"
RETRY_TOKEN_METADATA = "retry-token"

_MAX_REQUEST_BYTES = 16 * 2**20
# gRPC refuses above this itself, and knows no field to blame.
_HARD_LIMIT_BYTES = 64 * 2**20

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)
Context = grpc.aio.ServicerContext[Message, Message]


@dataclass(frozen=True, slots=True)
class Rpc:
    """One call: gRPC's side of it, and who calls."""

    context: Context
    caller: Caller
    limits: RequestLimits

    def generate_call(self, request: pb.GenerateRequest) -> GenerateCall:
        """The request as this caller's."""
        call = convert.call_from_proto(
            request,
            self.limits,
            tenant=self.caller.tenant,
            deadline_s=self.context.time_remaining(),
            retry_token=_metadata(self.context, RETRY_TOKEN_METADATA),
        )
        return self.caller.own(replace(call, trace=_trace(self.context)))


_Unary = Callable[[RequestT, Rpc], Awaitable[ResponseT]]
_Stream = Callable[[RequestT, Rpc], Awaitable[None]]


class InferenceServicer:
    """The RPCs, one method each. They raise from the error tree; `GrpcServer` makes statuses."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def generate(self, request: pb.GenerateRequest, rpc: Rpc) -> pb.GenerateResponse:
        """All deltas in one message."""
        generation = await self._gateway.generate(rpc.generate_call(request))
        deltas: list[OutputDelta] = []
        try:
            async for batch in generation:
                deltas.extend(batch)
        finally:
            await generation.aclose()
        return convert.response_to_proto(generation, merge_deltas(deltas), is_first=True)

    async def generate_stream(self, request: pb.GenerateRequest, rpc: Rpc) -> None:
        """A message per batch of deltas.

        Written, not yielded: a call that is cancelled while gRPC sends must still end here.
        """
        call = rpc.generate_call(request)
        if call.sampling.beam_width > 1:
            problem = "beam search knows its results only at its end: call Generate"
            raise InvalidArgument("sampling.beam_width", problem)
        generation = await self._gateway.generate(call)
        is_first = True
        try:
            async for batch in generation:
                deltas = merge_deltas(batch)
                response = convert.response_to_proto(generation, deltas, is_first=is_first)
                await rpc.context.write(response)
                is_first = False
        finally:
            await generation.aclose()

    async def tokenize(self, request: pb.TokenizeRequest, rpc: Rpc) -> pb.TokenizeResponse:
        """The ids a prompt becomes."""
        prompt = convert.tokenize_prompt_from_proto(request, rpc.limits)
        tokenized = await self._gateway.tokenize(request.model, prompt)
        card = tokenized.model.card
        return pb.TokenizeResponse(
            model=card.model, token_ids=tokenized.token_ids, max_context=card.max_context
        )

    async def detokenize(self, request: pb.DetokenizeRequest, _: Rpc) -> pb.DetokenizeResponse:
        """The text of ids."""
        has_choice = request.HasField("skip_special_tokens")
        model, text = await self._gateway.detokenize(
            request.model,
            list(request.token_ids),
            skip_special_tokens=request.skip_special_tokens if has_choice else True,
        )
        return pb.DetokenizeResponse(model=model.card.model, text=text)

    async def list_models(self, _: pb.ListModelsRequest, __: Rpc) -> pb.ListModelsResponse:
        """The models that have a replica."""
        models = await self._gateway.models()
        return pb.ListModelsResponse(models=[convert.model_to_proto(model) for model in models])

    async def get_cluster_state(
        self, _: pb.GetClusterStateRequest, rpc: Rpc
    ) -> pb.GetClusterStateResponse:
        """Replicas and their blocks."""
        rpc.caller.require_admin()
        return convert.cluster_state_to_proto(await self._gateway.cluster_state())

    async def watch_cluster(self, request: pb.WatchClusterRequest, rpc: Rpc) -> None:
        """A message per period, until the client has enough."""
        rpc.caller.require_admin()
        period_s = request.period_s if request.HasField("period_s") else DEFAULT_PERIOD_S
        async with aclosing(self._gateway.watch_cluster(period_s)) as updates:
            async for update in updates:
                await rpc.context.write(update_to_proto(update))

    async def explain(self, request: pb.GenerateRequest, rpc: Rpc) -> pb.ExplainResponse:
        """What would happen to a request."""
        prepared, answer = await self._gateway.explain(rpc.generate_call(request))
        return convert.explanation_to_proto(prepared, answer)

    async def cancel(self, request: pb.CancelRequest, rpc: Rpc) -> pb.CancelResponse:
        """End one's own requests of an id."""
        if not request.request_id:
            raise InvalidArgument("request_id", "is empty")
        num_cancelled = self._gateway.cancel(rpc.caller.tenant, request.request_id)
        return pb.CancelResponse(num_cancelled=num_cancelled)


class AdminServicer:
    """`pagefleet.v1.Admin`: what changes the cluster itself."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def drain(self, request: pb.DrainRequest, rpc: Rpc) -> pb.DrainResponse:
        """Take a replica out."""
        rpc.caller.require_admin()
        drain_s = request.drain_s if request.HasField("drain_s") else DRAIN_S
        await self._gateway.drain(request.replica_id, drain_s)
        return pb.DrainResponse()

    async def reset_prefix_cache(
        self, request: pb.ResetPrefixCacheRequest, rpc: Rpc
    ) -> pb.ResetPrefixCacheResponse:
        """Forget what is cached."""
        rpc.caller.require_admin()
        done = await self._gateway.reset_prefix_cache(request.model)
        return pb.ResetPrefixCacheResponse(
            replicas=[
                pb.CacheReset(
                    replica_id=reset.replica_id, num_blocks=reset.num_blocks, epoch=reset.epoch
                )
                for reset in done
            ]
        )

    async def update_weights(
        self, request: pb.UpdateWeightsRequest, rpc: Rpc
    ) -> pb.UpdateWeightsResponse:
        """New weights for a model."""
        rpc.caller.require_admin()
        drain_s = request.drain_s if request.HasField("drain_s") else LAST_DRAIN_S
        version = await self._gateway.update_weights(request.model, request.checkpoint, drain_s)
        return pb.UpdateWeightsResponse(weights_version=version)


class GrpcServer:
    """The server: services, health, reflection, and a graceful end."""

    def __init__(
        self, gateway: Gateway, access: Access | None = None, tls: TlsFiles | None = None
    ) -> None:
        self._tls = tls
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", _HARD_LIMIT_BYTES),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
            ]
        )
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        door = _Door(access or Access(), gateway.limits, gateway.metrics)
        self._server.add_generic_rpc_handlers(
            (
                _handlers(InferenceServicer(gateway), door),
                _admin_handlers(AdminServicer(gateway), door),
            )
        )
        names = (SERVICE, ADMIN_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self, host: str, port: int) -> int:
        """Listen; the port is chosen where it is 0. NOT_SERVING until `set_serving`."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound = (
                self._server.add_insecure_port(address)
                if self._tls is None
                else self._server.add_secure_port(address, grpc_credentials(self._tls))
            )
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}") from error
        await self.set_serving(False)
        await self._server.start()
        return bound

    async def set_serving(self, is_serving: bool) -> None:
        """What the health service answers, for the service and for the server as a whole."""
        kinds = health_pb2.HealthCheckResponse
        status = kinds.SERVING if is_serving else kinds.NOT_SERVING
        for service in ("", SERVICE, ADMIN_SERVICE):
            await self._health.set(service, status)

    async def stop(self, grace_s: float) -> None:
        """NOT_SERVING at once, no new calls; running ones have `grace_s` to end."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


class _Door:
    """What every RPC passes: in, its caller is identified; out, errors become statuses."""

    def __init__(self, access: Access, limits: RequestLimits, metrics: GatewayMetrics) -> None:
        self._access = access
        self._limits = limits
        self._metrics = metrics

    def unary(
        self, method: _Unary[RequestT, ResponseT], request_type: type[RequestT]
    ) -> "grpc.RpcMethodHandler[RequestT | Malformed, ResponseT]":
        """A method with one answer."""

        async def answer(request: RequestT | Malformed, context: Context) -> ResponseT | None:
            try:
                return await method(*self._enter(request, context))
            except Exception as error:  # the edge of the process: a status is due
                await self._abort(context, error)

        return grpc.unary_unary_rpc_method_handler(
            answer,
            request_deserializer=make_deserializer(request_type, _MAX_REQUEST_BYTES),
            response_serializer=_serialize,
        )

    def streaming(
        self, method: _Stream[RequestT], request_type: type[RequestT]
    ) -> "grpc.RpcMethodHandler[RequestT | Malformed, Message]":
        """A method that writes its answers."""

        async def answer(request: RequestT | Malformed, context: Context) -> None:
            try:
                await method(*self._enter(request, context))
            except Exception as error:  # the edge of the process: a status is due
                await self._abort(context, error)

        return grpc.unary_stream_rpc_method_handler(
            answer,
            request_deserializer=make_deserializer(request_type, _MAX_REQUEST_BYTES),
            response_serializer=_serialize,
        )

    def _enter(self, request: RequestT | Malformed, context: Context) -> tuple[RequestT, Rpc]:
        """Who has no key learns nothing of what is wrong with the request."""
        caller = self._access.identify(
            _metadata(context, KEY_METADATA), _metadata(context, TENANT_METADATA)
        )
        if isinstance(request, Malformed):
            raise request.error
        return request, Rpc(context, caller, self._limits)

    async def _abort(self, context: Context, error: Exception) -> None:
        if not isinstance(error, PagefleetError):
            logger.exception("an RPC failed", exc_info=error)
            error = InternalError("a fault in the server; its log says more")
        self._metrics.count_error("grpc", error)
        code, details, trailers = status_of(error)
        await context.abort(code, details, trailers)


def _handlers(servicer: InferenceServicer, door: _Door) -> grpc.GenericRpcHandler:
    """The method table, with our own deserializers."""
    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "Generate": door.unary(servicer.generate, pb.GenerateRequest),
            "GenerateStream": door.streaming(servicer.generate_stream, pb.GenerateRequest),
            "Tokenize": door.unary(servicer.tokenize, pb.TokenizeRequest),
            "Detokenize": door.unary(servicer.detokenize, pb.DetokenizeRequest),
            "ListModels": door.unary(servicer.list_models, pb.ListModelsRequest),
            "GetClusterState": door.unary(servicer.get_cluster_state, pb.GetClusterStateRequest),
            "WatchCluster": door.streaming(servicer.watch_cluster, pb.WatchClusterRequest),
            "Explain": door.unary(servicer.explain, pb.GenerateRequest),
            "Cancel": door.unary(servicer.cancel, pb.CancelRequest),
        },
    )


def _admin_handlers(servicer: AdminServicer, door: _Door) -> grpc.GenericRpcHandler:
    return grpc.method_handlers_generic_handler(
        ADMIN_SERVICE,
        {
            "Drain": door.unary(servicer.drain, pb.DrainRequest),
            "ResetPrefixCache": door.unary(servicer.reset_prefix_cache, pb.ResetPrefixCacheRequest),
            "UpdateWeights": door.unary(servicer.update_weights, pb.UpdateWeightsRequest),
        },
    )


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _metadata(context: Context, key: str) -> str:
    return next(iter(_all_metadata(context, key)), "")


def _all_metadata(context: Context, key: str) -> list[str]:
    entries = context.invocation_metadata() or ()
    return [value for name, value in entries if name == key and isinstance(value, str)]


def _trace(context: Context) -> TraceContext:
    tracestate = ",".join(_all_metadata(context, "tracestate"))  # it may come in parts
    return TraceContext(_metadata(context, "traceparent"), tracestate)
