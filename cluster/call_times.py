"""How long the controller's own calls take, as histograms. Knows no clock: durations come in."""

from bisect import bisect_left

from ..protos.messages import CallTimes

# from 10 µs: most calls take less than a millisecond
_BOUNDS_S = (
    *(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4),
    *(1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.1, 1.0),
)


class CallClock:
    """One histogram per name, made when the name is first seen."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._totals: dict[str, float] = {}

    def add(self, call: str, elapsed_s: float) -> None:
        """One call of that name has ended."""
        counts = self._counts.get(call)
        if counts is None:
            counts = self._counts[call] = [0] * (len(_BOUNDS_S) + 1)
            self._totals[call] = 0.0
        counts[bisect_left(_BOUNDS_S, elapsed_s)] += 1
        self._totals[call] += elapsed_s

    def stats(self) -> tuple[CallTimes, ...]:
        """All of them now."""
        return tuple(
            CallTimes(call, _BOUNDS_S, tuple(counts), self._totals[call])
            for call, counts in self._counts.items()
        )
