"""A soak: a real cluster of two replicas under load for minutes, and in trouble each minute.

    .venv/bin/python tests/soak.py --minutes 15 --json soak.json
    .venv/bin/python tests/soak.py --minutes 5 --every 15 --everything

Clients stream to the end, cancel, set deadlines too short, and send what is no request, over gRPC
and HTTP, while workers are killed. With `--everything` all that changes how steps, blocks and
streams work is on at once, and gateways, weights and caches are not spared either. It passes (and
exits with 0) if every stream got its exact tokens or a clean status, none hung, the memory of every
process of ours stayed within 5 %, and every block is free and nobody left over at the end.
"""

import argparse
import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import ray
import trustme
from process_memory import MemoryWatch, Trend
from rich.console import Console
from soak_clients import Clients
from soak_troubles import Troubles
from tiny_model import make_tiny_model

from pagefleet.cluster.client import Client
from pagefleet.cluster.config import ClusterConfig, NamedModel
from pagefleet.cluster.ray_runtime import ray_session
from pagefleet.cluster.security import GatewaySecurity
from pagefleet.cluster.serve import RunningCluster, started_cluster
from pagefleet.cluster.tables import make_table
from pagefleet.cluster.tls import TlsFiles

LASTING = {"GatewayActor", "ControllerActor", "SupervisorActor", "gcs_server"}
REPLICAS = {"Worker"}
MAX_CHANGE = 0.05
NUM_REPLICAS = 2
TROUBLES = ("worker",)
# The drained replica never comes back: later, where there is but one, each loss is an outage.
ALL_TROUBLES = ("worker", "gateway", "weights", "worker", "cache", "worker", "gateway", "drain")


@dataclass(frozen=True)
class Verdict:
    """One thing that must be true, and what was found."""

    name: str
    holds: bool
    found: str


class Soak:
    """A cluster, its clients, and what disturbs and watches it meanwhile."""

    def __init__(self, cluster: RunningCluster, newer: Path, options: argparse.Namespace) -> None:
        self.cluster = cluster
        self.options = options
        self.memory = MemoryWatch()
        self.began_s = 0.0
        names = ALL_TROUBLES if options.everything else TROUBLES
        self._names = itertools.cycle(names)
        self._lasting = LASTING - {"GatewayActor"} if "gateway" in names else LASTING | REPLICAS
        self.troubles = Troubles(cluster, newer, NUM_REPLICAS, options.seed)
        self.clients = Clients(
            cluster,
            options.seed,
            has_tls=options.everything,
            loses_gateways="gateway" in names,
        )

    async def run(self) -> None:
        """Ask in peace what the answers are, then in trouble."""
        await self.clients.ask_in_peace()
        self.began_s = time.time()
        until_s = time.monotonic() + 60.0 * self.options.minutes
        watching = [asyncio.create_task(each(until_s)) for each in (self._disturb, self._look)]
        await self.clients.run(self.options.clients, until_s)
        await asyncio.gather(*watching)

    async def _disturb(self, until_s: float) -> None:
        """Each minute but the last."""
        while time.monotonic() + 1.5 * self.options.every < until_s:
            await asyncio.sleep(self.options.every)
            name = next(self._names)
            print(f"{time.time() - self.began_s:.0f} s: {name}", flush=True)
            await self.troubles.make(name)

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
                if trend.name in self._lasting
            ),
        ]

    def trends(self) -> list[Trend]:
        """Warm-up is a fifth of the run, two minutes at most."""
        warm_s = self.began_s + min(120.0, 12.0 * self.options.minutes)
        # half of what a worker lives, if each is killed in its turn
        age_s = 0.75 * self.options.every
        lasting = [t for t in self.memory.lasting(warm_s) if t.name not in REPLICAS]
        return lasting + self.memory.successors(REPLICAS, age_s, self.began_s)

    def _blocks(self) -> Verdict:
        """Whether all are clean or cached-idle, in the end, and the books agree."""
        deadline = time.monotonic() + 120.0
        next_word = time.monotonic() + 10.0
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
                if len(replicas) == self.troubles.num_replicas and not busy:
                    break
                if time.monotonic() > deadline:
                    found = f"{len(replicas)} replicas; {'; '.join(busy)}"
                    return Verdict("blocks", False, found)
                if time.monotonic() > next_word:
                    print(f"{len(replicas)} replicas; {'; '.join(busy)}", flush=True)
                    next_word = time.monotonic() + 10.0
                time.sleep(0.2)  # between two looks at another process
        ray.get(self.cluster.controller.check_integrity.remote(), timeout=60)
        num_running = ray.get(self.cluster.gateway.num_running.remote(), timeout=60)
        counts = [f"{r.device.clean} clean + {r.device.cached_idle} cached" for r in replicas]
        return Verdict("blocks", num_running == 0, f"{', '.join(counts)}; {num_running} running")

    def leftovers(self) -> Verdict:
        """Once everything has ended: whether any process that was seen lives on."""
        processes: list[psutil.Process] = []
        for (pid, born), life in self.memory.lives.items():
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.create_time() == born and life.name != "IDLE":
                    processes.append(process)
        _, alive = psutil.wait_procs(processes, timeout=20)
        found = "; ".join(" ".join(process.cmdline()) for process in alive)
        return Verdict("processes", not alive, found or "none left over")


