"""Between the public protobuf messages and the gateway's values. Knows both shapes, nothing else.

Unset `optional` fields become the neutral defaults of `SamplingParams`. Nothing is checked here
but how many entries there are: copying millions of them would hold the gateway's loop for seconds.
"""

from collections.abc import Sequence

from ..protos import inference_pb2 as pb
from ..protos.errors import InvalidArgument
from ..protos.messages import (
    AdmissionClass,
    BlockCounts,
    ClusterState,
    Explanation,
    ReplicaExplanation,
    ReplicaStatus,
    SamplingParams,
    TokenLogprobs,
)
from . import grammar
from .generation import (
    ChatMessage,
    ChatPrompt,
    GenerateCall,
    GenerationUsage,
    OutputDelta,
    Prompt,
    TextPrompt,
    TokenPrompt,
    best_tokens,
)
from .live_generation import LiveGeneration
from .model_catalog import ServedModel
from .prepared_call import PreparedCall
from .validation import RequestLimits, check_num


def call_from_proto(
    request: pb.GenerateRequest,
    limits: RequestLimits,
    *,
    tenant: str,
    deadline_s: float | None,
    retry_token: str,
) -> GenerateCall:
    """A client's request; the rest comes from the call's metadata."""
    return GenerateCall(
        prompt=_prompt_from_proto(request, limits),
        model=request.model,
        sampling=_sampling_from_proto(request.sampling, limits),
        cache_salt=request.cache_salt,
        admission_class=_admission_class(request.admission_class),
        priority=request.priority,
        tenant=tenant,
        request_id=request.request_id,
        resume_token_ids=tuple(request.resume_token_ids),
        deadline_s=deadline_s,
        retry_token=retry_token,
    )


def _sampling_from_proto(message: pb.Sampling, limits: RequestLimits) -> SamplingParams:
    check_num("sampling.stop", message.stop, limits.max_stop_strings)
    check_num("sampling.stop_token_ids", message.stop_token_ids, limits.max_stop_token_ids)
    check_num("sampling.logit_bias", message.logit_bias, limits.max_logit_bias)
    default = SamplingParams()
    has = message.HasField
    return SamplingParams(
        max_tokens=message.max_tokens if has("max_tokens") else None,
        min_tokens=message.min_tokens,
        temperature=message.temperature if has("temperature") else default.temperature,
        top_k=message.top_k,
        top_p=message.top_p if has("top_p") else default.top_p,
        min_p=message.min_p,
        seed=message.seed if has("seed") else None,
        n=message.n if has("n") else default.n,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        repetition_penalty=(
            message.repetition_penalty if has("repetition_penalty") else default.repetition_penalty
        ),
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        logprobs=message.logprobs if has("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if has("prompt_logprobs") else None,
        skip_special_tokens=message.skip_special_tokens if has("skip_special_tokens") else True,
        grammar=_grammar(message.response_format),
        beam_width=message.beam_width,
        length_penalty=message.length_penalty if has("length_penalty") else default.length_penalty,
    )


def _grammar(message: pb.ResponseFormat) -> str:
    match message.WhichOneof("format"):
        case "json_object":
            return grammar.json_object() if message.json_object else ""
        case "json_schema":
            return grammar.json_schema(message.json_schema)
        case "regex":
            return grammar.regex(message.regex)
        case "grammar":
            return message.grammar
        case _:
            return ""


def tokenize_prompt_from_proto(
    request: pb.TokenizeRequest, limits: RequestLimits
) -> TextPrompt | ChatPrompt:
    """What is to be tokenized."""
    match request.WhichOneof("prompt"):
        case "text":
            return _text_prompt(request)
        case "chat":
            return ChatPrompt(_chat_messages(request.chat, limits))
        case _:
            raise InvalidArgument("prompt", "one of text and chat must be set")


def _prompt_from_proto(request: pb.GenerateRequest, limits: RequestLimits) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return _text_prompt(request)
        case "token_ids":
            return TokenPrompt(list(request.token_ids.ids))
        case "chat":
            return ChatPrompt(_chat_messages(request.chat, limits))
        case _:
            raise InvalidArgument("prompt", "one of text, token_ids and chat must be set")


def _text_prompt(request: pb.GenerateRequest | pb.TokenizeRequest) -> TextPrompt:
    unset = not request.HasField("add_special_tokens")
    return TextPrompt(request.text, unset or request.add_special_tokens)


def _chat_messages(chat: pb.Chat, limits: RequestLimits) -> list[ChatMessage]:
    check_num("chat.messages", chat.messages, limits.max_messages)
    return [{"role": message.role, "content": message.content} for message in chat.messages]


def _admission_class(name: str) -> AdmissionClass:
    try:
        return AdmissionClass(name) if name else AdmissionClass.STANDARD
    except ValueError:
        known = ", ".join(AdmissionClass)
        raise InvalidArgument("admission_class", f"{name!r} is none of {known}") from None


def response_to_proto(
    generation: LiveGeneration, deltas: Sequence[OutputDelta], *, is_first: bool
) -> pb.GenerateResponse:
    """One message; the seed goes with the first."""
    response = pb.GenerateResponse(
        request_id=generation.request_id,
        model=generation.model.card.model,
        outputs=[_output_to_proto(delta, generation.sampling) for delta in deltas],
        seed=generation.seed if is_first else None,
    )
    for delta in deltas:
        for position, entry in enumerate(delta.prompt_logprobs):
            token_id = generation.prepared.prompt_token_ids[position]
            response.prompt_logprobs.append(
                pb.TokenLogprobs(token_id=token_id)
                if entry is None
                else _logprobs_to_proto(entry, generation.sampling.prompt_logprobs)
            )
    return response


def _output_to_proto(delta: OutputDelta, sampling: SamplingParams) -> pb.Output:
    return pb.Output(
        index=delta.index,
        token_ids=delta.token_ids,
        text=delta.text,
        logprobs=[_logprobs_to_proto(entry, sampling.logprobs) for entry in delta.logprobs],
        finish_reason=delta.finish_reason.value if delta.finish_reason is not None else "",
        usage=_usage_to_proto(delta.usage) if delta.usage is not None else None,
        score=delta.score,
    )


def _logprobs_to_proto(entry: TokenLogprobs, num_best: int | None) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        token_id=entry.token_ids[0],
        logprob=entry.logprobs[0],
        rank=entry.rank,
        top=[pb.TopLogprob(token_id=i, logprob=p) for i, p in best_tokens(entry, num_best or 0)],
    )


