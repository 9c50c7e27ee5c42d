"""A typed Python client of `pagefleet.v1.Inference`, sync and async.

    with Client("localhost:50051") as client:
        for part in client.stream("The sea is", SamplingParams(max_tokens=32)):
            print(part.text, end="", flush=True)

Without arguments of their own, clients take their API key from `PAGEFLEET_API_KEY`, and speak TLS
where `PAGEFLEET_TLS_CA` names a file of certificate authorities.
Errors of the server are raised as the classes of `pagefleet.protos.errors`. Knows the public
proto only; it needs nothing of a cluster but its address.
"""

from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, closing
from types import TracebackType
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from ..protos import inference_pb2 as pb
from ..protos.messages import SamplingParams
from .client_messages import (
    Chat,
    ChatMessage,
    Completion,
    Logprobs,
    Model,
    Output,
    Prompt,
    RequestOptions,
    caller_metadata,
    completion_from,
    credentials_from_environment,
    deserializer,
    error_of,
    generate_request,
    model_from,
    serialize,
    tokenize_request,
)
from .grpc_errors import Metadata

__all__ = [
    "AsyncClient",
    "Chat",
    "Client",
    "Completion",
    "Logprobs",
    "Model",
    "Output",
    "RequestOptions",
    "SamplingParams",
]

_SERVICE = f"/{pb.DESCRIPTOR.services_by_name['Inference'].full_name}/"
_ADMIN_SERVICE = f"/{pb.DESCRIPTOR.services_by_name['Admin'].full_name}/"
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)

ResponseT = TypeVar("ResponseT", bound=Message)


