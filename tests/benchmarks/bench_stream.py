"""What streaming costs: 64 gRPC clients of a served model beside the same engine without them.

In turn: the engine in this process with 64 sequences, its deltas counted where it makes them; and
`pagefleet serve` with one replica of the same weights, threads and pool, its tokens counted by 64
clients in a process of their own. Tokens per second are taken while all 64 decode: from the first
token of the last to begin, to the last token of the first to end.

The clients' CPU time is taken out, as the clients would run elsewhere: what they used in that time,
spread over the cores, is subtracted from it. The row "with its clients" leaves it in.

    python tests/benchmarks/bench_stream.py [--shape qwen3-0.6b] [--repeats 3] [--json FILE]
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pagefleet.workers.openmp import WAITS

os.environ.update(WAITS)

from benchmark_report import Row, print_rows, write_json
from engine_workloads import SHAPES, Workload

if TYPE_CHECKING:  # the clients' process does without torch
    from pagefleet.protos.messages import SequenceDelta
    from pagefleet.workers.engine import Engine

NUM_CLIENTS = 64
ALLOWED = 0.90  # of the tokens/s without streaming


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens while every stream ran. cpu_s: of the process that counted."""

    num_tokens: int
    seconds: float
    cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    def without_counting(self, num_cores: int) -> float:
        """Tokens per second if the counting process had run elsewhere."""
        return self.num_tokens / (self.seconds - self.cpu_s / num_cores)


@dataclass(eq=False)
class Counter:
    """Counts tokens from the time when all streams have begun until the first ends."""

    num_streams: int
    running: set[int] = field(default_factory=set)
    num_tokens: int = 0
    began_s: float = 0.0
    began_cpu_s: float = 0.0
    rate: Rate | None = None

    def note(self, stream: int, num_tokens: int, has_ended: bool) -> None:
        is_open = len(self.running) == self.num_streams
        if is_open and self.rate is None:
            self.num_tokens += num_tokens
            if has_ended:
                seconds = time.perf_counter() - self.began_s
                cpu_s = time.process_time() - self.began_cpu_s
                self.rate = Rate(self.num_tokens, seconds, cpu_s)
        elif not is_open and num_tokens:
            self.running.add(stream)
            if len(self.running) == self.num_streams:
                self.began_s, self.began_cpu_s = time.perf_counter(), time.process_time()


def engine_rate(folder: Path, rounds: "Rounds") -> None:
    """In a process of its own: answers one rate for each line of stdin, as JSON."""
    from our_engine import OurEngine

    ours = OurEngine(folder, os.cpu_count() or 1, rounds.pool_tokens)
    print("ready", flush=True)
    for _ in sys.stdin:
        with ours.running() as engine:
            rate = rate_of(engine, rounds)
        print(json.dumps(asdict(rate)), flush=True)


def rate_of(engine: "Engine", rounds: "Rounds") -> Rate:
    """All prompts at once, counted on the engine's thread."""
    from our_engine import requests

    workload = rounds.workload
    counter, open_streams = Counter(workload.num_prompts), set(range(workload.num_prompts))
    ended = threading.Event()

    def sink(step: int, deltas: "list[SequenceDelta]") -> None:
        for delta in deltas:
            has_ended = delta.finish_reason is not None
            counter.note(int(delta.request_key), len(delta.token_ids), has_ended)
            if has_ended:
                open_streams.discard(int(delta.request_key))
        if not open_streams:
            ended.set()

    for request in requests(workload, workload.prompts(rounds.vocab)):
        engine.submit(request, sink)
    ended.wait()
    assert counter.rate is not None, "a stream ended before all had begun"
    return counter.rate


