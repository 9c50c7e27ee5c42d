"""CPU time of the KV block pool, its manager and the scheduler, beside vLLM's own.

Microseconds of this process's CPU time per block, token, request or step. Ours and vLLM's are
measured turn and turn about, each in a process of its own; the least of all rounds is reported,
for both. A step is `schedule` + `update` (ours with `take_deltas` on top). vLLM's rows need
PEER_VLLM_PYTHON, the interpreter of a venv that has it.

    python tests/benchmarks/bench_block_pool.py [--rounds 3] [--json FILE]
"""

import argparse
import gc
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from benchmark_report import Row, print_rows, write_json

from pagefleet.protos.messages import CacheIdentity, EngineRequest, SampleStart, SamplingParams
from pagefleet.scheduler.block_hash import block_hashes
from pagefleet.scheduler.books import Books
from pagefleet.scheduler.config import SchedulerConfig
from pagefleet.scheduler.output import ModelRunnerOutput
from pagefleet.scheduler.prefix import Prefix
from pagefleet.scheduler.request import Request, Sequence
from pagefleet.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
PROMPT = tuple(range(4096))
ROOT = bytes(16)
UNITS = {"hit": "request", "lookup": "request", "append": "token", "step": "step"}


def cpu_us(action: Callable[[], object]) -> float:
    start = time.process_time_ns()
    action()
    return (time.process_time_ns() - start) / 1000


def make_books(num_blocks: int, max_context: int = 8192) -> Books:
    return Books(SchedulerConfig(num_blocks, max_num_sequences=4, max_context=max_context))


def make_request(number: int, prompt: tuple[int, ...], max_tokens: int = 16) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=number)
    return EngineRequest(f"r{number}", prompt, sampling, (SampleStart(0),))


def make_sequence(books: Books, number: int, prompt: tuple[int, ...]) -> Sequence:
    """A waiting sequence whose prompt is hashed, as vLLM's requests are when they are made."""
    request = Request(make_request(number, prompt), number, 0.0, 8192, ROOT)
    sequence = Sequence(number, request, 0, ())
    books.manager.find_prefix(sequence, books.tier, loads_pay=True)
    return sequence


def run_through(books: Books, sequence: Sequence) -> None:
    """Compute, publish and release a sequence."""
    books.manager.admit(sequence, Prefix(), publishes=True)
    row = sequence.row
    assert row is not None
    books.manager.publish(row, len(sequence.token_ids))
    leave(books, sequence)


def leave(books: Books, sequence: Sequence) -> None:
    assert sequence.row is not None
    books.manager.release(sequence.row, fence=0)
    books.batch.leave(sequence)


def hash_blocks() -> float:
    tokens = np.array(PROMPT, dtype=np.int32)
    return cpu_us(lambda: [block_hashes(ROOT, tokens, BLOCK_SIZE) for _ in range(20)]) / 20 / 256