class Client:
    """Blocking calls. One channel, to be used from any number of threads."""

    def __init__(
        self,
        target: str,
        *,
        tenant: str = "",
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._target = target
        self._metadata = caller_metadata(tenant, api_key)
        credentials = credentials or credentials_from_environment()
        self._channel = (
            grpc.insecure_channel(target, options=_CHANNEL_OPTIONS)
            if credentials is None
            else grpc.secure_channel(target, credentials, options=_CHANNEL_OPTIONS)
        )

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        model: str = "",
        timeout_s: float | None = None,
        options: RequestOptions | None = None,
    ) -> Completion:
        """The whole answer."""
        request, metadata = generate_request(prompt, sampling, model, options)
        reply = self._call("Generate", request, pb.GenerateResponse, timeout_s, metadata)
        return completion_from(reply)

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        model: str = "",
        timeout_s: float | None = None,
        options: RequestOptions | None = None,
    ) -> Generator[Completion]:
        """The answer as it comes. Closing the iterator cancels the request."""
        request, metadata = generate_request(prompt, sampling, model, options)
        stream = self._stream("GenerateStream", request, pb.GenerateResponse, timeout_s, metadata)
        with closing(stream) as responses:
            for response in responses:
                yield completion_from(response)

    def chat(
        self,
        messages: Sequence[ChatMessage],
        sampling: SamplingParams | None = None,
        *,
        model: str = "",
        timeout_s: float | None = None,
        options: RequestOptions | None = None,
    ) -> Completion:
        """The assistant's answer to a conversation."""
        return self.generate(
            Chat(messages), sampling, model=model, timeout_s=timeout_s, options=options
        )

    def tokenize(
        self, prompt: str | Chat, *, model: str = "", add_special_tokens: bool = True
    ) -> list[int]:
        """The token ids a prompt becomes."""
        request = tokenize_request(prompt, model, add_special_tokens)
        return list(self._call("Tokenize", request, pb.TokenizeResponse).token_ids)

    def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True
    ) -> str:
        """The text of token ids."""
        request = pb.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        return self._call("Detokenize", request, pb.DetokenizeResponse).text

    def models(self) -> list[Model]:
        """The models that have a replica."""
        reply = self._call("ListModels", pb.ListModelsRequest(), pb.ListModelsResponse)
        return [model_from(model) for model in reply.models]

    def cluster_state(self) -> pb.GetClusterStateResponse:
        """Every replica with the blocks of its pools."""
        request = pb.GetClusterStateRequest()
        return self._call("GetClusterState", request, pb.GetClusterStateResponse)

    def watch_cluster(self, period_s: float | None = None) -> Generator[pb.ClusterUpdate]:
        """All that a dashboard shows, each period. Closing the iterator ends it."""
        request = pb.WatchClusterRequest(period_s=period_s)
        yield from self._stream("WatchCluster", request, pb.ClusterUpdate)

    def explain(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        model: str = "",
        options: RequestOptions | None = None,
    ) -> pb.ExplainResponse:
        """What would happen to this request now, and why."""
        request, metadata = generate_request(prompt, sampling, model, options)
        return self._call("Explain", request, pb.ExplainResponse, metadata=metadata)

    def cancel(self, request_id: str) -> int:
        """End one's requests of that id; how many there were."""
        request = pb.CancelRequest(request_id=request_id)
        return self._call("Cancel", request, pb.CancelResponse).num_cancelled

    def drain(self, replica_id: str, drain_s: float | None = None) -> None:
        """Take a replica out of the cluster; its streams may go on for `drain_s`, then move."""
        request = pb.DrainRequest(replica_id=replica_id, drain_s=drain_s)
        self._call("Drain", request, pb.DrainResponse, service=_ADMIN_SERVICE)

    def reset_prefix_cache(self, model: str = "") -> pb.ResetPrefixCacheResponse:
        """Forget every cached prefix, of one model or of all; returns once it is done."""
        request = pb.ResetPrefixCacheRequest(model=model)
        kind = pb.ResetPrefixCacheResponse
        return self._call("ResetPrefixCache", request, kind, service=_ADMIN_SERVICE)

    def update_weights(self, checkpoint: str, model: str = "", drain_s: float | None = None) -> int:
        """New weights for a model, one replica after the other; their version."""
        request = pb.UpdateWeightsRequest(model=model, checkpoint=checkpoint, drain_s=drain_s)
        kind = pb.UpdateWeightsResponse
        answer = self._call("UpdateWeights", request, kind, service=_ADMIN_SERVICE)
        return answer.weights_version

    def _stream(
        self,
        name: str,
        request: Message,
        response_type: type[ResponseT],
        timeout_s: float | None = None,
        metadata: Metadata = (),
    ) -> Generator[ResponseT]:
        """The messages of a call; it is cancelled when the generator is closed."""
        method = self._channel.unary_stream(
            f"{_SERVICE}{name}",
            request_serializer=serialize,
            response_deserializer=response_type.FromString,
        )
        call = method(request, timeout=timeout_s, metadata=(*self._metadata, *metadata))
        try:
            yield from call
        except grpc.RpcError as error:
            raise error_of(error, self._target) from error
        finally:
            call.cancel()

    def _call(
        self,
        name: str,
        request: Message,
        response_type: type[ResponseT],
        timeout_s: float | None = None,
        metadata: Metadata = (),
        service: str = _SERVICE,
    ) -> ResponseT:
        method = self._channel.unary_unary(
            f"{service}{name}",
            request_serializer=serialize,
            response_deserializer=deserializer(response_type),
        )
        try:
            return method(request, timeout=timeout_s, metadata=(*self._metadata, *metadata))
        except grpc.RpcError as error:
            raise error_of(error, self._target) from error


