"""A model in this process, for scripts: prompts in, completions out. No Ray, no gRPC, no cluster.

    with LLM("org/name", block_size=16) as llm:
        for completion in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
            print(completion.text)

Knows the engine and the tokenizer; what it does is what a gateway does, without the network.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Self, SupportsIndex, TypedDict, Unpack, cast
from uuid import uuid4

from rich.progress import Progress

from ..protos.errors import InvalidArgument, Unavailable
from ..protos.messages import (
    EngineRequest,
    FinishReason,
    ModelCard,
    SampleStart,
    SamplingParams,
    SequenceDelta,
    TokenLogprobs,
    Usage,
)
from ..scheduler.config import AdmissionRule, PreemptionMode
from ..scheduler.scheduler import Scheduler
from ..scheduler.stats import SchedulerStats
from ..workers.config import WorkerConfig
from ..workers.faults import Faults
from ..workers.loaded_engine import load_engine, model_card
from .generation import (
    ChatMessage,
    ChatPrompt,
    GenerateCall,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from .sample_stream import SampleStream
from .tokenizer import Tokenizer
from .validation import RequestLimits, check_call, check_for_model, check_text


class EngineOptions(TypedDict, total=False):
    """The fields of `WorkerConfig` besides the model; see there."""

    revision: str | None
    device: str
    dtype: str
    weight_dtype: str
    quantized_weights: str
    kv_dtype: str
    enforce_eager: bool
    block_size: int
    num_blocks: int | None
    kv_memory: int | None
    memory_fraction: float | None
    host_memory: int
    max_context: int | None
    max_num_sequences: int
    max_num_batched_tokens: int
    prefill_chunk: int | None
    enable_prefix_caching: bool
    preemption_mode: PreemptionMode
    admission_rule: AdmissionRule
    watermark: float
    max_num_waiting: int | None
    speculative: str
    num_speculative_tokens: int
    prompt_lookup_min: int
    prompt_lookup_max: int
    deterministic: bool
    num_threads: int | None
    overlap_steps: bool | None
    faults: Faults


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample. `error` says what happened if `finish_reason` is ERROR.

    score: of a beam search's result.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str = ""
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """What became of one prompt: its `n` samples, by index."""

    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()

    @property
    def text(self) -> str:
        """The first sample's text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first sample's tokens."""
        return self.outputs[0].token_ids


class _Collector:
    """One request on its way: gathers its samples' tokens and text."""

    def __init__(self, request: EngineRequest, streams: list[SampleStream]) -> None:
        self.request = request
        self._streams = streams
        self._texts = [""] * len(streams)
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in streams]
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        self._errors = [""] * len(streams)
        self._scores: list[float | None] = [None] * len(streams)
        self._num_open = len(streams)

    @property
    def is_complete(self) -> bool:
        return self._num_open == 0

    def num_tokens(self, index: int) -> int:
        return len(self._streams[index].token_ids)

    def take(self, delta: SequenceDelta) -> bool:
        """Add a delta; True if its sample has just been ended by its text."""
        stream = self._streams[delta.index]
        was_stopped = stream.stopped_by_text
        accepted = stream.accept(delta)
        self._texts[delta.index] += accepted.text
        self._logprobs[delta.index].extend(accepted.logprobs)
        self._prompt_logprobs += delta.prompt_logprobs
        if delta.finish_reason is not None:
            self._errors[delta.index] = delta.error
            self._scores[delta.index] = delta.score
            self._num_open -= 1
            return False
        return stream.stopped_by_text and not was_stopped

    def completion(self) -> Completion:
        outputs = tuple(
            CompletionOutput(
                index=stream.index,
                text=self._texts[stream.index],
                token_ids=tuple(stream.token_ids),
                finish_reason=stream.finish_reason or FinishReason.ERROR,
                usage=stream.usage,
                logprobs=tuple(self._logprobs[stream.index]),
                error=self._errors[stream.index],
                score=self._scores[stream.index],
            )
            for stream in self._streams
        )
        return Completion(self.request.prompt_token_ids, outputs, self._prompt_logprobs)


