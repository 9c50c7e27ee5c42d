"""What is expected of the future: output lengths, arrivals, and when blocks come back.

Learns from requests that come and end; decides nothing. All are estimates that late requests,
early stops and preemptions correct as they happen; nothing here is relied on for safety.
"""

import math
from collections.abc import Iterable

_BUCKET_RATIO = 1.25
_NUM_BUCKETS = 64  # up to 1.25^64: 1.6 million tokens
_MEMORY = 0.999  # weight of an observation shrinks by this with each newer one
_PRIOR_WEIGHT = 20.0


def _bucket(tokens: int) -> int:
    return min(int(math.log(tokens + 1) / math.log(_BUCKET_RATIO)), _NUM_BUCKETS - 1)


def _bucket_top(bucket: int) -> int:
    return math.ceil(_BUCKET_RATIO ** (bucket + 1)) - 1


class OutputLengths:
    """How many tokens requests generate: a decaying histogram with buckets 25 % apart."""

    def __init__(self, prior_tokens: int = 256) -> None:
        self._weights = [0.0] * _NUM_BUCKETS
        self._weights[_bucket(prior_tokens)] = _PRIOR_WEIGHT
        self._total = _PRIOR_WEIGHT
        self._unit = 1.0
        self._quantiles: dict[float, int] = {}
        self._expected: dict[int | None, float] = {}
        self.num_observed = 0

    def observe(self, tokens: int) -> None:
        """A request ended after so many tokens."""
        self._unit /= _MEMORY  # growing units instead of shrinking 64 weights
        self._weights[_bucket(max(tokens, 0))] += self._unit
        self._total += self._unit
        self.num_observed += 1
        if self._unit > 1e12:
            self._weights = [weight / self._unit for weight in self._weights]
            self._total /= self._unit
            self._unit = 1.0
        if self.num_observed % 16 == 0:
            self._quantiles.clear()
            self._expected.clear()

    def quantile(self, share: float) -> int:
        """The length that so large a share of requests does not exceed."""
        known = self._quantiles.get(share)
        if known is None:
            known = self._quantiles[share] = self._length_at(share)
        return known

    def expected(self, limit: int | None) -> float:
        """Mean length of a request that may generate at most `limit` tokens."""
        known = self._expected.get(limit)
        if known is None:
            if len(self._expected) > 4096:
                self._expected.clear()
            known = self._expected[limit] = self._mean_below(limit)
        return known

    def _length_at(self, share: float) -> int:
        left = share * self._total
        for bucket, weight in enumerate(self._weights):
            left -= weight
            if left <= 0.0:
                return _bucket_top(bucket)
        return _bucket_top(_NUM_BUCKETS - 1)

    def _mean_below(self, limit: int | None) -> float:
        total = 0.0
        for bucket, weight in enumerate(self._weights):
            if weight:
                top = _bucket_top(bucket)
                total += weight * (top if limit is None else min(top, limit))
        return total / self._total


class ArrivalRate:
    """Blocks per second that newcomers have been asking for, the last half minute above all."""

    def __init__(self, memory_s: float = 30.0) -> None:
        self._memory_s = memory_s
        self._sum = 0.0
        self._at = 0.0

    def add(self, num_blocks: int, now: float) -> None:
        """A request of that need has come."""
        self._sum = self._decayed(now) + num_blocks
        self._at = now

    def per_s(self, now: float) -> float:
        """The rate now; it fades where nobody comes."""
        return self._decayed(now) / self._memory_s

    def _decayed(self, now: float) -> float:
        return self._sum * math.exp(-max(0.0, now - self._at) / self._memory_s)


def wait_for_blocks_s(
    missing: int, releases: Iterable[tuple[float, int]], now: float
) -> float | None:
    """Seconds until `missing` more blocks are expected back; None if they never come.

    releases: (expected end, blocks) of what runs; an end that has passed counts as due now.
    """
    if missing <= 0:
        return 0.0
    for end, num_blocks in sorted(releases):
        missing -= num_blocks
        if missing <= 0:
            return max(0.0, end - now)
    return None
