"""Ending a process for certain, on real processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pagefleet.workers.process_identity import (
    ProcessIdentity,
    is_alive,
    kill_for_certain,
    this_process,
)

needs_proc = pytest.mark.skipif(
    not os.path.exists("/proc/self/stat"), reason="the system does not tell start times"
)


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[bytes], ProcessIdentity]]:
    code = (
        "from pagefleet.workers.process_identity import this_process; import signal\n"
        "me = this_process('node'); print(me.pid, me.started_ticks, flush=True); signal.pause()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    pid, ticks = process.stdout.readline().split()
    yield process, ProcessIdentity("node", int(pid), None if ticks == b"None" else int(ticks))
    process.kill()
    process.wait()
    process.stdout.close()


def test_this_process_is_alive() -> None:
    assert is_alive(this_process("node"))


def test_a_stopped_process_is_alive_and_can_be_killed(
    child: tuple[subprocess.Popen[bytes], ProcessIdentity],
) -> None:
    process, identity = child
    os.kill(identity.pid, signal.SIGSTOP)
    assert is_alive(identity)
    assert kill_for_certain(identity)
    assert not is_alive(identity)
    assert process.wait(20) == -signal.SIGKILL
    assert kill_for_certain(identity), "a second time does no harm"


@needs_proc
def test_another_process_with_the_same_pid_is_left_alone(
    child: tuple[subprocess.Popen[bytes], ProcessIdentity],
) -> None:
    process, identity = child
    predecessor = replace(identity, started_ticks=identity.started_ticks - 100)
    assert not is_alive(predecessor)
    assert kill_for_certain(predecessor)
    assert process.poll() is None
