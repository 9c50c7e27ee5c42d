"""A controller whose first life begins as on a starved machine: one of its threads runs late.

Only where the environment names a mark, which that life leaves: the module is imported by the
controller's process before Ray starts the threads of its event loops.
"""

import os
import threading
import time
from pathlib import Path

from pagefleet.cluster.controller_actor import ControllerActor

MARK_VARIABLE = "STARVED_CONTROLLER_MARK"
_run = threading.Thread.run


def _run_late(thread: threading.Thread) -> None:
    mark = Path(os.environ[MARK_VARIABLE])
    if thread.name == "AsyncIO Thread: reserve" and not mark.exists():
        mark.touch()
        time.sleep(0.3)  # by then Ray has made the next group's loop
    _run(thread)


if MARK_VARIABLE in os.environ:
    threading.Thread.run = _run_late


class StarvedController(ControllerActor):
    """Loses its loop for reserves, once."""
