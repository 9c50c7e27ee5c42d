"""The controller as a leader sees it."""

from typing import Protocol

from ..protos.messages import ModelCard, ReplicaInfo, ReplicaReport, ReportReply


class ControllerUnreachable(Exception):
    """A call to the controller failed or took too long; it may have been processed even so."""


class ControllerLink(Protocol):
    """The controller as a leader sees it. Each call may raise ControllerUnreachable."""

    async def register_replica(self, info: ReplicaInfo, card: ModelCard) -> ReportReply:
        """Make a new incarnation known."""
        ...

    async def report(self, report: ReplicaReport) -> ReportReply:
        """Tell counts, ledger, speed and changes of residence."""
        ...
