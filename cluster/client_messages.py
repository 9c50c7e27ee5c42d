"""What a client of `pagefleet.v1.Inference` sends and gets, as Python values, and both ways to
protobuf. Opens no connection.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from ..protos import inference_pb2 as pb
from ..protos.errors import InvalidArgument, PagefleetError, Unavailable
from ..protos.messages import AdmissionClass, FinishReason, SamplingParams
from .generation import GenerationUsage
from .grpc_errors import Metadata, error_from

API_KEY_VARIABLE = "PAGEFLEET_API_KEY"
CA_VARIABLE = "PAGEFLEET_TLS_CA"
# How gRPC begins its words where it reached no server.
_NOT_CONNECTED = "failed to connect to all addresses"

ChatMessage = Mapping[str, str]
ResponseT = TypeVar("ResponseT", bound=Message)


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt of messages with `role` and `content`, for the model's chat template."""

    messages: Sequence[ChatMessage]


Prompt = str | Sequence[int] | Chat


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What is seldom set; see GenerateRequest in inference.proto."""

    cache_salt: str = ""
    admission_class: AdmissionClass = AdmissionClass.STANDARD
    priority: int = 0
    request_id: str = ""
    resume_token_ids: Sequence[int] = ()
    add_special_tokens: bool = True
    retry_token: str = ""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """One position: the token, its log-probability and rank, and the best ones, best first.

    rank 0: the first prompt token, which has no probability.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens of one sample, or all of them; `finish_reason` and `usage` come with the last.

    score: of a beam search's result.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    finish_reason: FinishReason | None
    usage: GenerationUsage | None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer, or a part of one. seed: 0 in all but the first part of a stream."""

    request_id: str
    model: str
    outputs: tuple[Output, ...]
    seed: int
    prompt_logprobs: tuple[Logprobs, ...]

    @property
    def text(self) -> str:
        """The first sample's text; what is new of it in a stream."""
        return "".join(output.text for output in self.outputs if output.index == 0)


@dataclass(frozen=True, slots=True)
class Model:
    """A served model."""

    id: str
    aliases: tuple[str, ...]
    max_context: int
    vocab_size: int
    block_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    has_chat_template: bool


def generate_request(
    prompt: Prompt, sampling: SamplingParams | None, model: str, options: RequestOptions | None
) -> tuple[pb.GenerateRequest, Metadata]:
    """The message, and what travels beside it. InvalidArgument for what no message can hold."""
    chosen = options or RequestOptions()
    try:
        request = pb.GenerateRequest(
            model=model,
            sampling=_sampling(sampling or SamplingParams()),
            cache_salt=chosen.cache_salt,
            admission_class=chosen.admission_class.value,
            priority=chosen.priority,
            request_id=chosen.request_id,
            resume_token_ids=chosen.resume_token_ids,
            add_special_tokens=chosen.add_special_tokens,
        )
        _set_prompt(request, prompt)
    except ValueError as error:  # negative counts, lone surrogates
        raise InvalidArgument("request", str(error)) from error
    return request, (("retry-token", chosen.retry_token),) if chosen.retry_token else ()


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, Chat):
        request.chat.CopyFrom(_chat(prompt))
    else:
        request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))


def _sampling(sampling: SamplingParams) -> pb.Sampling:
    if isinstance(sampling.stop, str):  # each of its characters would go out as one
        raise InvalidArgument("sampling.stop", "must be a tuple of strings, is a string")
    return pb.Sampling(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        n=sampling.n,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        skip_special_tokens=sampling.skip_special_tokens,
        response_format=pb.ResponseFormat(grammar=sampling.grammar) if sampling.grammar else None,
        beam_width=sampling.beam_width,
        length_penalty=sampling.length_penalty,
    )


def _chat(chat: Chat) -> pb.Chat:
    return pb.Chat(
        messages=[
            pb.ChatMessage(role=message["role"], content=message["content"])
            for message in chat.messages
        ]
    )


