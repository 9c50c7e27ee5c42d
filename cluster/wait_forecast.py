"""How long a newcomer would wait: work over capacity, corrected by how fast work goes.

Knows no request and no queue: sums come in, seconds go out.
"""

from dataclasses import dataclass

# Weight of what was seen before, at each further grant; what it begins with, as if seen.
_MEMORY = 0.998
_PRIOR_S = 1.0
# A queue that has just formed says more about a burst than about capacity.
_SETTLE_S = 0.5
_BOUNDS = (0.125, 8.0)


@dataclass(frozen=True, slots=True)
class Work:
    """What requests ask of a cluster: prompt tokens, block-seconds, and sequence-seconds."""

    num_tokens: int = 0
    block_seconds: float = 0.0
    sequence_seconds: float = 0.0

    @classmethod
    def of(cls, num_tokens: int, num_blocks: int, num_sequences: int, duration_s: float) -> "Work":
        """What one request asks that holds its blocks and sequences for so long."""
        return cls(num_tokens, num_blocks * duration_s, num_sequences * duration_s)

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.num_tokens + other.num_tokens,
            self.block_seconds + other.block_seconds,
            self.sequence_seconds + other.sequence_seconds,
        )

    def __sub__(self, other: "Work") -> "Work":
        return Work(
            self.num_tokens - other.num_tokens,
            self.block_seconds - other.block_seconds,
            self.sequence_seconds - other.sequence_seconds,
        )


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the open replicas can do together. prefill_rate: tokens per second."""

    prefill_rate: float
    num_blocks: int
    num_sequences: int

    def seconds_for(self, work: Work) -> float:
        """How long the scarcest of the three is busy with the work."""
        return max(
            work.num_tokens / self.prefill_rate,
            work.block_seconds / max(1, self.num_blocks),
            work.sequence_seconds / max(1, self.num_sequences),
        )


class WaitForecast:
    """The factor between what the queue's work should take and what it takes.

    Prefix hits, early ends and fragmentation all go into it. Only time in which somebody waited
    counts: the cluster then did all that it can.
    """

    def __init__(self) -> None:
        self._elapsed_s = self._expected_s = _PRIOR_S
        self._saturated_since: float | None = None
        self._last_grant = 0.0

    @property
    def factor(self) -> float:
        """Seconds that a second of expected work takes."""
        low, high = _BOUNDS
        return min(max(self._elapsed_s / self._expected_s, low), high)

    def granted(self, expected_s: float, now: float, *, others_wait: bool) -> None:
        """A waiting request got its lease; its work alone should take so long."""
        since = self._saturated_since
        if since is not None and self._last_grant - since >= _SETTLE_S:
            self._elapsed_s = _MEMORY * self._elapsed_s + now - self._last_grant
            self._expected_s = _MEMORY * self._expected_s + expected_s
        self._last_grant = now
        if not others_wait:
            self._saturated_since = None
        elif since is None:
            self._saturated_since = now