class LLM:
    """A loaded model. Use it as a context manager, or `close` it.

    Args:
        model: a checkpoint folder or a hub id.
        options: fields of `workers.config.WorkerConfig`.
    """

    def __init__(self, model: str, **options: Unpack[EngineOptions]) -> None:
        loaded = load_engine(WorkerConfig(model, **options))
        self._engine = loaded.engine
        self._card: ModelCard = model_card(model, loaded)
        self._tokenizer = Tokenizer.load(Path(self._card.tokenizer_dir))
        self._engine.start()

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        sampling: SamplingParams | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete prompts, texts or token ids, all at once; answers in their order.

        Raises InvalidArgument before anything runs if one of them could not be served.
        """
        listed = [prompts] if isinstance(prompts, str) else prompts
        return self._run([_as_prompt(prompt) for prompt in listed], sampling, progress)

    def chat(
        self,
        conversations: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling: SamplingParams | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Answer one conversation or several, each a list of {"role", "content"}."""
        return self._run([ChatPrompt(c) for c in _as_list(conversations)], sampling, progress)

    def stats(self) -> SchedulerStats:
        """Blocks, hits, preemptions."""
        return self._engine.call(Scheduler.stats).result()

    def close(self) -> None:
        """End the engine's thread. The object cannot be used again."""
        self._engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | None, progress: bool
    ) -> list[Completion]:
        params = sampling or SamplingParams()
        collectors = [self._make_collector(prompt, params) for prompt in prompts]
        deltas: SimpleQueue[list[SequenceDelta]] = SimpleQueue()

        def sink(step: int, new_deltas: list[SequenceDelta]) -> None:
            deltas.put(new_deltas)

        try:
            for collector in collectors:
                self._engine.submit(collector.request, sink)
            self._collect({c.request.request_key: c for c in collectors}, deltas, progress)
        except Unavailable:
            self._raise_failure()
            raise
        finally:  # Ctrl-C: nothing goes on in the background
            for collector in collectors:
                self._engine.cancel(collector.request.request_key)
        self._raise_failure()
        return [collector.completion() for collector in collectors]

    def _raise_failure(self) -> None:
        """A replica would be built anew after a failed step; here that is the caller's choice."""
        failure = self._engine.failure
        if failure is not None:
            raise Unavailable(f"the engine failed ({failure}): make a new LLM") from failure

    def _collect(
        self,
        waiting: dict[str, _Collector],
        deltas: SimpleQueue[list[SequenceDelta]],
        progress: bool,
    ) -> None:
        """Take deltas until every request is complete."""
        with Progress(disable=not progress) as bar:
            task = bar.add_task("prompts", total=len(waiting))
            while waiting:
                for delta in deltas.get():
                    collector = waiting[delta.request_key]
                    if collector.take(delta):
                        num_tokens = collector.num_tokens(delta.index)
                        self._engine.finish(delta.request_key, delta.index, num_tokens)
                    if collector.is_complete:
                        del waiting[delta.request_key]
                        bar.advance(task)

    def _make_collector(self, prompt: Prompt, sampling: SamplingParams) -> _Collector:
        token_ids, field = self._tokenize(prompt)
        call = GenerateCall(prompt, sampling=sampling)
        check_call(call, RequestLimits())
        check_for_model(call, token_ids, self._card, field)
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        request = EngineRequest(
            request_key=uuid4().hex,
            prompt_token_ids=tuple(token_ids),
            sampling=replace(sampling, seed=seed),
            samples=tuple(SampleStart(index) for index in range(sampling.n)),
        )
        room = self._card.max_context - len(token_ids)
        max_tokens = room if sampling.max_tokens is None else sampling.max_tokens
        pieces, eos = self._tokenizer.pieces, self._card.eos_token_ids
        return _Collector(
            request,
            [SampleStream(i, pieces, sampling, eos, max_tokens) for i in range(sampling.n)],
        )

    def _tokenize(self, prompt: Prompt) -> tuple[Sequence[int], str]:
        """Token ids, and the name of the field they came from."""
        match prompt:
            case TokenPrompt(token_ids):
                return token_ids, "token_ids"
            case TextPrompt(text):
                check_text("text", text)
                return self._tokenizer.encode(text), "text"
            case ChatPrompt(messages):
                if self._tokenizer.chat_template is None:
                    raise InvalidArgument("chat", "the model has no chat template")
                text = self._tokenizer.chat_template.render(messages)
                check_text("chat", text)
                return self._tokenizer.encode(text, add_special_tokens=False), "chat"


def _as_prompt(prompt: str | Iterable[SupportsIndex]) -> Prompt:
    """Token ids may be those of an array, whose elements are no ints."""
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    try:
        return TokenPrompt([index(token_id) for token_id in prompt])
    except TypeError as error:
        raise TypeError(
            f"a prompt is a text or token ids, not {type(prompt).__name__}: {error}"
        ) from error


def _as_list(
    conversations: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
) -> Sequence[Sequence[ChatMessage]]:
    """A single conversation is a list of messages, not of lists."""
    if conversations and isinstance(conversations[0], Mapping):
        return [cast(Sequence[ChatMessage], conversations)]
    return cast(Sequence[Sequence[ChatMessage]], conversations)
