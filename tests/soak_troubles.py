"""What is done to a cluster during a soak, by name. Knows nothing of its clients."""

import asyncio
import random
from collections import Counter
from pathlib import Path

import psutil

from pagefleet.cluster.client import Client
from pagefleet.cluster.serve import RunningCluster
from pagefleet.protos.errors import Unavailable

DRAIN_S = 5.0
NO_GATEWAY_S = 60.0


class Troubles:
    """Done one at a time, whatever state the cluster is in by then.

    newer: a folder with the same weights. num_replicas: that the cluster should have now.
    """

    def __init__(self, cluster: RunningCluster, newer: Path, num_replicas: int, seed: int) -> None:
        self.num_replicas = num_replicas
        self.done: Counter[str] = Counter()
        self._address = cluster.addresses.grpc
        self._newer = newer
        self._rng = random.Random(seed)

    async def make(self, name: str) -> None:
        """One of the methods below; an order waits until there is a gateway to give it to."""
        async with asyncio.timeout(NO_GATEWAY_S):
            while True:
                try:
                    self.done[name] += await asyncio.to_thread(getattr(self, f"_{name}"))
                except Unavailable:
                    await asyncio.sleep(1.0)
                else:
                    return

    def _worker(self) -> bool:
        """SIGKILL to any rank of any replica."""
        return self._kill("Worker")

    def _gateway(self) -> bool:
        return self._kill("GatewayActor")

    def _kill(self, actor: str) -> bool:
        processes = [
            process
            for process in psutil.Process().children(recursive=True)
            if " ".join(process.cmdline()).startswith(f"ray::{actor}")
        ]
        if processes:
            self._rng.choice(processes).kill()
        return bool(processes)

    def _weights(self) -> bool:
        with Client(self._address) as client:
            client.update_weights(str(self._newer), drain_s=DRAIN_S)
        return True

    def _cache(self) -> bool:
        with Client(self._address) as client:
            client.reset_prefix_cache()
        return True

    def _drain(self) -> bool:
        """For good: of the last replica it would be the end."""
        with Client(self._address) as client:
            replicas = [each.replica_id for each in client.cluster_state().replicas]
            if self.num_replicas == 1 or len(replicas) < self.num_replicas:
                return False
            client.drain(replicas[0], DRAIN_S)
        self.num_replicas -= 1
        return True
