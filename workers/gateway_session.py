"""What one gateway is owed: its live requests, and the messages it may not have received yet.

gRPC acknowledges nothing to us, so messages are numbered and the last ones are kept after they
were sent: a gateway that attaches again says which one it saw last and gets the rest. Lives on
one asyncio loop. Knows no sockets and no engine.

    messages:   [ sent, kept for a resend | not sent yet ]
                                            └ _num_unsent, counted from the end
"""

import asyncio
from collections import deque
from collections.abc import Iterable

from ..protos import engine_pb2
from ..protos.codec import encode_outputs
from ..protos.messages import SequenceDelta


class GatewaySession:
    """Between a gateway's first Hello and its abandonment; outlives its streams."""

    def __init__(self, gateway_id: str, *, max_messages: int = 4096) -> None:
        self.gateway_id = gateway_id
        self._max_messages = max_messages
        self._messages: deque[engine_pb2.EngineOutputs] = deque()
        self._num_unsent = 0
        self._last_sequence = 0
        self._live: dict[str, set[int]] = {}  # request key → samples that have not ended
        self._wakeup = asyncio.Event()

    @property
    def live_keys(self) -> tuple[str, ...]:
        """Requests with samples that have not ended."""
        return tuple(self._live)

    @property
    def is_overrun(self) -> bool:
        """More is unsent than is kept: what it missed can no longer be made good."""
        return self._num_unsent > self._max_messages

    def is_live(self, request_key: str) -> bool:
        """Whether a sample of it has not ended."""
        return request_key in self._live

    def add(self, request_key: str, indices: Iterable[int]) -> None:
        """Expect deltas for these samples of a request."""
        self._live[request_key] = set(indices)

    def discard(self, request_key: str) -> None:
        """Send nothing more for a request, not even what is queued."""
        self._live.pop(request_key, None)
        for position in range(len(self._messages) - self._num_unsent, len(self._messages)):
            _strip(self._messages[position], request_key)

    def put(self, step: int, deltas: list[SequenceDelta]) -> None:
        """Queue one step's message: the deltas of requests that are still live."""
        wanted = [delta for delta in deltas if delta.request_key in self._live]
        if not wanted:
            return
        for delta in wanted:
            if delta.finish_reason is not None:
                self._end_sample(delta.request_key, delta.index)
        message = encode_outputs(step, wanted)
        self._last_sequence += 1
        message.sequence = self._last_sequence
        self._messages.append(message)
        self._num_unsent += 1
        while len(self._messages) > max(self._max_messages, self._num_unsent):
            self._messages.popleft()
        self._wakeup.set()

    def rewind(self, received_sequence: int) -> bool:
        """Make the next message the one after `received_sequence`; False if it is gone."""
        num_missed = self._last_sequence - received_sequence
        if not 0 <= num_missed <= len(self._messages):
            return False
        self._num_unsent = num_missed
        self._wakeup.set()
        return True

    async def next_message(self) -> engine_pb2.EngineOutputs:
        """The oldest unsent message; from here on it counts as sent."""
        while self._num_unsent == 0:
            self._wakeup.clear()
            await self._wakeup.wait()
        message = self._messages[-self._num_unsent]
        self._num_unsent -= 1
        return message

    def _end_sample(self, request_key: str, index: int) -> None:
        unfinished = self._live[request_key]
        unfinished.discard(index)
        if not unfinished:
            del self._live[request_key]


def _strip(message: engine_pb2.EngineOutputs, request_key: str) -> None:
    kept = [delta for delta in message.deltas if delta.request_key != request_key]
    if len(kept) < len(message.deltas):
        del message.deltas[:]
        message.deltas.extend(kept)
