"""One routing decision: hash in the gateway, then match, cost and reserve in the controller.

    python tests/benchmarks/bench_router.py [--trace FILE] [--unique N] [--rounds N] [--json FILE]
                                            [--quick]

Prompts are those of a trace, or conversations of about 14,000 tokens where none is given, in
blocks of 16, in the processor's cache, where reading their text has left them; then N prompts that
share nothing, whose first and last tenth should cost the same. Replicas hold a million indexed
blocks together. CPU time of this thread. Beside it Ray Serve's prefix tree and Dynamo's radix tree,
where they can be imported: these only hash and match.
"""

import argparse
import gc
import importlib
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmark_report import Row, print_rows, write_json

from pagefleet.cluster.binding_costs import LateBindingConfig
from pagefleet.cluster.controller import Controller, ControllerConfig
from pagefleet.cluster.replica_view import FloatArray
from pagefleet.cluster.workload import SyntheticSpec, Workload, load_trace, synthetic
from pagefleet.protos.messages import (
    AdmissionClass,
    BlockCounts,
    CacheIdentity,
    Lease,
    ModelCard,
    ReplicaInfo,
    ReplicaReport,
    ReserveRequest,
    RouteEvents,
)
from pagefleet.scheduler.block_hash import root_hash, route_hashes
from pagefleet.scheduler.output import Int32Array

BLOCK_SIZE = 16
NUM_BLOCKS = 1_000_000
IDENTITY = CacheIdentity("bench", 1, "bfloat16", BLOCK_SIZE)
ROOT = root_hash(IDENTITY)


class Replicas:
    """Leaders that accept every lease at once and report as real ones would."""

    def __init__(self, controller: Controller, count: int, *, exchange: bool = False) -> None:
        self.controller = controller
        self.num_blocks = NUM_BLOCKS // count
        self.sequence = [0] * count
        self.resident: list[dict[bytes, None]] = [{} for _ in range(count)]
        self.digests = [0] * count
        self.capacity = self.num_blocks * BLOCK_SIZE // 256
        for number in range(count):
            info = ReplicaInfo(
                replica_id=str(number),
                incarnation="a",
                model="m",
                identity=IDENTITY,
                address="",
                stream_secret="",
                num_blocks=self.num_blocks,
                num_host_blocks=0,
                max_context=1 << 20,
                max_num_sequences=256,
                prefill_tokens_per_s=40_000.0,
                decode_step_s=0.02,
                block_bytes=BLOCK_SIZE * 131_072,
                actors=(f"rank-{number}",) if exchange else (),
            )
            card = ModelCard("m", "", IDENTITY, 1 << 20, 1 << 17, ())
            controller.register_replica(info, card, 0.0)
            self.report(number, RouteEvents(), 0.0, (), snapshot=True)

    def store(self, number: int, hashes: tuple[bytes, ...]) -> RouteEvents:
        """New hashes come, the oldest go: the pool stays full."""
        resident = self.resident[number]
        new = tuple(h for h in hashes if h not in resident)
        resident.update(dict.fromkeys(new))
        gone: list[bytes] = []
        while len(resident) > self.capacity:
            oldest = next(iter(resident))
            del resident[oldest]
            gone.append(oldest)
        for route_hash in (*new, *gone):
            self.digests[number] ^= int.from_bytes(route_hash)
        return RouteEvents(stored_device=new, removed_device=tuple(gone))

    def report(
        self,
        number: int,
        events: RouteEvents,
        now: float,
        finished: tuple[int, ...],
        *,
        snapshot: bool = False,
    ) -> float:
        """Deliver one report; the µs of CPU that it took."""
        self.sequence[number] += 1
        report = ReplicaReport(
            replica_id=str(number),
            incarnation="a",
            epoch=0,
            sequence_number=self.sequence[number],
            steps_done=self.sequence[number],
            device=BlockCounts(cached_idle=self.num_blocks),
            host=BlockCounts(),
            leases=(),
            finished_leases=finished,
            num_waiting=0,
            num_running=0,
            waiting_prefill_tokens=0,
            prefill_tokens_per_s=40_000.0,
            decode_step_s=0.02,
            copy_bytes_per_s=0.0,
            preemptions=0,
            events=events,
            digest_device=self.digests[number],
            is_snapshot=snapshot,
        )
        begin = time.thread_time_ns()
        self.controller.report(report, now)
        return (time.thread_time_ns() - begin) / 1e3


