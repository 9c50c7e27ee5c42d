"""`pagefleet bench`: load on a running cluster, and what its clients saw.

Knows the client, random prompts and order statistics. Knows nothing of how requests are served.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..protos.errors import PagefleetError
from ..protos.messages import SamplingParams
from .client import AsyncClient
from .config import CommandError
from .tables import make_table

_FIRST_ORDINARY_TOKEN = 16  # below it special tokens are usual


@dataclass(frozen=True, slots=True)
class BenchLoad:
    """Requests of random tokens. request_rate: per second, at random times; None = closed loop.

    concurrency: at most so many at once. prefix_len: tokens at the start that all share.
    """

    num_requests: int
    concurrency: int
    input_len: int
    output_len: int
    prefix_len: int = 0
    request_rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_requests", "concurrency", "input_len", "output_len"):
            if getattr(self, name) < 1:
                raise CommandError(f"--{name.replace('_', '-')} must be at least 1")
        if not 0 <= self.prefix_len < self.input_len:
            raise CommandError("--prefix-len must be less than --input-len, and not negative")
        if self.request_rate is not None and self.request_rate <= 0:
            raise CommandError("--request-rate must be above 0")

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Token ids of every request."""
        rng = random.Random(self.seed)
        ids = range(min(_FIRST_ORDINARY_TOKEN, vocab_size // 2), vocab_size)
        prefix = rng.choices(ids, k=self.prefix_len)
        own = self.input_len - self.prefix_len
        return [prefix + rng.choices(ids, k=own) for _ in range(self.num_requests)]


@dataclass(slots=True)
class _Measured:
    """What the clients saw of all requests."""

    ttft_s: list[float] = field(default_factory=list[float])
    tpot_s: list[float] = field(default_factory=list[float])
    num_tokens: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    preemptions: int = 0
    errors: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Times in seconds; tpot = per output token after the first. None = nothing was measured."""

    load: BenchLoad
    seconds: float
    num_ok: int
    num_failed: int
    first_error: str | None
    requests_per_s: float
    tokens_per_s: float
    hit_rate: float
    preemptions: int
    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_mean_s: float | None
    tpot_p99_s: float | None


def run_bench(
    target: str, model: str, load: BenchLoad, *, as_json: bool, console: Console
) -> BenchReport:
    """Send the load with a progress bar, then print the report."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    display = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
    with display:
        report = asyncio.run(_send(target, model, load, display))
    if as_json:
        console.print_json(data=asdict(report))
    else:
        console.print(_report_table(report))
    return report


async def _send(target: str, model: str, load: BenchLoad, display: Progress) -> BenchReport:
    async with AsyncClient(target) as client:
        prompts = load.prompts(await _vocab_size(client, model))
        measured = _Measured()
        task = display.add_task("requests", total=len(prompts))
        places = asyncio.Semaphore(load.concurrency)
        rng = random.Random(load.seed + 1)

        async def one(prompt: Sequence[int]) -> None:
            try:
                await _send_one(client, model, prompt, load.output_len, measured)
            except PagefleetError as error:
                measured.errors.append(f"{type(error).__name__}: {error}")
            finally:
                places.release()
                display.advance(task)

        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                if load.request_rate is not None:
                    await asyncio.sleep(rng.expovariate(load.request_rate))
                await places.acquire()
                group.create_task(one(prompt))
        return _make_report(load, measured, time.perf_counter() - began)


async def _vocab_size(client: AsyncClient, model: str) -> int:
    for served in await client.models():
        if model in ("", served.id, *served.aliases):
            return served.vocab_size
    raise CommandError(f"model {model!r} is not served there")


async def _send_one(
    client: AsyncClient, model: str, prompt: Sequence[int], output_len: int, measured: _Measured
) -> None:
    sampling = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    first: float | None = None
    num_tokens = 0
    async for part in client.stream(prompt, sampling, model=model):
        for output in part.outputs:
            num_tokens += len(output.token_ids)
            if first is None and output.token_ids:
                first = time.perf_counter()
            if output.usage is not None:
                measured.cached_tokens += output.usage.cached_tokens
                measured.prompt_tokens += output.usage.prompt_tokens
                measured.preemptions += output.usage.preemptions
    ended = time.perf_counter()
    measured.num_tokens += num_tokens
    if first is not None:
        measured.ttft_s.append(first - began)
        if num_tokens > 1:
            measured.tpot_s.append((ended - first) / (num_tokens - 1))


def _make_report(load: BenchLoad, measured: _Measured, seconds: float) -> BenchReport:
    num_failed = len(measured.errors)
    num_ok = load.num_requests - num_failed
    return BenchReport(
        load=load,
        seconds=seconds,
        num_ok=num_ok,
        num_failed=num_failed,
        first_error=measured.errors[0] if measured.errors else None,
        requests_per_s=num_ok / seconds,
        tokens_per_s=measured.num_tokens / seconds,
        hit_rate=measured.cached_tokens / max(measured.prompt_tokens, 1),
        preemptions=measured.preemptions,
        ttft_mean_s=_mean(measured.ttft_s),
        ttft_p50_s=_quantile(measured.ttft_s, 0.5),
        ttft_p99_s=_quantile(measured.ttft_s, 0.99),
        tpot_mean_s=_mean(measured.tpot_s),
        tpot_p99_s=_quantile(measured.tpot_s, 0.99),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of all do not exceed."""
    if not values:
        return None
    ordered = sorted(values)
    place = max(0, -(-len(ordered) * share // 1) - 1)
    return ordered[int(place)]


def _report_table(report: BenchReport) -> object:
    table = make_table(("measure", "value"))

    def milliseconds(value: float | None) -> str:
        return "-" if value is None else f"{1000 * value:,.1f} ms"

    rows = {
        "requests": f"{report.num_ok} ok, {report.num_failed} failed",
        "time": f"{report.seconds:.2f} s",
        "throughput": f"{report.tokens_per_s:,.1f} tokens/s",
        "requests per second": f"{report.requests_per_s:,.2f}",
        "first token, mean": milliseconds(report.ttft_mean_s),
        "first token, median": milliseconds(report.ttft_p50_s),
        "first token, 99 %": milliseconds(report.ttft_p99_s),
        "per token, mean": milliseconds(report.tpot_mean_s),
        "per token, 99 %": milliseconds(report.tpot_p99_s),
        "prompt tokens from cache": f"{report.hit_rate:.1%}",
        "preemptions": str(report.preemptions),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    if report.first_error is not None:
        table.add_row("first error", report.first_error)
    return table