def allocate_free(count: int) -> float:
    pool = make_books(20_000).pool
    rounds = max(20, 8192 // count)

    def run() -> None:
        for _ in range(rounds):
            blocks = pool.allocate(count)
            assert blocks is not None
            pool.release(blocks)

    return cpu_us(run) / rounds / count


def hit() -> tuple[float, float]:
    books = make_books(4000)
    run_through(books, make_sequence(books, 0, PROMPT))
    sequences = [make_sequence(books, number, PROMPT) for number in range(1, 41)]
    find = books.manager.find_prefix
    lookup = cpu_us(lambda: [find(s, books.tier, loads_pay=True) for s in sequences]) / 40

    def run() -> None:
        for sequence in sequences:
            prefix = find(sequence, books.tier, loads_pay=True)
            books.manager.admit(sequence, prefix, publishes=True)
            leave(books, sequence)

    return lookup, cpu_us(run) / 40


def miss() -> float:
    books = make_books(4000)
    sequences = [make_sequence(books, i, (i, *PROMPT[1:64])) for i in range(400)]
    find = books.manager.find_prefix
    return cpu_us(lambda: [find(s, books.tier, loads_pay=True) for s in sequences]) / 400


def append() -> float:
    """One row's next token: does it need a block, take one, publish the one that is full."""
    books = make_books(4000)
    sequence = make_sequence(books, 0, PROMPT[:128])
    books.manager.admit(sequence, Prefix(), publishes=True)
    batch, manager, pool = books.batch, books.manager, books.pool
    row = sequence.row
    assert row is not None
    batch.num_tokens[row] = batch.num_computed[row] = 128
    manager.publish(row, 128)
    rows = np.array([row], dtype=np.int32)

    def run() -> None:
        for num_computed in range(129, 1729):
            if len(manager.needs_block(rows)):
                blocks = pool.allocate(1)
                assert blocks is not None
                manager.append(row, blocks[0])
            batch.num_computed[row] = num_computed
            if num_computed % BLOCK_SIZE == 0:
                manager.publish(row, num_computed)

    return cpu_us(run) / 1600


def evict() -> float:
    books = make_books(100_000)
    for start in range(0, 100_000 * BLOCK_SIZE, 8000):
        run_through(books, make_sequence(books, start, tuple(range(start, start + 8000))))
    assert books.pool.stats().cached_idle == 100_000
    return cpu_us(lambda: [books.pool.allocate(256) for _ in range(300)]) / 300 / 256


def step(num_running: int) -> float:
    config = SchedulerConfig(
        20_000, max_num_sequences=num_running, max_num_batched_tokens=8192, max_context=8192
    )
    identity = CacheIdentity("benchmark", 0, "float32", BLOCK_SIZE)
    scheduler = Scheduler(config, identity, eos_token_ids=(2,))
    for i in range(num_running):
        prompt = tuple(range(i, i + 128 + i % 16))
        scheduler.add_request(make_request(i, prompt, max_tokens=4000), now=0.0)
    gc.collect()
    gc.freeze()  # as an engine does once it has started
    times: list[float] = []
    while len(times) < 120:
        start = time.process_time_ns()
        output = scheduler.schedule(now=0.0)
        elapsed = time.process_time_ns() - start
        assert output is not None
        tokens = np.arange(7, 7 + len(output.sample_rows), dtype=np.int32)
        result = ModelRunnerOutput(output.step, tokens)
        start = time.process_time_ns()
        scheduler.update(output, result, now=0.0)
        scheduler.take_deltas()
        elapsed += time.process_time_ns() - start
        if output.num_tokens == num_running:
            times.append(elapsed / 1000)
    return sum(times[20:]) / len(times[20:])


def measure() -> dict[str, float]:
    lookup, admit = hit()
    return {
        "block hash": hash_blocks(),
        "allocate and free 1": allocate_free(1),
        "allocate and free 16": allocate_free(16),
        "allocate and free 256": allocate_free(256),
        "hit 4096 lookup": lookup,
        "hit 4096 admit": admit,
        "lookup miss": miss(),
        "append one token": append(),
        "evict of 100000": evict(),
        "step of 32": step(32),
        "step of 128": step(128),
        "step of 256": step(256),
    }


class Peer:
    """vLLM in a process of its own, asked once a round."""

    def __init__(self, python: str) -> None:
        read, write = os.pipe()
        script = Path(__file__).with_name("peer_vllm_blocks.py")
        self._process = subprocess.Popen(
            [python, str(script), str(write)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(write,),
            text=True,
        )
        os.close(write)
        self._answers = os.fdopen(read, encoding="utf-8")

    def measure(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        answer = self._answers.readline()
        if not answer:
            raise SystemExit("vLLM's side ended without an answer; run peer_vllm_blocks.py alone")
        return json.loads(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._answers.close()


def least(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {case: min(times[case] for times in rounds) for case in rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    python = os.environ.get("PEER_VLLM_PYTHON")
    peer = Peer(python) if python else None
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    for _ in range(options.rounds):
        ours.append(measure())
        if peer is not None:
            theirs.append(peer.measure())
    if peer is not None:
        peer.close()
    reference = least(theirs) if theirs else {}
    rows = [
        Row(
            case,
            "us",
            value,
            reference.get(case),
            f"vLLM, per {UNITS.get(case.split()[0], 'block')}",
        )
        for case, value in least(ours).items()
    ]
    print_rows("block pool and scheduler, CPU time", rows)
    ratios = [row.ratio for row in rows if row.ratio is not None]
    if ratios:
        print(f"geometric mean of the ratios: {np.exp(np.mean(np.log(ratios))):.2f}")
    if options.json is not None:
        write_json(options.json, "block_pool", rows)


if __name__ == "__main__":
    main()
