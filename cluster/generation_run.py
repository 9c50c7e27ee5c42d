"""One request's life in the gateway: a lease, an engine, its deltas, and again after a failure.

    reserve ─► submit ─► deltas ─► … ─► every sample has ended
       ▲                    │
       └── replica lost ────┘   prompt and output apart, same seed, without what failed

Each token is handed on once and in order. Knows neither who the client is nor how it listens.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..protos.errors import Overloaded, PagefleetError, Unavailable, error_named
from ..protos.messages import (
    EngineRequest,
    FinishReason,
    Lease,
    ReserveRequest,
    SampleStart,
    SequenceDelta,
    TraceContext,
    Usage,
    Weights,
)
from ..scheduler.block_hash import root_hash, route_hashes
from ..workers.tracing import Span, SpanKind, child_span, trace_of
from .engine_client import EngineClient, EngineStream, ReplicaLost
from .generation import GenerationUsage, OutputDelta
from .prepared_call import PreparedCall
from .reservations import Reservations
from .sample_stream import SampleStream, TokensMissing

logger = logging.getLogger(__name__)

CLIENT = SpanKind.CLIENT

Emit = Callable[[list[OutputDelta]], None]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How hard a request is carried over failures.

    max_attempts: leases in all. patience_s: from a failure on, without any new token for so long,
    it gives up. pause_s: before asking again when no other replica can take it.
    """

    max_attempts: int = 32
    patience_s: float = 8.0
    pause_s: float = 0.25


class LeaseRejected(Exception):
    """The leader does not honour the lease: its blocks went to others. Nothing was computed."""


