"""A span for each traced request that a leader serves, with its phases as parts.

Sees requests come and their deltas pass; changes and delays neither. The phases' times are the
engine's own, which come with the end.

    engine.request  ├── engine.queue ──┼── engine.prefill ──┼── engine.decode ──┤
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ..protos.messages import EngineRequest, SequenceDelta, Usage
from .tracing import Span, Tracing, now_ns


@dataclass(slots=True)
class _Open:
    span: Span
    began_ns: int
    unfinished: set[int]
    num_tokens: int = 0


class RequestSpans:
    """The spans of one leader's requests that have not ended."""

    def __init__(self, tracing: Tracing, replica_id: str) -> None:
        self._tracing = tracing
        self._replica_id = replica_id
        self._open: dict[str, _Open] = {}

    def begin(self, request: EngineRequest) -> None:
        """A request was submitted; nothing happens where its gateway does not trace it."""
        if not request.trace.traceparent:
            return
        began_ns = now_ns()
        span = self._tracing.start(
            "engine.request",
            trace=request.trace,
            start_ns=began_ns,
            pagefleet__request_key=request.request_key,
            pagefleet__request_id=request.request_id,
            pagefleet__replica=self._replica_id,
            gen_ai__usage__input_tokens=len(request.prompt_token_ids),
        )
        unfinished = {sample.index for sample in request.samples}
        self._open[request.request_key] = _Open(span, began_ns, unfinished)

    def note(self, deltas: Iterable[SequenceDelta]) -> None:
        """What clients are told; the last delta of the last sample ends the span."""
        for delta in deltas:
            entry = self._open.get(delta.request_key)
            if entry is None:
                continue
            entry.num_tokens += len(delta.token_ids)
            if delta.finish_reason is None:
                continue
            entry.unfinished.discard(delta.index)
            if delta.index == 0 and delta.usage is not None:
                self._add_phases(entry, delta.usage)
            if not entry.unfinished or delta.error:
                self._end(delta.request_key, delta.error, delta.finish_reason.value)

    def abandon(self, request_key: str) -> None:
        """It was cancelled, or its gateway is gone."""
        if request_key in self._open:
            self._end(request_key, "", "cancelled")

    def _add_phases(self, entry: _Open, usage: Usage) -> None:
        entry.span.set(
            pagefleet__cached_tokens=usage.cached_tokens,
            pagefleet__preemptions=usage.preemptions,
        )
        start_ns = entry.began_ns
        for name, seconds in (
            ("engine.queue", usage.queued_s),
            ("engine.prefill", usage.prefill_s),
            ("engine.decode", usage.decode_s),
        ):
            end_ns = start_ns + round(seconds * 1e9)
            entry.span.child(name, start_ns=start_ns).end(end_ns)
            start_ns = end_ns

    def _end(self, request_key: str, error: str, reason: str) -> None:
        entry = self._open.pop(request_key)
        entry.span.set(
            gen_ai__usage__output_tokens=entry.num_tokens, pagefleet__finish_reason=reason
        )
        if error:
            entry.span.fail(error)
        else:
            entry.span.end()
