"""The Ray actor of a rank other than the leader. Knows Ray; what a rank does is in `rank_loop`.

Whoever creates the actor sets `worker_environment` on it, as for `Worker`, and imports this file:
what needs torch is imported where the actor's own process first needs it.
"""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import ray

from .config import WorkerConfig
from .process_identity import ProcessIdentity, this_process
from .rank_spec import RankSpec

if TYPE_CHECKING:
    from .block_staging import BlockBatch
    from .block_storage import BlockStorage

logger = logging.getLogger(__name__)


class RankWorker:
    """One rank of one incarnation. Needs `max_concurrency` of at least 2: `obey` holds a thread."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._storage: BlockStorage | None = None

    def identify(self) -> ProcessIdentity:
        """The process to end when this replica must be gone for certain."""
        return this_process(ray.get_runtime_context().get_node_id())

    def obey(self, spec: RankSpec) -> None:
        """Load, together with the leader, and run its steps; returns when it sends the ranks home.

        Raises GroupError when the leader or another rank is lost.
        """
        from .model_runner import ModelRunner
        from .rank_loop import RankLoop

        runner = ModelRunner.load(self._config, spec)
        self._storage = runner.storage
        logger.info("rank %d: %s", spec.rank, runner.partition.text)
        RankLoop(runner).run()

    def read_shard(self, block_ids: tuple[int, ...]) -> BlockBatch:
        """This rank's part of blocks that the leader holds for another replica."""
        from .ray_transfers import read_shard

        return read_shard(self._loaded(), block_ids)

    def fetch_shard(
        self, source: str, import_id: int, block_ids: tuple[int, ...], timeout_s: float
    ) -> None:
        """Stage this rank's part of what another replica's same rank, by its name, has."""
        from .ray_transfers import fetch_shard

        fetch_shard(self._loaded(), source, import_id, block_ids, timeout_s)

    def forget_staged(self, import_id: int) -> None:
        """It is of no use any more."""
        self._loaded().staged.take(import_id)

    def _loaded(self) -> BlockStorage:
        assert self._storage is not None, "obey() comes first"
        return self._storage
