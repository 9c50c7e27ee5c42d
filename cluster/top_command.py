"""`pagefleet top`: follows a gateway's stream and draws each update, until Ctrl-C.

Knows the client and when to draw; what it looks like is `top_view`'s.
"""

import queue
import signal
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType

from rich.console import Console
from rich.live import Live

from ..protos import inference_pb2 as pb
from ..protos.errors import PagefleetError
from .client import Client
from .cluster_watch import MAX_PERIOD_S, MIN_PERIOD_S
from .top_view import TopView

_LOOK_S = 0.05


def watch(target: str, period_s: float, console: Console) -> None:
    """Show the cluster until interrupted; in a pipe, one picture below the other."""
    period_s = min(max(period_s, MIN_PERIOD_S), MAX_PERIOD_S)
    view = TopView()
    with Client(target) as client, _interruption() as interrupted:
        updates = _updates(client, period_s, interrupted)
        if not console.is_terminal:
            for update in updates:
                view.take(update)
                console.print(view.draw(update), "")
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for update in updates:
                view.take(update)
                live.update(view.draw(update, *console.size), refresh=True)


def _updates(client: Client, period_s: float, interrupted: Event) -> Iterator[pb.ClusterUpdate]:
    """The stream's messages until interrupted: read in a thread, so that Ctrl-C need not wait."""
    inbox: queue.Queue[pb.ClusterUpdate | PagefleetError | None] = queue.Queue()

    def read() -> None:
        try:
            for update in client.watch_cluster(period_s):
                inbox.put(update)
            inbox.put(None)
        except PagefleetError as error:
            inbox.put(error)

    threading.Thread(target=read, name="pagefleet-top", daemon=True).start()
    while not interrupted.is_set():
        try:
            item = inbox.get(timeout=_LOOK_S)
        except queue.Empty:
            continue
        if isinstance(item, PagefleetError):
            raise item
        if item is None:
            return
        yield item


@contextmanager
def _interruption() -> Generator[Event]:
    """Set by the first Ctrl-C: an exception could be raised, and lost, in a callback of gRPC.

    The second one interrupts as ever, should a call not come back.
    """
    interrupted = Event()
    before = signal.getsignal(signal.SIGINT)

    def note(signum: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
