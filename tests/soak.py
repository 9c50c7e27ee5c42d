"""A soak: a real cluster of two replicas under load for minutes, one worker killed each minute.

    .venv/bin/python tests/soak.py --minutes 15 --json soak.json

Clients stream to the end, cancel, set deadlines too short, and send what is no request, over gRPC
and HTTP. It passes (and exits with 0) if every stream got its exact tokens or a clean status, none
hung, the memory of every process of ours stayed within 5 %, and every block is free at the end.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import ray
from failure_load import Load, Question, make_questions
from process_memory import MemoryWatch, Trend
from rich.console import Console
from tiny_model import make_tiny_model

from pagefleet.cluster.client import AsyncClient, Client
from pagefleet.cluster.config import ClusterConfig, NamedModel
from pagefleet.cluster.ray_runtime import ray_session
from pagefleet.cluster.serve import RunningCluster, started_cluster
from pagefleet.cluster.tables import make_table
from pagefleet.protos import errors
from pagefleet.protos.messages import SamplingParams

NUM_QUESTIONS = 48
NUM_TOKENS = 60
HANG_S = 150.0
LASTING = {"GatewayActor", "ControllerActor", "SupervisorActor"}
REPLICAS = {"Worker"}
MAX_CHANGE = 0.05
KINDS = {"stream": 40, "http": 20, "cancel": 20, "deadline": 10, "bad": 10}
NO_REQUESTS: list[tuple[object, dict[str, object]]] = [
    ("fine", {"temperature": -1.0}),
    ("fine", {"n": 4096}),
    ("fine", {"max_tokens": 10**7}),
    ("fine", {"stop": ("",)}),
    ("", {}),
    ([10**6], {}),
    ("long " * 1000, {}),
]
NO_BODIES = (b"{", b"[]", b'{"prompt": 1}', b'{"prompt": "x", "n": -1}', b"\xff" * 1000)


@dataclass(frozen=True)
class Verdict:
    """One thing that must be true, and what was found."""

    name: str
    holds: bool
    found: str


class Clients:
    """Who asks all the time, and what became of each request. What must not be is in `faults`."""

    def __init__(self, cluster: RunningCluster, expected: list[tuple[object, str]], seed: int):
        self.questions = make_questions(NUM_QUESTIONS, NUM_TOKENS)
        self.expected = expected
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []
        self._addresses = cluster.addresses
        self._rng = random.Random(seed)

    async def run(self, number: int, until_s: float) -> None:
        """So many at once, each one request after the other."""
        url = f"http://{self._addresses.http}"
        async with (
            AsyncClient(self._addresses.grpc) as grpc,
            httpx.AsyncClient(base_url=url, timeout=HANG_S, verify=False) as http,
        ):
            await asyncio.gather(*(self._ask(grpc, http, until_s) for _ in range(number)))

    async def _ask(self, grpc: AsyncClient, http: httpx.AsyncClient, until_s: float) -> None:
        while time.monotonic() < until_s:
            (kind,) = self._rng.choices(list(KINDS), list(KINDS.values()))
            index = self._rng.randrange(NUM_QUESTIONS)
            try:
                async with asyncio.timeout(HANG_S):
                    end = await getattr(self, f"_{kind}")(http if kind == "http" else grpc, index)
            except TimeoutError:
                self._fault(f"{kind}: hung for {HANG_S:g} s")
            except Exception as error:  # the edge: whatever it is, it is told at the end
                self._fault(f"{kind}: {error!r}")
            else:
                self.outcomes[f"{kind}: {end}"] += 1

    def _fault(self, what: str) -> None:
        self.faults.append(what)
        self.outcomes["fault"] += 1

    def _check(self, load: Load, index: int, is_whole: bool) -> None:
        tokens, text = load.results[0].answer
        right, right_text = self.expected[index]
        if is_whole:
            assert (tokens, text) == (right, right_text), f"question {index} was answered otherwise"
        assert tokens == right[: len(tokens)], f"question {index} began otherwise"

    async def _stream(self, grpc: AsyncClient, index: int) -> str:
        load = Load([self.questions[index]])
        await load.run_to_end(grpc, 0)
        self._check(load, index, is_whole=True)
        return "exact, resumed" if load.results[0].resumes else "exact"

    async def _cancel(self, grpc: AsyncClient, index: int) -> str:
        load = Load([self.questions[index]])
        running = asyncio.ensure_future(load.run_to_end(grpc, 0))
        await asyncio.wait({running}, timeout=self._rng.uniform(0.0, 1.0))
        is_cancelled = running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        self._check(load, index, is_whole=not is_cancelled)
        return "cancelled" if is_cancelled else "too late"

    async def _deadline(self, grpc: AsyncClient, index: int) -> str:
        question = self.questions[index]
        timeout_s = self._rng.uniform(0.02, 0.5)
        try:
            await grpc.generate(question.prompt, question.sampling, timeout_s=timeout_s)
        except (errors.DeadlineExceeded, errors.Unavailable) as error:
            return type(error).__name__
        return "in time"

    async def _bad(self, grpc: AsyncClient, index: int) -> str:
        prompt, changes = NO_REQUESTS[index % len(NO_REQUESTS)]
        try:
            await grpc.generate(prompt, SamplingParams(**({"max_tokens": 4} | changes)))
        except (errors.InvalidArgument, errors.Unavailable) as error:
            return type(error).__name__
        raise AssertionError(f"{prompt!r}, {changes} was taken for a request")

    async def _http(self, http: httpx.AsyncClient, index: int) -> str:
        if index % 4 == 3:
            reply = await http.post(
                "/v1/completions", content=NO_BODIES[index // 4 % len(NO_BODIES)]
            )
            assert reply.status_code == 400, reply.text
            return "refused"
        text = ""
        body = _body(self.questions[index])
        async with http.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code == 503:
                return "unavailable"
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        assert event["error"]["code"] == "unavailable", event
                        return "unavailable"
                    text += "".join(choice["text"] for choice in event["choices"])
        assert text == self.expected[index][1], f"question {index} was answered otherwise"
        return "exact"


def _body(question: Question) -> dict[str, object]:
    sampling = question.sampling
    return {
        "model": "tiny",
        "prompt": question.prompt,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "ignore_eos": True,
        "stream": True,
    }


class Soak:
    """A cluster, its clients, and what disturbs and watches it meanwhile."""

    def __init__(self, cluster: RunningCluster, options: argparse.Namespace) -> None:
        self.cluster = cluster
        self.options = options
        self.memory = MemoryWatch()
        self.num_kills = 0
        self.began_s = 0.0
        self._rng = random.Random(options.seed)

    async def run(self) -> None:
        """Ask in peace what the answers are, then in trouble."""
        peace = Load(make_questions(NUM_QUESTIONS, NUM_TOKENS))
        expected = [result.answer for result in await peace.run_on(self.cluster.addresses.grpc)]
        self.clients = Clients(self.cluster, expected, self.options.seed)
        self.began_s = time.time()
        until_s = time.monotonic() + 60.0 * self.options.minutes
        watching = [asyncio.create_task(each(until_s)) for each in (self._kill, self._look)]
        await self.clients.run(self.options.clients, until_s)
        await asyncio.gather(*watching)

    async def _kill(self, until_s: float) -> None:
        """The leader of one replica or the other, each minute but the last."""
        while time.monotonic() + 1.5 * self.options.kill_every < until_s:
            await asyncio.sleep(self.options.kill_every)
            processes = await self.cluster.supervisor.processes.remote()
            if processes:
                victim = sorted(processes)[self.num_kills % len(processes)]
                os.kill(processes[victim].pid, signal.SIGKILL)
                self.num_kills += 1

    async def _look(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            await asyncio.to_thread(self.memory.look)
            await asyncio.sleep(3.0)

    def verdicts(self) -> list[Verdict]:
        """After the run."""
        clients = self.clients
        return [
            Verdict("clients", not clients.faults, "; ".join(clients.faults[:5]) or "no fault"),
            self._blocks(),
            *(
                Verdict(
                    f"memory {trend.name}",
                    abs(trend.change) <= MAX_CHANGE,
                    f"{trend.first_mib:.1f} to {trend.last_mib:.1f} MiB ({trend.change:+.1%})"
                    f", {trend.num_lives} at {trend.at_age_s:.0f} s",
                )
                for trend in self.trends()
                if trend.name in LASTING | REPLICAS
            ),
        ]

    def trends(self) -> list[Trend]:
        """Warm-up is a fifth of the run, two minutes at most."""
        warm_s = self.began_s + min(120.0, 12.0 * self.options.minutes)
        # half of what a worker lives, if each is killed in its turn
        age_s = 0.75 * self.options.kill_every
        lasting = [t for t in self.memory.lasting(warm_s) if t.name not in REPLICAS]
        return lasting + self.memory.successors(REPLICAS, age_s, self.began_s)

    def _blocks(self) -> Verdict:
        """Whether all are clean or cached-idle, in the end, and the books agree."""
        deadline = time.monotonic() + 120.0
        with Client(self.cluster.addresses.grpc) as client:
            while True:
                replicas = client.cluster_state().replicas
                busy = [
                    f"{each.replica_id}: {each.state}, {each.num_running} running, "
                    f"{each.device.referenced} referenced, {each.leased_blocks} leased"
                    for each in replicas
                    if each.state != "ready"
                    or each.num_running + each.num_waiting + each.leased_blocks
                    or each.device.clean + each.device.cached_idle != each.device.total
                ]
                if len(replicas) == 2 and not busy:
                    break
                if time.monotonic() > deadline:
                    return Verdict("blocks", False, "; ".join(busy))
                time.sleep(0.2)  # between two looks at another process
        ray.get(self.cluster.controller.check_integrity.remote(), timeout=60)
        num_running = ray.get(self.cluster.gateway.num_running.remote(), timeout=60)
        counts = [f"{r.device.clean} clean + {r.device.cached_idle} cached" for r in replicas]
        return Verdict("blocks", num_running == 0, f"{', '.join(counts)}; {num_running} running")


def report(soak: Soak, verdicts: list[Verdict]) -> dict[str, object]:
    """What JSON has of it."""
    trends = [asdict(trend) | {"change": trend.change} for trend in soak.trends()]
    return {
        "minutes": soak.options.minutes,
        "seed": soak.options.seed,
        "clients": soak.options.clients,
        "kills": soak.num_kills,
        "outcomes": dict(sorted(soak.clients.outcomes.items())),
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "memory": trends,
    }


def show(console: Console, soak: Soak, verdicts: list[Verdict]) -> None:
    """The same for people."""
    outcomes = make_table(("outcome", "requests"))
    for name, number in sorted(soak.clients.outcomes.items()):
        outcomes.add_row(name, str(number))
    memory = make_table(("process", "lives", "first MiB", "last MiB", "change"))
    for trend in soak.trends():
        sizes = (f"{trend.first_mib:.1f}", f"{trend.last_mib:.1f}", f"{trend.change:+.1%}")
        memory.add_row(trend.name, str(trend.num_lives), *sizes)
    console.print(outcomes, memory, f"{soak.num_kills} workers killed")
    for verdict in verdicts:
        console.print(f"{'ok  ' if verdict.holds else 'FAIL'} {verdict.name}: {verdict.found}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--clients", type=int, default=12, help="requests at once")
    parser.add_argument("--kill-every", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> int:
    """0 if all verdicts hold."""
    options = arguments()
    with tempfile.TemporaryDirectory() as folder, ray_session(None, num_cpus=16):
        config = ClusterConfig(
            models=(NamedModel(str(make_tiny_model(Path(folder) / "tiny")), "tiny"),),
            replicas=2,
            grpc_port=0,
            http_port=0,
            num_blocks=256,
            max_model_len=1024,
            deterministic=True,
        )
        with started_cluster(config, on_progress=print) as cluster:
            soak = Soak(cluster, options)
            asyncio.run(soak.run())
            verdicts = soak.verdicts()
    show(Console(width=110), soak, verdicts)
    if options.json is not None:
        options.json.write_text(json.dumps(report(soak, verdicts), indent=1))
    return 0 if all(verdict.holds for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
