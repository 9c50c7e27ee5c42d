"""What a client asks for and what it gets, as the gateway sees it: values only.

Both fronts (gRPC and HTTP) make a `GenerateCall` of what they read and write out `OutputDelta`s;
neither knows how the gateway comes by them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..protos.messages import (
    AdmissionClass,
    FinishReason,
    SamplingParams,
    TokenLogprobs,
    TraceContext,
)
from .api_keys import TenantQuota
from .tool_calls import ForcedCall, Tool

ChatMessage = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text to tokenize; `add_special_tokens` as the tokenizer has them (BOS)."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, taken as they are."""

    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages (role, content, …) for the model's chat template.

    tools: what the model may call. forced: its answer has to be a call.
    template_kwargs: further variables of the template.
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[Tool] = ()
    forced: ForcedCall | None = None
    template_kwargs: Mapping[str, object] = field(default_factory=dict[str, object])


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One call of a client, from either front.

    tenant: whose queue share it takes and whose `cancel` may end it.
    request_id: the client's own name for it, or empty; never an internal key.
    deadline_s: seconds left when the call arrived; None = no deadline.
    retry_token: from an earlier refusal that was an appointment.
    quota: what the tenant may use of this gateway; None = as much as there is.
    trace: the client's, or empty.
    """

    prompt: Prompt
    model: str = ""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str = ""
    admission_class: AdmissionClass = AdmissionClass.STANDARD
    priority: int = 0
    tenant: str = ""
    request_id: str = ""
    resume_token_ids: tuple[int, ...] = ()
    deadline_s: float | None = None
    retry_token: str = ""
    quota: TenantQuota | None = None
    trace: TraceContext = field(default_factory=TraceContext)


@dataclass(frozen=True, slots=True)
class GenerationUsage:
    """What one sample took. Times are in seconds, `first_token_s` and `total_s` from arrival."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    preemptions: int
    replica: str
    resumes: int
    admission_s: float
    queued_s: float
    prefill_s: float
    decode_s: float
    first_token_s: float | None
    total_s: float


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """New tokens of one sample; `finish_reason` and `usage` come together, with the last ones.

    text: what may be shown by now; it can lag behind the tokens.
    text_ends: for each token, the length of the sample's text once all of that token is in it.
    prompt_logprobs: once, with the first delta of sample 0, if asked for.
    score: of a beam search's result, which comes whole.
    """

    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    text_ends: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish_reason: FinishReason | None = None
    usage: GenerationUsage | None = None
    score: float | None = None

    @property
    def is_empty(self) -> bool:
        """There is nothing in it that a client would notice."""
        return not (self.token_ids or self.text or self.prompt_logprobs or self.finish_reason)


def merge_deltas(deltas: Sequence[OutputDelta]) -> list[OutputDelta]:
    """One delta per sample, in the order of their indices."""
    merged: dict[int, OutputDelta] = {}
    for delta in deltas:
        before = merged.get(delta.index)
        merged[delta.index] = delta if before is None else _join(before, delta)
    return [merged[index] for index in sorted(merged)]


def _join(first: OutputDelta, second: OutputDelta) -> OutputDelta:
    return OutputDelta(
        index=first.index,
        token_ids=first.token_ids + second.token_ids,
        text=first.text + second.text,
        text_ends=first.text_ends + second.text_ends,
        logprobs=first.logprobs + second.logprobs,
        prompt_logprobs=first.prompt_logprobs + second.prompt_logprobs,
        finish_reason=second.finish_reason,
        usage=second.usage,
        score=second.score,
    )


def best_tokens(entry: TokenLogprobs, num_best: int) -> list[tuple[int, float]]:
    """The best tokens of a position and their log-probabilities, best first.

    Engines send the chosen token first and the others without it; here it stands in its rank.
    """
    chosen, *best = zip(entry.token_ids, entry.logprobs, strict=True)
    if entry.rank <= num_best:
        best.insert(entry.rank - 1, chosen)
    return best[:num_best]
