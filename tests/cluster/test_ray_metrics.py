"""Prometheus' metrics mirrored to Ray's."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pagefleet.cluster.ray_metrics import RayExporter


class FakeRay:
    """Adds up as Ray's agent does."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, tuple[str, ...]], float] = {}
        self.num_calls = 0

    def Gauge(self, name, description, tag_keys):
        return _Metric(self, name, tag_keys)

    Counter = Gauge


class _Metric:
    def __init__(self, ray: FakeRay, name: str, tag_keys: tuple[str, ...]) -> None:
        self.ray, self.name, self.tag_keys = ray, name, tag_keys

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self.tag_keys)
        self.ray.num_calls += 1
        self.ray.values[self.name, tuple(tags.values())] = value

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0.0, "Ray refuses what is no increase"
        before = self.ray.values.get((self.name, tuple(tags.values())), 0.0)
        self.set(before + value, tags)


class Bench:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.ray = FakeRay()
        self.exporter = RayExporter(self.ray)

    def export(self) -> dict[tuple[str, tuple[str, ...]], float]:
        self.exporter.export(self.registry.collect())
        return self.ray.values


def test_counters_grow_by_what_is_new():
    bench = Bench()
    tokens = Counter("pagefleet_tokens", "Tokens", ("model_name",), registry=bench.registry)
    tokens.labels("m").inc(5)
    bench.export()
    tokens.labels("m").inc(2)
    assert bench.export() == {("pagefleet_tokens", ("m",)): 7.0}
    calls = bench.ray.num_calls
    bench.export()
    assert bench.ray.num_calls == calls, "nothing new, nothing said"


def test_a_counter_that_began_anew_still_only_grows():
    bench = Bench()
    tokens = Counter("pagefleet_tokens", "Tokens", registry=bench.registry)
    tokens.inc(5)
    bench.export()
    tokens.reset()
    tokens.inc(2)
    assert bench.export() == {("pagefleet_tokens", ()): 7.0}


def test_a_gauge_that_is_gone_is_zero():
    bench = Bench()
    blocks = Gauge("pagefleet_blocks", "Blocks", ("replica",), registry=bench.registry)
    blocks.labels("r0").set(3)
    blocks.labels("r1").set(4)
    bench.export()
    blocks.remove("r0")
    found = bench.export()
    assert found == {("pagefleet_blocks", ("r0",)): 0.0, ("pagefleet_blocks", ("r1",)): 4.0}


def test_a_histogram_is_its_sum_and_its_count():
    bench = Bench()
    times = Histogram("pagefleet_seconds", "Seconds", registry=bench.registry)
    times.observe(0.5)
    times.observe(1.5)
    assert bench.export() == {
        ("pagefleet_seconds_sum", ()): 2.0,
        ("pagefleet_seconds_count", ()): 2.0,
    }