def tokenize_request(
    prompt: str | Chat, model: str, add_special_tokens: bool
) -> pb.TokenizeRequest:
    """A prompt to tokenize. InvalidArgument for what no message can hold."""
    try:
        if isinstance(prompt, Chat):
            return pb.TokenizeRequest(model=model, chat=_chat(prompt))
        return pb.TokenizeRequest(model=model, text=prompt, add_special_tokens=add_special_tokens)
    except ValueError as error:  # lone surrogates
        raise InvalidArgument("request", str(error)) from error


def caller_metadata(tenant: str, api_key: str | None) -> Metadata:
    """What names the caller: the tenant, and the key, the environment's where none is given."""
    key = os.environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key
    metadata: list[tuple[str, str | bytes]] = []
    if tenant:
        metadata.append(("pagefleet-tenant", tenant))
    if key:
        metadata.append(("authorization", f"Bearer {key}"))
    return tuple(metadata)


def credentials_from_environment() -> grpc.ChannelCredentials | None:
    """TLS where the environment names a file of authorities; None = plaintext."""
    path = os.environ.get(CA_VARIABLE)
    return grpc.ssl_channel_credentials(Path(path).read_bytes()) if path else None


def serialize(message: Message) -> bytes:
    """For gRPC."""
    return message.SerializeToString()


def deserializer(message_type: type[ResponseT]) -> Callable[[bytes], ResponseT]:
    """For gRPC."""

    def deserialize(data: bytes) -> ResponseT:
        message = message_type()
        message.ParseFromString(data)
        return message

    return deserialize


def completion_from(response: pb.GenerateResponse) -> Completion:
    """One message of a server."""
    return Completion(
        request_id=response.request_id,
        model=response.model,
        outputs=tuple(_output(output) for output in response.outputs),
        seed=response.seed,
        prompt_logprobs=tuple(_logprobs(entry) for entry in response.prompt_logprobs),
    )


def _output(output: pb.Output) -> Output:
    return Output(
        index=output.index,
        text=output.text,
        token_ids=tuple(output.token_ids),
        logprobs=tuple(_logprobs(entry) for entry in output.logprobs),
        finish_reason=FinishReason(output.finish_reason) if output.finish_reason else None,
        usage=_usage(output.usage) if output.HasField("usage") else None,
        score=output.score if output.HasField("score") else None,
    )


def _logprobs(entry: pb.TokenLogprobs) -> Logprobs:
    top = tuple((best.token_id, best.logprob) for best in entry.top)
    return Logprobs(entry.token_id, entry.logprob, entry.rank, top)


def _usage(usage: pb.Usage) -> GenerationUsage:
    timings = usage.timings
    has_token = timings.HasField("first_token_s")
    return GenerationUsage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        preemptions=usage.preemptions,
        replica=usage.replica,
        resumes=usage.resumes,
        admission_s=timings.admission_s,
        queued_s=timings.queued_s,
        prefill_s=timings.prefill_s,
        decode_s=timings.decode_s,
        first_token_s=timings.first_token_s if has_token else None,
        total_s=timings.total_s,
    )


def model_from(model: pb.Model) -> Model:
    """One entry of ListModels."""
    return Model(
        id=model.id,
        aliases=tuple(model.aliases),
        max_context=model.max_context,
        vocab_size=model.vocab_size,
        block_size=model.block_size,
        eos_token_ids=tuple(model.eos_token_ids),
        bos_token_id=model.bos_token_id if model.HasField("bos_token_id") else None,
        has_chat_template=model.has_chat_template,
    )


def error_of(error: grpc.RpcError, target: str) -> PagefleetError:
    """The error of the tree that a call to a server ended with."""
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError), f"{error!r} has no status"
    details = error.details() or ""
    if details.startswith(_NOT_CONNECTED):
        reason = details.rpartition(": ")[2]
        return Unavailable(
            f"no server answers at {target} ({reason}): is one running, and is this its gRPC port?"
        )
    trailers = tuple((name, value) for name, value in error.trailing_metadata() or ())
    return error_from(error.code(), details, trailers)