class AsyncClient:
    """The same for asyncio. Make it inside the loop that uses it."""

    def __init__(
        self,
        target: str,
        *,
        tenant: str = "",
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._target = target
        self._metadata = caller_metadata(tenant, api_key)
        credentials = credentials or credentials_from_environment()
        self._channel = (
            grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
            if credentials is None
            else grpc.aio.secure_channel(target, credentials, options=_CHANNEL_OPTIONS)
        )

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        model: str = "",
        timeout_s: float | None = None,
        options: RequestOptions | None = None,
    ) -> Completion:
        """The whole answer."""
        request, metadata = generate_request(prompt, sampling, model, options)
        reply = await self._call("Generate", request, pb.GenerateResponse, timeout_s, metadata)
        return completion_from(reply)

    async def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        model: str = "",
        timeout_s: float | None = None,
        options: RequestOptions | None = None,
    ) -> AsyncGenerator[Completion]:
        """The answer as it comes. Closing the iterator cancels the request."""
        request, metadata = generate_request(prompt, sampling, model, options)
        stream = self._stream("GenerateStream", request, pb.GenerateResponse, timeout_s, metadata)
        async with aclosing(stream) as responses:
            async for response in responses:
                yield completion_from(response)

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        sampling: SamplingParams | None = None,
        *,
        model: str = "",
        timeout_s: float | None = None,
        options: RequestOptions | None = None,
    ) -> Completion:
        """The assistant's answer to a conversation."""
        return await self.generate(
            Chat(messages), sampling, model=model, timeout_s=timeout_s, options=options
        )

    async def tokenize(
        self, prompt: str | Chat, *, model: str = "", add_special_tokens: bool = True
    ) -> list[int]:
        """The token ids a prompt becomes."""
        request = tokenize_request(prompt, model, add_special_tokens)
        return list((await self._call("Tokenize", request, pb.TokenizeResponse)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True
    ) -> str:
        """The text of token ids."""
        request = pb.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        return (await self._call("Detokenize", request, pb.DetokenizeResponse)).text

    async def models(self) -> list[Model]:
        """The models that have a replica."""
        reply = await self._call("ListModels", pb.ListModelsRequest(), pb.ListModelsResponse)
        return [model_from(model) for model in reply.models]

    async def cluster_state(self) -> pb.GetClusterStateResponse:
        """Every replica with the blocks of its pools."""
        request = pb.GetClusterStateRequest()
        return await self._call("GetClusterState", request, pb.GetClusterStateResponse)

    async def watch_cluster(
        self, period_s: float | None = None
    ) -> AsyncGenerator[pb.ClusterUpdate]:
        """All that a dashboard shows, each period. Closing the iterator ends it."""
        request = pb.WatchClusterRequest(period_s=period_s)
        async with aclosing(self._stream("WatchCluster", request, pb.ClusterUpdate)) as updates:
            async for update in updates:
                yield update

    async def explain(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        model: str = "",
        options: RequestOptions | None = None,
    ) -> pb.ExplainResponse:
        """What would happen to this request now, and why."""
        request, metadata = generate_request(prompt, sampling, model, options)
        return await self._call("Explain", request, pb.ExplainResponse, metadata=metadata)

    async def cancel(self, request_id: str) -> int:
        """End one's requests of that id; how many there were."""
        request = pb.CancelRequest(request_id=request_id)
        return (await self._call("Cancel", request, pb.CancelResponse)).num_cancelled

    async def drain(self, replica_id: str, drain_s: float | None = None) -> None:
        """Take a replica out of the cluster; its streams may go on for `drain_s`, then move."""
        request = pb.DrainRequest(replica_id=replica_id, drain_s=drain_s)
        await self._call("Drain", request, pb.DrainResponse, service=_ADMIN_SERVICE)

    async def reset_prefix_cache(self, model: str = "") -> pb.ResetPrefixCacheResponse:
        """Forget every cached prefix, of one model or of all; returns once it is done."""
        request = pb.ResetPrefixCacheRequest(model=model)
        kind = pb.ResetPrefixCacheResponse
        return await self._call("ResetPrefixCache", request, kind, service=_ADMIN_SERVICE)

    async def update_weights(
        self, checkpoint: str, model: str = "", drain_s: float | None = None
    ) -> int:
        """New weights for a model, one replica after the other; their version."""
        request = pb.UpdateWeightsRequest(model=model, checkpoint=checkpoint, drain_s=drain_s)
        kind = pb.UpdateWeightsResponse
        answer = await self._call("UpdateWeights", request, kind, service=_ADMIN_SERVICE)
        return answer.weights_version

    async def _stream(
        self,
        name: str,
        request: Message,
        response_type: type[ResponseT],
        timeout_s: float | None = None,
        metadata: Metadata = (),
    ) -> AsyncGenerator[ResponseT]:
        """The messages of a call; it is cancelled when the generator is closed."""
        method = self._channel.unary_stream(
            f"{_SERVICE}{name}",
            request_serializer=serialize,
            response_deserializer=response_type.FromString,
        )
        call = method(request, timeout=timeout_s, metadata=(*self._metadata, *metadata))
        try:
            async for response in call:
                yield response
        except grpc.RpcError as error:
            raise error_of(error, self._target) from error
        finally:
            call.cancel()

    async def _call(
        self,
        name: str,
        request: Message,
        response_type: type[ResponseT],
        timeout_s: float | None = None,
        metadata: Metadata = (),
        service: str = _SERVICE,
    ) -> ResponseT:
        method = self._channel.unary_unary(
            f"{service}{name}",
            request_serializer=serialize,
            response_deserializer=deserializer(response_type),
        )
        try:
            return await method(request, timeout=timeout_s, metadata=(*self._metadata, *metadata))
        except grpc.RpcError as error:
            raise error_of(error, self._target) from error