def _usage_to_proto(usage: GenerationUsage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        preemptions=usage.preemptions,
        replica=usage.replica,
        resumes=usage.resumes,
        timings=pb.Timings(
            admission_s=usage.admission_s,
            queued_s=usage.queued_s,
            prefill_s=usage.prefill_s,
            decode_s=usage.decode_s,
            first_token_s=usage.first_token_s,
            total_s=usage.total_s,
        ),
    )


def model_to_proto(model: ServedModel) -> pb.Model:
    """What ListModels says of one."""
    card = model.card
    return pb.Model(
        id=card.model,
        aliases=card.aliases,
        max_context=card.max_context,
        vocab_size=card.vocab_size,
        block_size=card.identity.block_size,
        eos_token_ids=card.eos_token_ids,
        bos_token_id=card.bos_token_id,
        has_chat_template=model.tokenizer.chat_template is not None,
    )


def explanation_to_proto(prepared: PreparedCall, answer: Explanation) -> pb.ExplainResponse:
    """What would happen, and every replica's cost."""
    return pb.ExplainResponse(
        model=prepared.model.card.model,
        prompt_tokens=prepared.num_prompt_tokens,
        policy=answer.policy,
        decision=answer.decision,
        reason=answer.reason,
        replica_id=answer.replica_id or "",
        lease_blocks=answer.lease_blocks,
        expected_output_tokens=answer.expected_output_tokens,
        expected_wait_s=answer.expected_wait_s,
        queue_position=answer.queue_position,
        replicas=[replica_explanation_to_proto(replica) for replica in answer.replicas],
    )


def replica_explanation_to_proto(replica: ReplicaExplanation) -> pb.ReplicaExplanation:
    """One replica's cost."""
    return pb.ReplicaExplanation(
        replica_id=replica.replica_id,
        eligible=replica.eligible,
        hit_tokens=replica.hit_tokens,
        host_hit_tokens=replica.host_hit_tokens,
        available_blocks=replica.available_blocks,
        prefill_ms=replica.prefill_ms,
        load_ms=replica.load_ms,
        queue_ms=replica.queue_ms,
        blocks_ms=replica.blocks_ms,
        batch_ms=replica.batch_ms,
        affinity_ms=replica.affinity_ms,
        transfer_ms=replica.transfer_ms,
        transfer_tokens=replica.transfer_tokens,
        transfer_from=replica.transfer_from,
        total_ms=replica.total_ms,
    )


def cluster_state_to_proto(state: ClusterState) -> pb.GetClusterStateResponse:
    """Addresses stay inside the cluster."""
    return pb.GetClusterStateResponse(
        replicas=[_replica_to_proto(replica) for replica in state.replicas],
        queued_requests=state.queued_requests,
        queued_tokens=state.queued_tokens,
        granted=state.granted,
        refused=state.refused,
        expired=state.expired,
        policy=state.policy,
        uptime_s=state.uptime_s,
    )


def _replica_to_proto(replica: ReplicaStatus) -> pb.ReplicaState:
    return pb.ReplicaState(
        replica_id=replica.replica_id,
        incarnation=replica.incarnation,
        model=replica.model,
        state=replica.state.value,
        device=_tier_to_proto(replica.device),
        host=_tier_to_proto(replica.host),
        num_running=replica.num_running,
        num_waiting=replica.num_waiting,
        leased_blocks=replica.leased_blocks,
        available_blocks=replica.available_blocks,
        query_tokens=replica.query_tokens,
        hit_tokens=replica.hit_tokens,
        preemptions=replica.preemptions,
        report_age_s=replica.report_age_s,
        node_id=replica.node_id,
        draft_tokens=replica.counters.draft_tokens,
        accepted_tokens=replica.counters.accepted_tokens,
        weights_version=replica.weights_version,
        transfers_offered=replica.transfers_offered,
        transfers_done=replica.transfers.done,
        transfers_failed=replica.transfers.failed,
        transferred_bytes=replica.transfers.num_bytes,
        transfer_s=replica.transfers.seconds,
    )


def _tier_to_proto(counts: BlockCounts) -> pb.TierState:
    return pb.TierState(
        clean=counts.clean,
        cached_idle=counts.cached_idle,
        referenced=counts.referenced,
        fenced=counts.fenced,
        total=counts.total,
    )
