"""What a gateway counts and what it tells Prometheus, in the field's names.

Requests, tokens and latencies are counted here as they happen; blocks, leases and queues are the
controller's and come in with each scrape (`cluster_metrics`). Knows no HTTP: who serves the text
asks `render`. METRICS.md lists every name.
"""

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

from ..protos.errors import PagefleetError
from ..protos.messages import ClusterState
from .cluster_metrics import ClusterCollector
from .generation import GenerationUsage, OutputDelta
from .recent_rates import RecentRates

_TTFT_BUCKETS = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
_TOKEN_BUCKETS = (
    *(0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
_REQUEST_BUCKETS = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0),
)
_LENGTH_BUCKETS = tuple(float(2**power) for power in range(18))


class GatewayMetrics:
    """The counts of one gateway, in a registry of their own."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.recent = RecentRates(clock)
        self._registry = CollectorRegistry()
        self._cluster = ClusterCollector()
        self._cluster_registry = CollectorRegistry()
        self._cluster_registry.register(self._cluster)
        self._make_counters()
        self._make_histograms()

    def _make_counters(self) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"pagefleet_{name}", text, labels, registry=self._registry)

        self._running = Gauge(
            "pagefleet_gateway_requests_running",
            "Requests that this gateway carries now, queued ones included",
            ("model_name",),
            registry=self._registry,
        )
        self._prompt_tokens = counter(
            "prompt_tokens", "Prompt tokens of ended samples", "model_name"
        )
        self._cached_tokens = counter(
            "prompt_tokens_cached", "Prompt tokens whose KV was found in a cache", "model_name"
        )
        self._generation_tokens = counter(
            "generation_tokens", "Tokens handed to clients", "model_name"
        )
        self._success = counter(
            "request_success", "Samples that ended", "model_name", "finished_reason"
        )
        self._errors = counter(
            "request_errors", "Requests that ended with an error", "front", "code"
        )
        self._resumes = counter(
            "request_resumes", "Times that a sample went on at another replica", "model_name"
        )

    def _make_histograms(self) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(
                f"pagefleet_{name}", text, ("model_name",), registry=self._registry, buckets=buckets
            )

        self._ttft = histogram(
            "time_to_first_token_seconds", "From arrival to a sample's first token", _TTFT_BUCKETS
        )
        self._itl = histogram(
            "inter_token_latency_seconds", "Between two tokens of a sample", _TOKEN_BUCKETS
        )
        self._e2e = histogram(
            "e2e_request_latency_seconds", "From arrival to a sample's end", _REQUEST_BUCKETS
        )
        self._admission = histogram(
            "request_admission_time_seconds", "From arrival to the first lease", _REQUEST_BUCKETS
        )
        self._queue = histogram(
            "request_queue_time_seconds", "Waiting at a replica", _REQUEST_BUCKETS
        )
        self._prefill = histogram("request_prefill_time_seconds", "In prefill", _REQUEST_BUCKETS)
        self._decode = histogram("request_decode_time_seconds", "In decode", _REQUEST_BUCKETS)
        self._prompt_length = histogram(
            "request_prompt_tokens", "Prompt tokens of a sample", _LENGTH_BUCKETS
        )
        self._output_length = histogram(
            "request_generation_tokens", "Output tokens of a sample", _LENGTH_BUCKETS
        )

    def begin(self, model: str) -> None:
        """A request begins."""
        self._running.labels(model).inc()

    def end(self, model: str) -> None:
        """It is over, however that came."""
        self._running.labels(model).dec()

    def count_error(self, front: str, error: PagefleetError) -> None:
        """A client of this front ("grpc" or "http") was told of an error."""
        self._errors.labels(front, error.grpc_code).inc()

    def count_tokens(self, model: str, num_tokens: int) -> None:
        """New output tokens."""
        self._generation_tokens.labels(model).inc(num_tokens)
        self.recent.add_tokens(num_tokens)

    def observe_gap(self, model: str, seconds: float, num_tokens: int) -> None:
        """So long since the sample's last tokens; several that come together share it."""
        share = self._itl.labels(model)
        for _ in range(num_tokens):
            share.observe(seconds / num_tokens)

    def observe_end(self, model: str, reason: str, usage: GenerationUsage) -> None:
        """A sample ended."""
        self._success.labels(model, reason).inc()
        self.recent.add_end(usage.first_token_s)
        self._prompt_tokens.labels(model).inc(usage.prompt_tokens)
        self._cached_tokens.labels(model).inc(usage.cached_tokens)
        self._resumes.labels(model).inc(usage.resumes)
        if usage.first_token_s is not None:
            self._ttft.labels(model).observe(usage.first_token_s)
        self._e2e.labels(model).observe(usage.total_s)
        self._admission.labels(model).observe(usage.admission_s)
        self._queue.labels(model).observe(usage.queued_s)
        self._prefill.labels(model).observe(usage.prefill_s)
        self._decode.labels(model).observe(usage.decode_s)
        self._prompt_length.labels(model).observe(usage.prompt_tokens)
        self._output_length.labels(model).observe(usage.completion_tokens)

    def render(self, state: ClusterState | None) -> bytes:
        """Prometheus' text. None: the controller did not answer; its figures are left out."""
        self._cluster.state = state
        return generate_latest(self._registry) + generate_latest(self._cluster_registry)

    def families(self) -> Iterable[Metric]:
        """What this gateway counts itself."""
        return self._registry.collect()


class RequestMeter:
    """Counts one request's deltas while they pass."""

    def __init__(
        self, metrics: GatewayMetrics, model: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._model = model
        self._clock = clock
        self._last: dict[int, float] = {}
        self.num_tokens = 0
        self._ends: list[tuple[str, GenerationUsage]] = []

    def observe(self, deltas: Iterable[OutputDelta]) -> None:
        """What the client is about to get."""
        now = self._clock()
        for delta in deltas:
            if delta.token_ids:
                self.num_tokens += len(delta.token_ids)
                self._metrics.count_tokens(self._model, len(delta.token_ids))
                last = self._last.get(delta.index)
                if last is not None:
                    self._metrics.observe_gap(self._model, now - last, len(delta.token_ids))
                self._last[delta.index] = now
            if delta.finish_reason is not None and delta.usage is not None:
                self._ends.append((delta.finish_reason.value, delta.usage))
                self._metrics.observe_end(self._model, delta.finish_reason.value, delta.usage)

    def summary(self) -> dict[str, object]:
        """For the request's line in the log."""
        usages = [usage for _, usage in self._ends]
        first = [usage.first_token_s for usage in usages if usage.first_token_s is not None]
        return {
            "output_tokens": self.num_tokens,
            "cached_tokens": usages[0].cached_tokens if usages else 0,
            "finish_reasons": [reason for reason, _ in self._ends],
            "replicas": sorted({usage.replica for usage in usages}),
            "preemptions": sum(usage.preemptions for usage in usages),
            "resumes": max((usage.resumes for usage in usages), default=0),
            "first_token_s": round(min(first), 6) if first else None,
            "total_s": round(max(usage.total_s for usage in usages), 6) if usages else None,
        }
