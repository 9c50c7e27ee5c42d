"""What gateways have still to fetch, and which of them live.

A gateway keeps one call open for its answers; what comes up between two such calls lies here. Knows
gateways and answers, nothing of queues or leases.
"""

from collections import deque
from dataclasses import dataclass, field

from ..protos.messages import Lease, Refused

Answer = Lease | Refused


@dataclass(slots=True)
class _Outbox:
    last_seen: float
    answers: deque[Answer] = field(default_factory=deque[Answer])


class Outboxes:
    """One for each gateway that has been heard lately."""

    def __init__(self) -> None:
        self._boxes: dict[str, _Outbox] = {}

    def heard(self, gateway_id: str, now: float) -> None:
        """The gateway lives."""
        box = self._boxes.get(gateway_id)
        if box is None:
            self._boxes[gateway_id] = _Outbox(now)
        else:
            box.last_seen = now

    def send(self, gateway_id: str, answer: Answer) -> None:
        """Nobody waits for what a gateway asked that is gone."""
        box = self._boxes.get(gateway_id)
        if box is not None:
            box.answers.append(answer)

    def fetch(self, gateway_id: str) -> tuple[Answer, ...]:
        """What came up for it; each answer is handed out once."""
        answers = self._boxes[gateway_id].answers
        fetched = tuple(answers)
        answers.clear()
        return fetched

    def has_answers(self, gateway_id: str) -> bool:
        """Whether `fetch` would return something."""
        box = self._boxes.get(gateway_id)
        return box is not None and bool(box.answers)

    def take_back(self, gateway_id: str, answer: Answer) -> bool:
        """Withdraw an answer; False if it has been fetched."""
        box = self._boxes.get(gateway_id)
        if box is None or answer not in box.answers:
            return False
        box.answers.remove(answer)
        return True

    def forget_silent(self, since: float) -> list[str]:
        """Drop gateways that have not been heard since then; returns them."""
        silent = [name for name, box in self._boxes.items() if box.last_seen < since]
        for gateway_id in silent:
            del self._boxes[gateway_id]
        return silent
