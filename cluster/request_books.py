"""What is written down of one request while it runs: metrics, its tenant's quota, a log line.

Sees the deltas on their way to the client; changes and delays nothing.
"""

from collections.abc import Sequence

from ..protos.errors import PagefleetError
from ..workers.tracing import Span
from .generation import OutputDelta
from .metrics import GatewayMetrics, RequestMeter
from .prepared_call import PreparedCall
from .quotas import QuotaUse
from .request_log import log_request_end


class RequestBooks:
    """Opened when the request begins; `close` it exactly once."""

    def __init__(
        self,
        prepared: PreparedCall,
        metrics: GatewayMetrics,
        meter: RequestMeter,
        use: QuotaUse | None,
        span: Span | None = None,
    ) -> None:
        self._prepared = prepared
        self._metrics = metrics
        self._meter = meter
        self._use = use
        self._span = span
        metrics.begin(prepared.model.card.model)

    def observe(self, deltas: Sequence[OutputDelta]) -> None:
        """What the client is about to get."""
        self._meter.observe(deltas)
        if self._use is not None:
            self._use.observe(deltas)

    def close(self, *, cancelled: bool, error: PagefleetError | None) -> None:
        """The request is over."""
        prepared = self._prepared
        self._metrics.end(prepared.model.card.model)
        if self._use is not None:
            self._use.close()
        outcome = "ok" if error is None else error.reason.lower()
        line: dict[str, object] = {
            "request_id": prepared.request_id,
            "request_key": prepared.request_key,
            "tenant": prepared.call.tenant,
            "model": prepared.model.card.model,
            "outcome": "cancelled" if cancelled else outcome,
            "prompt_tokens": prepared.num_prompt_tokens,
            **self._meter.summary(),
        }
        if self._span is not None:
            line["trace_id"] = self._span.trace_id
            self._end_span(self._span, error)
        log_request_end(line)

    def _end_span(self, span: Span, error: PagefleetError | None) -> None:
        prepared = self._prepared
        span.set(
            gen_ai__request__model=prepared.model.card.model,
            gen_ai__usage__input_tokens=prepared.num_prompt_tokens,
            gen_ai__usage__output_tokens=self._meter.num_tokens,
            pagefleet__request_id=prepared.request_id,
            pagefleet__request_key=prepared.request_key,
            pagefleet__tenant=prepared.call.tenant,
        )
        if error is None:
            span.end()
        else:
            span.fail(error.reason)
