"""Messages of the data plane to protobuf and back.

Knows the shapes of `messages` and of engine.proto, and nothing of sockets. Token ids of prompts
and of resumed samples travel as int32 little-endian bytes: a prompt of 100k tokens is then one
copy instead of 100k varints.
"""

import sys
from array import array
from collections.abc import Iterable

from . import engine_pb2
from .messages import (
    AdmissionClass,
    EngineRequest,
    FinishReason,
    PrefixTransfer,
    SampleStart,
    SamplingParams,
    SequenceDelta,
    TokenLogprobs,
    TraceContext,
    TransferPeer,
    Usage,
)


def encode_token_ids(token_ids: Iterable[int]) -> bytes:
    """Int32 little-endian, 4 bytes an id; OverflowError for what is no int32."""
    ids = array("i", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def decode_token_ids(data: bytes) -> tuple[int, ...]:
    """The inverse of `encode_token_ids`."""
    ids = array("i")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return tuple(ids)


def encode_sampling(sampling: SamplingParams) -> engine_pb2.Sampling:
    """What an engine needs of it: `stop` and `skip_special_tokens` stay in the gateway."""
    assert sampling.seed is not None, "the gateway draws an unset seed before it submits"
    return engine_pb2.Sampling(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        n=sampling.n,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias_ids=[token_id for token_id, _ in sampling.logit_bias],
        logit_bias_values=[bias for _, bias in sampling.logit_bias],
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        grammar=sampling.grammar,
        beam_width=sampling.beam_width,
        length_penalty=sampling.length_penalty,
    )


def decode_sampling(message: engine_pb2.Sampling) -> SamplingParams:
    """The inverse of `encode_sampling`."""
    return SamplingParams(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        seed=message.seed,
        n=message.n,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(zip(message.logit_bias_ids, message.logit_bias_values, strict=True)),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        grammar=message.grammar,
        beam_width=message.beam_width,
        length_penalty=message.length_penalty,
    )


def encode_engine_request(request: EngineRequest) -> engine_pb2.Submit:
    """An `EngineRequest` as the command `submit`."""
    return engine_pb2.Submit(
        request_key=request.request_key,
        prompt_token_ids=encode_token_ids(request.prompt_token_ids),
        sampling=encode_sampling(request.sampling),
        samples=[
            engine_pb2.SampleStart(
                index=sample.index, output_token_ids=encode_token_ids(sample.output_token_ids)
            )
            for sample in request.samples
        ],
        lease_id=request.lease_id,
        lease_blocks=request.lease_blocks,
        admission_class=request.admission_class.value,
        priority=request.priority,
        deadline_s=request.deadline_s,
        cache_salt=request.cache_salt,
        adapter=request.adapter,
        transfer=None if request.transfer is None else _encode_transfer(request.transfer),
        request_id=request.request_id,
        traceparent=request.trace.traceparent,
        tracestate=request.trace.tracestate,
    )


def decode_engine_request(message: engine_pb2.Submit) -> EngineRequest:
    """The inverse of `encode_engine_request`."""
    return EngineRequest(
        request_key=message.request_key,
        prompt_token_ids=decode_token_ids(message.prompt_token_ids),
        sampling=decode_sampling(message.sampling),
        samples=tuple(
            SampleStart(sample.index, decode_token_ids(sample.output_token_ids))
            for sample in message.samples
        ),
        lease_id=message.lease_id if message.HasField("lease_id") else None,
        lease_blocks=message.lease_blocks,
        admission_class=AdmissionClass(message.admission_class),
        priority=message.priority,
        deadline_s=message.deadline_s if message.HasField("deadline_s") else None,
        cache_salt=message.cache_salt,
        adapter=message.adapter,
        transfer=_decode_transfer(message.transfer) if message.HasField("transfer") else None,
        request_id=message.request_id,
        trace=TraceContext(message.traceparent, message.tracestate),
    )


def encode_delta(delta: SequenceDelta) -> engine_pb2.Delta:
    """A `SequenceDelta` as one entry of `EngineOutputs`."""
    return engine_pb2.Delta(
        request_key=delta.request_key,
        index=delta.index,
        first_position=delta.first_position,
        token_ids=delta.token_ids,
        logprobs=[_encode_logprobs(entry) for entry in delta.logprobs],
        prompt_logprobs=[_encode_logprobs(entry) for entry in delta.prompt_logprobs],
        finish_reason=delta.finish_reason.value if delta.finish_reason is not None else "",
        usage=_encode_usage(delta.usage) if delta.usage is not None else None,
        error=delta.error,
        error_class=delta.error_class,
        score=delta.score,
    )


def decode_delta(message: engine_pb2.Delta) -> SequenceDelta:
    """The inverse of `encode_delta`."""
    return SequenceDelta(
        request_key=message.request_key,
        index=message.index,
        first_position=message.first_position,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(_decode_logprobs(entry) for entry in message.logprobs),
        prompt_logprobs=tuple(
            _decode_logprobs(entry) if entry.token_ids else None
            for entry in message.prompt_logprobs
        ),
        finish_reason=FinishReason(message.finish_reason) if message.finish_reason else None,
        usage=_decode_usage(message.usage) if message.HasField("usage") else None,
        error=message.error,
        error_class=message.error_class,
        score=message.score if message.HasField("score") else None,
    )


def encode_outputs(step: int, deltas: Iterable[SequenceDelta]) -> engine_pb2.EngineOutputs:
    """One step's message to one gateway."""
    return engine_pb2.EngineOutputs(step=step, deltas=[encode_delta(delta) for delta in deltas])


def decode_outputs(message: engine_pb2.EngineOutputs) -> list[SequenceDelta]:
    """The deltas of one step's message."""
    return [decode_delta(delta) for delta in message.deltas]


def _encode_transfer(transfer: PrefixTransfer) -> engine_pb2.Transfer:
    source = transfer.source
    return engine_pb2.Transfer(
        replica_id=source.replica_id,
        incarnation=source.incarnation,
        actors=source.actors,
        num_tokens=transfer.num_tokens,
        timeout_s=transfer.timeout_s,
    )


def _decode_transfer(message: engine_pb2.Transfer) -> PrefixTransfer:
    source = TransferPeer(message.replica_id, message.incarnation, tuple(message.actors))
    return PrefixTransfer(source, message.num_tokens, message.timeout_s)


def _encode_logprobs(entry: TokenLogprobs | None) -> engine_pb2.Logprobs:
    if entry is None:
        return engine_pb2.Logprobs()
    return engine_pb2.Logprobs(token_ids=entry.token_ids, values=entry.logprobs, rank=entry.rank)


def _decode_logprobs(message: engine_pb2.Logprobs) -> TokenLogprobs:
    return TokenLogprobs(tuple(message.token_ids), tuple(message.values), message.rank)


def _encode_usage(usage: Usage) -> engine_pb2.Usage:
    return engine_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        preemptions=usage.preemptions,
        queued_s=usage.queued_s,
        prefill_s=usage.prefill_s,
        decode_s=usage.decode_s,
    )


def _decode_usage(message: engine_pb2.Usage) -> Usage:
    return Usage(
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        completion_tokens=message.completion_tokens,
        preemptions=message.preemptions,
        queued_s=message.queued_s,
        prefill_s=message.prefill_s,
        decode_s=message.decode_s,
    )