def report(soak: Soak, verdicts: list[Verdict]) -> dict[str, object]:
    """What JSON has of it."""
    trends = [asdict(trend) | {"change": trend.change} for trend in soak.trends()]
    return {
        "minutes": soak.options.minutes,
        "seed": soak.options.seed,
        "clients": soak.options.clients,
        "troubles": dict(soak.troubles.done),
        "outcomes": dict(sorted(soak.clients.outcomes.items())),
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "memory": trends,
        "curves": soak.memory.curves(LASTING),
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
    troubles = ", ".join(f"{number} x {name}" for name, number in soak.troubles.done.items())
    console.print(outcomes, memory, f"troubles: {troubles}")
    for verdict in verdicts:
        console.print(f"{'ok  ' if verdict.holds else 'FAIL'} {verdict.name}: {verdict.found}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--clients", type=int, default=12, help="requests at once")
    parser.add_argument("--every", type=float, default=60.0, metavar="SECONDS", help="of trouble")
    parser.add_argument("--everything", action="store_true", help="all options, all troubles")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def plain_config(model: Path) -> ClusterConfig:
    """Two replicas; deterministic, so that answers can be compared."""
    return ClusterConfig(
        models=(NamedModel(str(model), "tiny"),),
        replicas=NUM_REPLICAS,
        grpc_port=0,
        http_port=0,
        num_blocks=256,
        max_model_len=1024,
        deterministic=True,
    )


def config_of_everything(model: Path, folder: Path) -> ClusterConfig:
    """All at once, in pools that hold three or four requests."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    files = TlsFiles(folder / "cert.pem", folder / "key.pem")
    files.certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    files.key.write_bytes(issued.private_key_pem.bytes())
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    os.environ["PAGEFLEET_TLS_CA"] = str(folder / "ca.pem")
    return replace(
        plain_config(model),
        tp=2,
        num_blocks=28,
        host_memory=2 * 2**20,
        max_num_batched_tokens=64,
        preemption_mode="swap",
        speculative="ngram",
        overlap_steps=True,
        weight_dtype="int8",
        kv_dtype="fp8",
        max_queue_s=10.0,
        security=GatewaySecurity(tls=files),
    )


def main() -> int:
    """0 if all verdicts hold."""
    options = arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, newer = (make_tiny_model(folder / part) for part in ("tiny", "newer"))
        config = config_of_everything(model, folder) if options.everything else plain_config(model)
        with ray_session(None, num_cpus=16), started_cluster(config, print) as cluster:
            soak = Soak(cluster, newer, options)
            asyncio.run(soak.run())
            verdicts = soak.verdicts()
    verdicts.append(soak.leftovers())
    show(Console(width=110), soak, verdicts)
    if options.json is not None:
        options.json.write_text(json.dumps(report(soak, verdicts), indent=1))
    return 0 if all(verdict.holds for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
