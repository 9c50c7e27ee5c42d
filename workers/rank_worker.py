"""The Ray actor of a rank other than the leader. Knows Ray; what a rank does is in `rank_loop`.

Whoever creates the actor sets `worker_environment` on it, as for `Worker`.
"""
# pyright: reportUnknownMemberType=false

import logging

import ray

from .config import WorkerConfig
from .model_runner import ModelRunner
from .process_identity import ProcessIdentity, this_process
from .rank_loop import RankLoop
from .rendezvous import RankSpec

logger = logging.getLogger(__name__)


class RankWorker:
    """One rank of one incarnation. Needs `max_concurrency` of at least 2: `obey` holds a thread."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config

    def identify(self) -> ProcessIdentity:
        """The process to end when this replica must be gone for certain."""
        return this_process(ray.get_runtime_context().get_node_id())

    def obey(self, spec: RankSpec) -> None:
        """Load, together with the leader, and run its steps; returns when it sends the ranks home.

        Raises GroupError when the leader or another rank is lost.
        """
        runner = ModelRunner.load(self._config, spec)
        logger.info("rank %d: %s", spec.rank, runner.partition.text)
        RankLoop(runner).run()
