"""What the clients of one gateway saw in the last seconds: tokens, ends and first tokens.

Counts by whole seconds, so that a token costs an addition. Knows no request.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

_MAX_TTFT = 256  # of one second: more do not change a percentile that anyone could see


@dataclass(frozen=True, slots=True)
class Rates:
    """Means over the window. ttft: None where no sample ended."""

    window_s: float
    tokens_per_s: float
    requests_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None


@dataclass(slots=True)
class _Second:
    number: int
    num_tokens: int = 0
    num_ended: int = 0
    ttft_s: list[float] = field(default_factory=list[float])


class RecentRates:
    """The last `window_s` seconds and the one that has begun."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, window_s: int = 10) -> None:
        self._clock = clock
        self._window_s = window_s
        self._seconds: deque[_Second] = deque(maxlen=window_s + 1)
        self._began = clock()

    def add_tokens(self, num_tokens: int) -> None:
        """New output tokens."""
        self._now().num_tokens += num_tokens

    def add_end(self, ttft_s: float | None) -> None:
        """A sample ended; so long had it waited for its first token."""
        second = self._now()
        second.num_ended += 1
        if ttft_s is not None and len(second.ttft_s) < _MAX_TTFT:
            second.ttft_s.append(ttft_s)

    def rates(self) -> Rates:
        """Over the whole seconds of the window and the part of one that has passed."""
        now = self._clock()
        first = int(now) - self._window_s
        seconds = [second for second in self._seconds if second.number >= first]
        passed_s = max(min(now - first, now - self._began), 1e-3)
        ttft = sorted(time_s for second in seconds for time_s in second.ttft_s)
        return Rates(
            window_s=passed_s,
            tokens_per_s=sum(second.num_tokens for second in seconds) / passed_s,
            requests_per_s=sum(second.num_ended for second in seconds) / passed_s,
            ttft_p50_s=_percentile(ttft, 50),
            ttft_p99_s=_percentile(ttft, 99),
        )

    def _now(self) -> _Second:
        number = int(self._clock())
        if not self._seconds or self._seconds[-1].number != number:
            self._seconds.append(_Second(number))
        return self._seconds[-1]


def _percentile(ordered: list[float], percent: int) -> float | None:
    """The smallest value that so many percent do not exceed."""
    return ordered[-(-len(ordered) * percent // 100) - 1] if ordered else None
