"""How the ranks of one replica talk: the protocol, its errors, and a group of one.

Knows no model, no step and no transport. Every collective is entered by all ranks in the same
order; where one does not come, comes with something else, or dies, the others get an error
within the group's timeout and the group is of no further use. Nothing waits for ever but
`receive`, and that ends when the leader does.
"""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # a replica's creator knows the errors alone, and loads no torch
    from torch import Tensor


class GroupError(Exception):
    """The ranks cannot go on together; the replica has to be rebuilt.

    rank: the rank that the error speaks of; None where the transport does not tell.
    """

    def __init__(self, rank: int | None, message: str) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.rank, str(self))


class RankLost(GroupError):
    """A rank's process ended, or it left the group."""


class RankTimeout(GroupError):
    """A rank lives and did not take part in time."""


class RankMismatch(GroupError):
    """A rank entered another collective, or the same one with another size or dtype."""


class GroupAborted(GroupError):
    """A rank gave up and told the others."""


class TensorParallelGroup(Protocol):
    """The ranks of one replica. One thread at a time, `abort` and `check` apart.

    Rank 0 is the leader. Tensors are contiguous and have the same dtype on all ranks.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace the tensor, of the same shape on all ranks, by the sum over all ranks."""
        ...

    def all_gather(self, tensor: Tensor, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
        """All ranks' tensors side by side along `dim`, in rank order.

        sizes: each rank's length along `dim`; None = all as long as this one's.
        """
        ...

    def gather(self, tensor: Tensor, dim: int, sizes: Sequence[int] | None = None) -> Tensor | None:
        """As `all_gather`, for the leader alone; the others get None and may not wait for it."""
        ...

    def broadcast(self, message: bytes | None) -> bytes:
        """The leader's message, on all ranks; the others pass None and wait as long as the leader
        lives. The leader does not wait for them to have read it."""
        ...

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return once all ranks have entered. timeout_s: None = the group's."""
        ...

    def check(self) -> None:
        """Raise if a rank is known to be gone or to have given up; never waits."""
        ...

    def abort(self) -> None:
        """Make every other rank's current and later calls fail. From any thread."""
        ...

    def close(self) -> None:
        """Leave; whoever still waits for this rank gets an error. Closing twice is harmless."""
        ...


class SingleRank:
    """A group of one: every collective is the identity."""

    rank = 0
    world_size = 1

    def all_reduce(self, tensor: Tensor) -> None:
        """The tensor is the sum already."""

    def all_gather(self, tensor: Tensor, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
        """The tensor itself."""
        return tensor

    def gather(self, tensor: Tensor, dim: int, sizes: Sequence[int] | None = None) -> Tensor | None:
        """The tensor itself."""
        return tensor

    def broadcast(self, message: bytes | None) -> bytes:
        """The message itself."""
        assert message is not None, "the leader has to bring the message"
        return message

    def barrier(self, timeout_s: float | None = None) -> None:
        """All are here."""

    def check(self) -> None:
        """Nobody else could be gone."""

    def abort(self) -> None:
        """Nobody to tell."""

    def close(self) -> None:
        """Nothing is held."""