def make_prompts(trace: Path | None, count: int) -> list[Int32Array]:
    workload: Workload = (
        load_trace(trace)
        if trace is not None
        else synthetic(SyntheticSpec(count, turn_tokens=4096, system_tokens=1024, turns=5))
    )
    return [request.prompt() for request in workload.requests[:count]]


def unique_prompts(count: int) -> Iterator[Int32Array]:
    """Prompts of 14,000 tokens that share nothing."""
    rng = np.random.default_rng(3)
    for _ in range(count):
        yield rng.integers(0, 50_000, 14_000, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Decisions:
    """µs of hashing and of `reserve`, by prompt; µs per index event, by report."""

    hashing: list[float]
    reserving: list[float]
    events: list[float]

    @property
    def total(self) -> FloatArray:
        """Hashing and `reserve`, by prompt."""
        return np.add(self.hashing, self.reserving)


def bench_decisions(
    prompts: Iterable[Int32Array], num_replicas: int, *, exchange: bool = False
) -> Decisions:
    """exchange: whether replicas may copy prefixes from each other."""
    config = ControllerConfig(late_binding=LateBindingConfig())
    controller = Controller(config, random.Random(0), 0.0)
    replicas = Replicas(controller, num_replicas, exchange=exchange)
    _fill(replicas)
    hashing: list[float] = []
    reserving: list[float] = []
    events: list[float] = []
    now = 1.0
    for number, prompt in enumerate(map(np.copy, prompts)):
        now += len(prompt) / (40_000.0 * num_replicas)
        begin = time.thread_time_ns()
        hashes = route_hashes(ROOT, prompt, BLOCK_SIZE)
        hashed = time.thread_time_ns()
        request = ReserveRequest(
            request_key=f"q{number}",
            attempt=1,
            gateway_id="g",
            model="m",
            route_hashes=hashes,
            num_tokens=len(prompt),
            num_samples=1,
            max_tokens=200,
            admission_class=AdmissionClass.STANDARD,
        )
        answer = controller.reserve(request, now)
        end = time.thread_time_ns()
        hashing.append((hashed - begin) / 1e3)
        reserving.append((end - hashed) / 1e3)
        grants = [answer] if isinstance(answer, Lease) else []
        grants += [g for g in controller.poll_grants("g", now) if isinstance(g, Lease)]
        for lease in grants:
            replica = int(lease.replica_id)
            change = replicas.store(replica, hashes)
            took = replicas.report(replica, change, now, (lease.lease_id,))
            count = len(change.stored_device) + len(change.removed_device)
            if count >= 32:
                events.append(took / count)
    controller.check_integrity()
    return Decisions(hashing, reserving, events)


def _fill(replicas: Replicas) -> None:
    """Unique prompts until every pool is full."""
    rng = random.Random(1)
    for number in range(len(replicas.sequence)):
        hashes = tuple(rng.randbytes(16) for _ in range(replicas.capacity))
        replicas.report(number, replicas.store(number, hashes), 0.5, ())


def measure_index_memory() -> float:
    """Bytes of index per block of 16 tokens, one owner each."""
    import tracemalloc

    from pagefleet.cluster.prefix_index import PrefixIndex

    rng = random.Random(2)
    count = NUM_BLOCKS * BLOCK_SIZE // 256
    gc.collect()
    tracemalloc.start()
    index = PrefixIndex()
    for _ in range(8):
        index.add_slot()
    for number in range(count):
        index.apply(number % 8, RouteEvents(stored_device=(rng.randbytes(16),)))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / NUM_BLOCKS


def timed(function: Callable[[], object]) -> float:
    begin = time.thread_time_ns()
    function()
    return (time.thread_time_ns() - begin) / 1e3


def bench_dynamo(prompts: list[Int32Array], num_replicas: int) -> float | None:
    """Mean µs to hash and match in Dynamo's Rust tree of as many blocks; None where it is not
    installed."""
    try:
        dynamo = importlib.import_module("dynamo.llm")
    except ImportError:
        return None
    tree = dynamo.RadixTree()

    def store(prompt: Int32Array, worker: int) -> None:
        hashes = dynamo.compute_block_hash_for_seq(prompt.tolist(), BLOCK_SIZE)
        blocks = [{"block_hash": each, "tokens_hash": each} for each in hashes]
        data = {"stored": {"parent_hash": None, "blocks": blocks}}
        tree.apply_event(worker, json.dumps({"event_id": 1, "data": data, "dp_rank": 0}).encode())

    for number, prompt in enumerate(unique_prompts(NUM_BLOCKS * BLOCK_SIZE // 14_000)):
        store(prompt, number % num_replicas)
    times: list[float] = []
    for number, prompt in enumerate(prompts):
        tokens = prompt.tolist()
        times.append(
            timed(
                lambda tokens=tokens: tree.find_matches(
                    dynamo.compute_block_hash_for_seq(tokens, BLOCK_SIZE)
                )
            )
        )
        store(prompt, number % num_replicas)
    return float(np.mean(times))


def bench_ray_tree(prompts: list[Int32Array], num_replicas: int) -> float | None:
    """Mean µs to match in Ray Serve's prefix tree; None where it is not installed."""
    try:
        module = importlib.import_module(
            "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree"
        )
    except ImportError:
        return None
    tree = module.PrefixTree()
    names = [str(number) for number in range(num_replicas)]
    tree.add_tenants(names, 0)
    times: list[float] = []
    for number, prompt in enumerate(prompts):
        text = "".join(map(chr, prompt % 55_000 + 32))
        times.append(timed(lambda text=text: tree.prefix_match(text)))
        tree.insert(text, names[number % num_replicas], number)
    return float(np.mean(times))


def bench_unique(count: int) -> list[Row]:
    """Whether a decision stays as cheap: the last tenth of unique prompts beside the first.

    Of each the tenth percentile. Hashing knows nothing of what was before: where it takes longer
    at the end as well, it is the machine that has become slower.
    """
    decisions, case = bench_decisions(unique_prompts(count), 8), f"{count:,} unique"
    rows: list[Row] = []
    for metric, times in (("reserve us", decisions.reserving), ("hashing us", decisions.hashing)):
        first, last = (
            float(np.percentile(tenth, 10))
            for tenth in (times[: count // 10], times[-(count // 10) :])
        )
        rows.append(Row(case, metric, last, first, "the first tenth of them"))
    return rows


def bench_replicas(prompts: list[Int32Array], num_replicas: int, rounds: int) -> list[Row]:
    """Rows of one size of cluster: of each, the round in which others disturbed it least."""
    ours: list[Decisions] = []
    copying: list[float] = []
    dynamo: list[float | None] = []
    tree: list[float | None] = []
    for _ in range(rounds):
        ours.append(bench_decisions(prompts, num_replicas))
        dynamo.append(bench_dynamo(prompts, num_replicas))
        tree.append(bench_ray_tree(prompts[:300], num_replicas))
        copies = bench_decisions(prompts, num_replicas, exchange=True)
        copying.append(float(copies.total.mean()))
    best = min(ours, key=lambda decisions: float(decisions.total.mean()))
    total, case = best.total, f"{num_replicas} replicas"
    mean = float(total.mean())
    return [
        Row(case, "mean us", mean, _least(dynamo), "Dynamo RadixTree"),
        Row(case, "mean us", mean, _least(tree), "Ray Serve PrefixTree"),
        Row(case, "median us", float(np.median(total)), None, "-"),
        Row(case, "p99 us", float(np.percentile(total, 99)), None, "-"),
        Row(case, "hashing us", float(np.mean(best.hashing)), None, "-"),
        Row(case, "reserve us", float(np.mean(best.reserving)), None, "-"),
        Row(f"{case}, copying", "mean us", min(copying), None, "-"),
        Row("20,000 events/s", "% of a core", 2.0 * float(np.mean(best.events)), None, "-"),
    ]


def _least(times: list[float | None]) -> float | None:
    return min((each for each in times if each is not None), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--unique", type=int, default=5_000, help="prompts that share nothing")
    parser.add_argument("--rounds", type=int, default=3, help="ours and theirs in turn")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer prompts")
    options = parser.parse_args()
    prompts = make_prompts(options.trace, 300 if options.quick else 1000)
    mean_tokens = float(np.mean([len(prompt) for prompt in prompts]))
    print(f"{len(prompts)} prompts of {mean_tokens:,.0f} tokens on average")
    rows: list[Row] = []
    for num_replicas in (8, 64):
        rows += bench_replicas(prompts, num_replicas, 1 if options.quick else options.rounds)
    rows += bench_unique(options.unique)
    bytes_per_block = measure_index_memory()
    rows.append(Row("index", "bytes/block", bytes_per_block, None, "-"))
    print_rows("router", rows)
    if options.json is not None:
        write_json(options.json, "router", rows)


if __name__ == "__main__":
    main()