class GenerationRun:
    """Runs one request to its end and emits what it gets.

    span: the request's, where it is traced.
    """

    def __init__(
        self,
        prepared: PreparedCall,
        *,
        gateway_id: str,
        reservations: Reservations,
        engines: EngineClient,
        emit: Emit,
        clock: Clock,
        retry: RetryPolicy,
        span: Span | None = None,
    ) -> None:
        self._prepared = prepared
        self._call = prepared.call
        self._model = prepared.model
        self._sampling = prepared.sampling
        self._prompt = tuple(prepared.prompt_token_ids)
        # made once: it costs the most
        self._prompt_array = np.array(prepared.prompt_token_ids, dtype=np.int32)
        self._span = span
        self._gateway_id = gateway_id
        self._reservations = reservations
        self._engines = engines
        self._emit = emit
        self._clock = clock
        self._retry = retry
        self._attempt = 0
        self._excluded: tuple[str, ...] = ()
        self._admitted_at: float | None = None
        self._failing_since: float | None = None
        self._resumes = 0
        self._weights: Weights | None = None  # of the output so far
        self._wants_prompt_logprobs = self._sampling.prompt_logprobs is not None
        self._samples = [self._make_sample(index) for index in range(self._sampling.n)]

    async def run(self) -> None:
        """Until every sample has ended. Raises from the error tree; may be cancelled anywhere."""
        self._samples[0].resume(self._call.resume_token_ids)
        self._end_complete_samples(replica_id="")
        while self._unfinished():
            lease = await self._reserve()
            try:
                await self._run_attempt(lease)
            except (ReplicaLost, TokensMissing) as error:
                self._note_lost(lease, str(error))
            except LeaseRejected as error:
                await self._note_rejected(str(error))

    # -- leases ------------------------------------------------------------------------------

    async def _reserve(self) -> Lease:
        """A lease on a replica that has not just failed, or on any if there is no other."""
        while True:
            self._attempt += 1
            try:
                lease = await self._acquire()
            except Unavailable:
                if not self._excluded or self._is_out_of_patience():
                    raise
                self._excluded = ()  # it may be back by now, as a new incarnation
                await asyncio.sleep(self._retry.pause_s)
                continue
            if self._admitted_at is None:
                self._admitted_at = self._clock()
            return lease

    async def _acquire(self) -> Lease:
        attempt = self._attempt
        with child_span(self._span, "controller.reserve", CLIENT, attempt=attempt) as span:
            request = self.reserve_request(trace_of(span))
            lease = await self._reservations.acquire(request, self._prepared.deadline)
            if span is not None:
                span.set(pagefleet__replica=lease.replica_id)
                span.set(pagefleet__lease_blocks=lease.num_blocks)
            return lease

    def reserve_request(self, trace: TraceContext | None = None) -> ReserveRequest:
        """What the controller has to know to route the samples that have not ended."""
        unfinished = self._unfinished()
        num_outputs = [len(sample.token_ids) for sample in unfinished]
        known = self._prompt_array
        if len(unfinished) == 1 and num_outputs[0]:
            output = np.array(unfinished[0].token_ids, dtype=np.int32)
            known = np.concatenate([known, output])
        identity = replace(self._model.card.identity, salt=self._call.cache_salt)
        max_tokens = self._sampling.max_tokens
        return ReserveRequest(
            request_key=self._prepared.request_key,
            attempt=self._attempt,
            gateway_id=self._gateway_id,
            model=self._model.card.model,
            route_hashes=route_hashes(root_hash(identity), known, identity.block_size),
            num_tokens=len(self._prompt) + sum(num_outputs),
            num_samples=max(len(unfinished), self._sampling.beam_width),
            max_tokens=None if max_tokens is None else max_tokens - min(num_outputs),
            admission_class=self._call.admission_class,
            priority=self._call.priority,
            tenant=self._call.tenant,
            retry_token=self._call.retry_token,
            excluded=self._excluded,
            weights=self._weights,
            request_id=self._prepared.request_id,
            trace=trace or TraceContext(),
        )

    def _engine_request(self, lease: Lease, trace: TraceContext) -> EngineRequest:
        sampling = self._sampling
        if not self._wants_prompt_logprobs:
            sampling = replace(sampling, prompt_logprobs=None)
        deadline = self._prepared.deadline
        left = None if deadline is None else max(deadline - self._clock(), 0.0)
        return EngineRequest(
            request_key=f"{self._prepared.request_key}.{self._attempt}",
            prompt_token_ids=self._prompt,
            sampling=sampling,
            samples=tuple(
                SampleStart(sample.index, tuple(sample.token_ids)) for sample in self._unfinished()
            ),
            lease_id=lease.lease_id,
            lease_blocks=lease.num_blocks,
            admission_class=self._call.admission_class,
            priority=self._call.priority,
            deadline_s=left,
            cache_salt=self._call.cache_salt,
            request_id=self._prepared.request_id,
            trace=trace,
            transfer=lease.transfer,
        )

    # -- one attempt -------------------------------------------------------------------------

    async def _run_attempt(self, lease: Lease) -> None:
        replica = lease.replica_id
        with child_span(self._span, "engine.generate", CLIENT, pagefleet__replica=replica) as span:
            await self._run_on(lease, trace_of(span))

    async def _run_on(self, lease: Lease, trace: TraceContext) -> None:
        stream = self._engines.submit(lease, self._engine_request(lease, trace))
        try:
            while self._unfinished():
                self._accept_all(stream, lease, await stream.next_deltas())
        finally:
            is_over = not self._unfinished()
            stream.close(cancel=not is_over)
            if not is_over:
                self._reservations.release(lease.request_key, lease.attempt)

    def _accept_all(self, stream: EngineStream, lease: Lease, deltas: list[SequenceDelta]) -> None:
        """Emit what the deltas bring, also what came before one that tells of a failure."""
        outputs: list[OutputDelta] = []
        try:
            for delta in deltas:
                _raise_failure(delta)
                outputs.append(self._accept(stream, lease, delta))
        finally:
            self._emit([output for output in outputs if not output.is_empty])

    def _accept(self, stream: EngineStream, lease: Lease, delta: SequenceDelta) -> OutputDelta:
        sample = self._samples[delta.index]
        had_finished = sample.finish_reason is not None
        accepted = sample.accept(delta)
        if delta.token_ids:
            self._weights = lease.weights
        if accepted.token_ids:
            self._failing_since = None
            if sample.first_token_at is None:
                sample.first_token_at = self._clock()
        ends_now = delta.finish_reason is not None
        if sample.stopped_by_text and not had_finished and not ends_now:
            stream.finish(sample.index, len(sample.token_ids))
        if delta.prompt_logprobs:
            self._wants_prompt_logprobs = False
        sample.has_ended |= ends_now
        return OutputDelta(
            index=sample.index,
            token_ids=accepted.token_ids,
            text=accepted.text,
            text_ends=accepted.text_ends,
            logprobs=accepted.logprobs,
            prompt_logprobs=delta.prompt_logprobs,
            finish_reason=sample.finish_reason if ends_now else None,
            usage=self._usage(sample, lease.replica_id) if ends_now else None,
            score=delta.score,
        )

    # -- failures ----------------------------------------------------------------------------

    def _note_lost(self, lease: Lease, reason: str) -> None:
        """Go on elsewhere, if there is patience left."""
        self._log("a request lost its replica", reason)
        self._reservations.note_failure(lease.replica_id, lease.incarnation)
        self._end_complete_samples(lease.replica_id)
        if not self._unfinished():
            return
        self._resumes += 1
        self._excluded = (*self._excluded, lease.replica_id)
        if self._is_out_of_patience():
            problem = "the stream was lost and could not be resumed on another replica"
            raise Unavailable(problem, retry_after_s=1.0)

    async def _note_rejected(self, reason: str) -> None:
        """The controller's view was old; it will know better in a moment."""
        self._log("a request was refused by its leader", reason)
        if self._is_out_of_patience():
            raise Overloaded("no replica had blocks left for the request", retry_after_s=1.0)
        await asyncio.sleep(min(self._retry.pause_s, 0.01 * 2**self._attempt))

    def _log(self, event: str, reason: str) -> None:
        fields = {
            "request_id": self._prepared.request_id,
            "request_key": self._prepared.request_key,
        }
        logger.info(event, extra={"fields": fields | {"reason": reason}})

    def _is_out_of_patience(self) -> bool:
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
        waited = now - self._failing_since
        return self._attempt >= self._retry.max_attempts or waited > self._retry.patience_s

    def _end_complete_samples(self, replica_id: str) -> None:
        """Samples whose last token had come, and only the word that it was the last had not."""
        ended: list[OutputDelta] = []
        for sample in self._unfinished():
            text = sample.end_without_engine()
            if sample.finish_reason is not None:
                sample.has_ended = True
                usage = self._usage(sample, replica_id)
                ended.append(
                    OutputDelta(
                        sample.index, text=text, finish_reason=sample.finish_reason, usage=usage
                    )
                )
        if ended:
            self._emit(ended)

    # -- samples -----------------------------------------------------------------------------

    def _make_sample(self, index: int) -> SampleStream:
        room = self._model.card.max_context - len(self._prompt)
        max_tokens = self._sampling.max_tokens
        return SampleStream(
            index,
            self._model.tokenizer.pieces,
            self._sampling,
            self._model.card.eos_token_ids,
            room if max_tokens is None else min(room, max_tokens),
        )

    def _unfinished(self) -> list[SampleStream]:
        return [sample for sample in self._samples if not sample.has_ended]

    def _usage(self, sample: SampleStream, replica_id: str) -> GenerationUsage:
        now, first = self._clock(), sample.first_token_at
        counted = sample.usage or Usage(len(self._prompt), 0, 0)
        admitted = now if self._admitted_at is None else self._admitted_at
        return GenerationUsage(
            prompt_tokens=len(self._prompt),
            # of a resumed sample the engine counts its output as prompt
            cached_tokens=min(counted.cached_tokens, len(self._prompt)),
            completion_tokens=len(sample.token_ids),
            preemptions=counted.preemptions,
            replica=replica_id,
            resumes=self._resumes,
            admission_s=admitted - self._prepared.arrived,
            queued_s=counted.queued_s,
            prefill_s=counted.prefill_s,
            decode_s=counted.decode_s,
            first_token_s=None if first is None else first - self._prepared.arrived,
            total_s=now - self._prepared.arrived,
        )


def _raise_failure(delta: SequenceDelta) -> None:
    """An end that is no answer: what it means for the request."""
    match delta.finish_reason:
        case FinishReason.ABORT:
            raise ReplicaLost(delta.error or "the leader gave the request up")
        case FinishReason.DEADLINE:
            raise error_named("DeadlineExceeded", "the deadline passed while it was running")
        case FinishReason.ERROR:
            raise _error_of(delta)
        case _:
            return


def _error_of(delta: SequenceDelta) -> PagefleetError | ReplicaLost | LeaseRejected:
    if delta.error_class == Overloaded.__name__:
        return LeaseRejected(delta.error)
    if delta.error_class == Unavailable.__name__:
        return ReplicaLost(delta.error)
    return error_named(delta.error_class, delta.error)