def client_rate(address: str, rounds: "Rounds") -> None:
    """In a process of its own: 64 clients, one channel and one stream each."""
    from pagefleet.cluster.client import AsyncClient, SamplingParams

    workload = rounds.workload
    sampling = SamplingParams(
        max_tokens=workload.num_output_tokens, temperature=0.0, ignore_eos=True
    )
    counter = Counter(workload.num_prompts)

    async def stream(number: int, prompt: list[int]) -> None:
        async with AsyncClient(address) as client:
            async for part in client.stream(prompt, sampling):
                for output in part.outputs:
                    counter.note(number, len(output.token_ids), output.finish_reason is not None)

    async def run() -> None:
        prompts = workload.prompts(rounds.vocab)
        await asyncio.gather(*(stream(*numbered) for numbered in enumerate(prompts)))

    asyncio.run(run())
    assert counter.rate is not None, "a stream ended before all had begun"
    print(json.dumps(asdict(counter.rate)), flush=True)


@dataclass(frozen=True, slots=True)
class Rounds:
    """What every round does."""

    vocab: int
    num_output_tokens: int

    @property
    def workload(self) -> Workload:
        return Workload("stream", NUM_CLIENTS, 16, self.num_output_tokens)

    @property
    def pool_tokens(self) -> int:
        return NUM_CLIENTS * (self.num_output_tokens + 48)


def measure(shape: str, num_output_tokens: int, repeats: int) -> list[Row]:
    from random_checkpoints import MAX_CONTEXT, save_random, save_tokenizer
    from serving_process import serving

    vocab = SHAPES[shape].vocab
    rounds = Rounds(vocab, num_output_tokens)
    flags = ["--dtype", "float32", "--num-blocks", str(rounds.pool_tokens // 16)]
    flags += ["--max-model-len", str(MAX_CONTEXT), "--no-enable-prefix-caching"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        save_random(SHAPES[shape], folder)
        save_tokenizer(vocab, folder)
        common = ["--vocab", str(vocab), "--tokens", str(num_output_tokens)]
        engine = subprocess.Popen(
            [sys.executable, __file__, "--engine", str(folder), *common],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert engine.stdin is not None and engine.stdout is not None
        plain: list[Rate] = []
        streamed: list[Rate] = []
        with engine, serving(folder, *flags) as server:
            assert engine.stdout.readline().strip() == "ready", "the engine did not start"
            for _ in range(repeats):
                engine.stdin.write("\n")
                engine.stdin.flush()
                plain.append(Rate(**json.loads(engine.stdout.readline())))
                command = [sys.executable, __file__, "--clients", server.grpc, *common]
                answer = subprocess.run(command, check=True, capture_output=True, text=True)
                streamed.append(Rate(**json.loads(answer.stdout)))
            engine.stdin.close()
    return rows_of(plain, streamed)


def rows_of(plain: list[Rate], streamed: list[Rate]) -> list[Row]:
    cores = os.cpu_count() or 1
    without = statistics.median(rate.tokens_per_s for rate in plain)
    elsewhere = statistics.median(rate.without_counting(cores) for rate in streamed)
    here = statistics.median(rate.tokens_per_s for rate in streamed)
    cpu_us = statistics.median(1e6 * rate.cpu_s / rate.num_tokens for rate in streamed)
    name = "without streaming"
    return [
        Row(f"{NUM_CLIENTS} streams", "tokens_per_s", elsewhere, without, name),
        Row("share that is left", "ratio", elsewhere / without, ALLOWED, "allowed"),
        Row("with its clients", "tokens_per_s", here, without, name),
        Row("clients, a token", "us", cpu_us, None, "-"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--tokens", type=int, default=48, help="of each stream")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    inner = parser.add_argument_group("parts, which it starts itself")
    inner.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    inner.add_argument("--clients", help=argparse.SUPPRESS)
    inner.add_argument("--vocab", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        engine_rate(options.engine, Rounds(options.vocab, options.tokens))
        return
    if options.clients is not None:
        client_rate(options.clients, Rounds(options.vocab, options.tokens))
        return
    rows = measure(options.shape, options.tokens, options.repeats)
    print_rows(f"stream, {options.shape}", rows)
    if options.json:
        write_json(options.json, f"stream, {options.shape}", rows)


if __name__ == "__main__":
    main()
