"""What is left to say of an incarnation that serves no more."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaEnd:
    """Why an incarnation serves no more.

    drained: on purpose, so that none has to follow it, but where it renews.
    """

    reason: str
    drained: bool = False
    renews: bool = False
