"""Spans of one process over OpenTelemetry, joined across processes by W3C trace contexts.

Off unless the environment names where spans go (`OTEL_EXPORTER_OTLP_ENDPOINT` and its like): then
nothing of OpenTelemetry is imported, and whoever could trace holds None. Knows nothing of what is
traced. OpenTelemetry's own variables choose protocol, headers, sampling and service name.
"""

import logging
import os
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, cast

from ..protos.messages import TraceContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer

logger = logging.getLogger(__name__)

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_FLUSH_MS = 3000

Value = str | int | float | bool


class TracingUnavailable(Exception):
    """Tracing is asked for, and the packages for it are not installed."""


class SpanKind(Enum):
    """Which side of a call a span is."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


class Span:
    """One piece of work. End it exactly once."""

    def __init__(self, tracer: "Tracer", span: "OtelSpan") -> None:
        self._tracer = tracer
        self._span = span

    @property
    def trace(self) -> TraceContext:
        """What whoever is called works under."""
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(headers, set_span_in_context(self._span))
        return TraceContext(headers.get("traceparent", ""), headers.get("tracestate", ""))

    @property
    def trace_id(self) -> str:
        """What logs call the trace."""
        return f"{self._span.get_span_context().trace_id:032x}"

    def set(self, **attributes: Value) -> None:
        """Note what became known; `__` in a name stands for a dot."""
        for name, value in attributes.items():
            self._span.set_attribute(name.replace("__", "."), value)

    def child(
        self,
        name: str,
        kind: SpanKind = SpanKind.INTERNAL,
        *,
        start_ns: int | None = None,
        **attributes: Value,
    ) -> "Span":
        """A part of this work."""
        from opentelemetry.trace import set_span_in_context

        return _start(
            self._tracer, name, set_span_in_context(self._span), kind, start_ns, attributes
        )

    def fail(self, problem: str) -> None:
        """End it: it went wrong."""
        from opentelemetry.trace import Status, StatusCode

        self._span.set_status(Status(StatusCode.ERROR, problem))
        self._span.end()

    def end(self, end_ns: int | None = None) -> None:
        """End it: now, or at a time that is known."""
        self._span.end(end_ns)


class Tracing:
    """Where this process begins spans."""

    def __init__(self, provider: "TracerProvider") -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("pagefleet")

    def start(
        self,
        name: str,
        kind: SpanKind = SpanKind.SERVER,
        *,
        trace: TraceContext,
        start_ns: int | None = None,
        **attributes: Value,
    ) -> Span:
        """Begin work; under the caller's context, or as a trace of its own where it has none."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers = {"traceparent": trace.traceparent, "tracestate": trace.tracestate}
        parent = TraceContextTextMapPropagator().extract(headers)
        return _start(self._tracer, name, parent, kind, start_ns, attributes)

    def close(self) -> None:
        """Send what is left, but wait no longer than seconds for whoever should take it."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()


def trace_of(span: Span | None) -> TraceContext:
    """What whoever is called works under; empty where nothing is traced."""
    return TraceContext() if span is None else span.trace


@contextmanager
def child_span(
    parent: Span | None, name: str, kind: SpanKind = SpanKind.INTERNAL, **attributes: Value
) -> Generator[Span | None]:
    """A part of `parent`'s work while the block runs; nothing where that is not traced."""
    if parent is None:
        yield None
        return
    span = parent.child(name, kind)
    span.set(**attributes)
    try:
        yield span
    except BaseException as error:
        span.fail(str(error) or type(error).__name__)
        raise
    span.end()


def is_wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment asks for traces."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return False
    return any(environment.get(name) for name in ENDPOINT_VARIABLES)


def tracing_from_environment(role: str, instance: str) -> Tracing | None:
    """What the environment asks for, if the packages are there; without them a warning and None.

    role: which part of the cluster this process is, the end of its service's name.
    """
    if not is_wanted():
        return None
    try:
        return make_tracing(role, instance)
    except TracingUnavailable as error:
        logger.warning("%s", error)
        return None


def send_traces_to(endpoint: str) -> None:
    """Let this process, and those it starts, send spans there.

    Raises ValueError for what is no endpoint, TracingUnavailable.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"{endpoint!r} does not begin with http:// or https://")
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
    _make_exporter()


def make_tracing(role: str, instance: str) -> Tracing:
    """Spans to the endpoint that the environment names. Raises TracingUnavailable."""
    exporter = _make_exporter()
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    attributes: dict[str, str] = {"service.instance.id": instance}
    if "OTEL_SERVICE_NAME" not in os.environ:
        attributes["service.name"] = f"pagefleet-{role}"
    provider = TracerProvider(resource=Resource.create(attributes))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider)


def _make_exporter() -> "SpanExporter":
    try:
        if _protocol() == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc import trace_exporter  # pyright: ignore
        else:
            from opentelemetry.exporter.otlp.proto.http import trace_exporter
    except ImportError as error:
        raise TracingUnavailable(
            f"traces cannot be sent: {error}; pip install 'pagefleet[tracing]'"
        ) from error
    return cast("SpanExporter", trace_exporter.OTLPSpanExporter())  # pyright: ignore


def _protocol() -> str:
    values = (os.environ.get(name) for name in _PROTOCOL_VARIABLES)
    return next((value for value in values if value), "http/protobuf")


def _start(
    tracer: "Tracer",
    name: str,
    context: object,
    kind: SpanKind,
    start_ns: int | None,
    attributes: Mapping[str, Value],
) -> Span:
    from opentelemetry import trace

    span = tracer.start_span(
        name,
        context,  # pyright: ignore[reportArgumentType]
        trace.SpanKind[kind.name],
        attributes={key.replace("__", "."): value for key, value in attributes.items()},
        start_time=start_ns,
    )
    return Span(tracer, span)


def now_ns() -> int:
    """The clock that spans are stamped with."""
    return time.time_ns()
