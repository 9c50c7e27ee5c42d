"""Naming one process for certain, and ending it for certain. Knows the operating system only."""

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process on one node.

    started_ticks: pids come again, start times do not; None where the system does not tell.
    """

    node_id: str
    pid: int
    started_ticks: int | None


def this_process(node_id: str) -> ProcessIdentity:
    """The process that asks."""
    return ProcessIdentity(node_id, os.getpid(), _started_ticks(os.getpid()))


def is_alive(process: ProcessIdentity) -> bool:
    """Whether it runs, is stopped, or waits for the system; not a zombie. On its node only."""
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return False
    if process.started_ticks is None:
        return True
    return _started_ticks(process.pid) == process.started_ticks


def kill_for_certain(process: ProcessIdentity, timeout_s: float = 10.0) -> bool:
    """SIGKILL, which stopped processes obey too, and wait; True once it is gone."""
    deadline = time.monotonic() + timeout_s
    while is_alive(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _started_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None for a zombie or where there is no such file."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] == "Z" else int(fields[19])
