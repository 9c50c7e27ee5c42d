"""Signs of life: busy, idle, stuck, frozen and dead."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagefleet.workers.heartbeat import Beat, Heartbeat, Pulse, read_beats

LIMIT_S = 60.0


class Clock:
    """The machine's monotonic clock, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def heartbeat(tmp_path: Path, clock: Clock) -> Heartbeat:
    return Heartbeat(tmp_path, "replica-0", clock)


def only(folder: Path) -> Beat:
    (beat,) = read_beats(folder)
    return beat


def test_a_busy_part_moves(tmp_path: Path, clock: Clock, heartbeat: Heartbeat):
    for step in range(200):
        heartbeat.beat(Pulse(progress=step, num_working=50))
        clock.now += 1.0
    assert only(tmp_path).why_stuck(clock.now, LIMIT_S) is None


def test_an_idle_part_need_not_move(tmp_path: Path, clock: Clock, heartbeat: Heartbeat):
    for _ in range(200):
        heartbeat.beat(Pulse(progress=7, num_working=0))
        clock.now += 1.0
    assert only(tmp_path).why_stuck(clock.now, LIMIT_S) is None


def test_work_that_does_not_move_is_stuck(tmp_path: Path, clock: Clock, heartbeat: Heartbeat):
    for _ in range(100):
        heartbeat.beat(Pulse(progress=7, num_working=2))
        clock.now += 1.0
    reason = only(tmp_path).why_stuck(clock.now, LIMIT_S)
    assert reason is not None and "replica-0" in reason and "2 requests" in reason


def test_the_time_without_work_does_not_count(tmp_path: Path, clock: Clock, heartbeat: Heartbeat):
    heartbeat.beat(Pulse(progress=7, num_working=0))
    clock.now += 1000.0
    heartbeat.beat(Pulse(progress=7, num_working=0))
    clock.now += 1.0
    heartbeat.beat(Pulse(progress=7, num_working=1))
    assert only(tmp_path).why_stuck(clock.now, LIMIT_S) is None


def test_a_part_whose_steps_are_long_gets_more_time(
    tmp_path: Path, clock: Clock, heartbeat: Heartbeat
):
    for _ in range(100):
        heartbeat.beat(Pulse(progress=7, num_working=1, patience_s=400.0))
        clock.now += 1.0
    assert only(tmp_path).why_stuck(clock.now, LIMIT_S) is None


def test_what_is_no_heartbeat_is_passed_over(tmp_path: Path, heartbeat: Heartbeat):
    heartbeat.beat(Pulse(0, 0))
    (tmp_path / "other.json").write_text("[]")
    (tmp_path / "half.json").write_text('{"name": "x"')
    (tmp_path / "wrong.json").write_text(json.dumps({"process": {"pid": 1}, "pulse": {}}))
    assert only(tmp_path).name == "replica-0"


def test_names_lead_nowhere_else(tmp_path: Path):
    Heartbeat(tmp_path / "beats", "../../etc/x").beat(Pulse(0, 0))
    assert [path.parent for path in tmp_path.rglob("*.json")] == [tmp_path / "beats"]


def test_a_folder_that_cannot_be_written_harms_nothing(tmp_path: Path):
    (tmp_path / "file").write_text("")
    Heartbeat(tmp_path / "file", "replica-0").beat(Pulse(0, 0))


PROGRAM = """
import asyncio, sys
from pathlib import Path
from pagefleet.workers.heartbeat import Heartbeat, Pulse
asyncio.run(Heartbeat(Path(sys.argv[1]), "replica-0").run(lambda: Pulse(0, 0)))
"""


def test_a_frozen_process_is_told_from_a_dead_one(tmp_path: Path):
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)]) as process:
        try:
            until = time.monotonic() + 60.0
            while not (beats := list(read_beats(tmp_path))):
                assert time.monotonic() < until
                time.sleep(0.05)
            assert beats[0].why_stuck(time.monotonic(), LIMIT_S) is None
            process.send_signal(signal.SIGSTOP)
            reason = only(tmp_path).why_stuck(time.monotonic() + 2 * LIMIT_S, LIMIT_S)
            assert reason is not None and "frozen" in reason
        finally:
            process.kill()
    assert list(read_beats(tmp_path)) == []
