"""Simulated time: what happens when, one event after the other. Knows not what happens."""

import heapq
from collections.abc import Callable


class VirtualClock:
    """Events in the order of their time; of equal times, in the order in which they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0

    def at(self, when: float, happen: Callable[[], None]) -> None:
        """Let it happen then; at once where that has passed, as for one who was frozen."""
        self._num_events += 1
        heapq.heappush(self._events, (max(when, self.now), self._num_events, happen))

    def step(self) -> bool:
        """Go on to the next event; False where there is none."""
        if not self._events:
            return False
        self.now, _, happen = heapq.heappop(self._events)
        happen()
        return True
