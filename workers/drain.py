"""How a replica goes: it takes nothing new, its streams end or move, others take over its cache.

    order ─► streams go on ─► the time is up: the rest moves ─► none is left ─┬─► done
       └───► peers are named ─► they fetch what is hot of the cache, or do not ┘

Knows when; what moves a stream is the gateway's affair, and a prefix the `PrefixMover`'s.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from ..protos.errors import Unavailable
from ..protos.messages import TransferPeer
from .engine import Engine
from .prefix_mover import PrefixMover

_SLACK_S = 1.0  # the same order again is no shorter one
_SAVE_LIMIT_S = 5.0  # for what others take over


class Drain:
    """One replica's; lives on the leader's loop, but for `end_if_done`.

    Args:
        mover: hands prefixes over; None = there is nothing to hand over.
        on_begin, on_done: called when it begins, and whenever all has ended or moved.
    """

    def __init__(
        self,
        engine: Engine,
        mover: PrefixMover | None,
        loop: asyncio.AbstractEventLoop,
        *,
        on_begin: Callable[[], None],
        on_done: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._mover = mover
        self._loop = loop
        self._on_begin = on_begin
        self._on_done = on_done
        self._until: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._has_to_save = False
        self._saving: asyncio.Task[int] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the replica takes nothing new any more."""
        return self._until is not None

    def order(self, drain_s: float) -> None:
        """Begin, with so many seconds for streams. A further order may only shorten the time."""
        until = self._loop.time() + drain_s
        if self._until is not None and until >= self._until - _SLACK_S:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._engine.stop_accepting("the replica is draining")
        self._until = until
        move = partial(self._engine.give_up, Unavailable("moved: the replica is draining"))
        self._timer = self._loop.call_later(drain_s, move)
        self._on_begin()
        if self._mover is not None and self._saving is None and drain_s > 0.0:
            self._has_to_save = True  # the controller's next answer names the peers
            self._loop.call_later(min(drain_s, _SAVE_LIMIT_S), self._end_saving)
        self.end_if_done()

    def save(self, peers: tuple[TransferPeer, ...]) -> None:
        """Let these replicas take over what is hot of the cache, once."""
        if self._mover is None or not self._has_to_save or self._saving is not None:
            return
        limit_s = _SAVE_LIMIT_S
        if self._until is not None:
            limit_s = min(limit_s, self._until - self._loop.time())
        self._saving = self._loop.create_task(self._mover.save(peers, limit_s))
        self._saving.add_done_callback(lambda _: self._end_saving())

    def end_if_done(self) -> None:
        """Called after each step, on any thread."""
        is_done = self._engine.num_requests == 0 and not self._has_to_save
        if self.has_begun and is_done:
            self._on_done()

    def _end_saving(self) -> None:
        self._has_to_save = False
        self.end_if_done()
