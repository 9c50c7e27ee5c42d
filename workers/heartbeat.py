"""Signs of life for whoever restarts this machine's processes: one small file per part.

A part writes again each second what it has done. Whoever reads can tell a busy part, whose count
moves, from a stuck one, whose count stands still with work at hand, and from a frozen one, which
writes no more. Files of processes that have ended count for nothing. Knows no Ray and no network.
"""

import asyncio
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from .process_identity import ProcessIdentity, is_alive, this_process

logger = logging.getLogger(__name__)

FOLDER_VARIABLE = "PAGEFLEET_HEARTBEATS"
_PERIOD_S = 1.0
_STEPS = 20  # a step may take so many times its usual length, as for the watchdog


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a part says of itself.

    progress: moves whenever something is done. num_working: what waits for that; a part without
    work may stand still. patience_s: how long one step of its work may take at the most.
    """

    progress: int
    num_working: int
    patience_s: float = 0.0
    is_ready: bool = True


@dataclass(frozen=True, slots=True)
class Beat:
    """A pulse as another process reads it; times are of the machine's monotonic clock."""

    name: str
    process: ProcessIdentity
    pulse: Pulse
    written_at: float
    moved_at: float

    def why_stuck(self, now: float, limit_s: float) -> str | None:
        """None = it lives: idle, or busy."""
        silent_s = now - self.written_at
        if silent_s > limit_s:
            return (
                f"{self.name} (process {self.process.pid}) is frozen: silent for {silent_s:.0f} s"
            )
        still_s = now - self.moved_at
        if self.pulse.num_working and still_s > max(limit_s, self.pulse.patience_s):
            return (
                f"{self._who} is stuck: nothing has moved for {still_s:.0f} s, "
                f"with {self.pulse.num_working} requests at hand"
            )
        return None

    @property
    def _who(self) -> str:
        return f"{self.name} (process {self.process.pid})"


_BEAT = TypeAdapter(Beat)


class Heartbeat:
    """Writes one part's file. Not being able to is logged once and harms nothing else."""

    def __init__(
        self, folder: Path, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = folder / (re.sub(r"[^\w.-]", "_", name) + ".json")
        self._name = name
        self._clock = clock
        self._process = this_process("")
        self._progress: int | None = None
        self._moved_at = clock()
        self._failed = False

    def beat(self, pulse: Pulse) -> None:
        """Write it down, whole or not at all."""
        now = self._clock()
        if pulse.progress != self._progress or not pulse.num_working:
            self._progress, self._moved_at = pulse.progress, now
        beat = Beat(self._name, self._process, pulse, now, self._moved_at)
        part = self._path.with_suffix(".part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(asdict(beat)), "utf-8")
            part.replace(self._path)
        except OSError as error:
            if not self._failed:
                logger.warning("no heartbeats: %s", error)
            self._failed = True

    async def run(self, pulse: Callable[[], Pulse]) -> None:
        """Beat each second until cancelled; then there is no file any more."""
        try:
            while True:
                self.beat(pulse())
                await asyncio.sleep(_PERIOD_S)
        finally:
            self._path.unlink(missing_ok=True)


def heartbeat_from_environment(name: str) -> Heartbeat | None:
    """None where nobody has asked for heartbeats."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return Heartbeat(Path(folder), name) if folder else None


def step_patience_s(step_p99_s: float) -> float:
    """How long an engine's step may take before it counts as stuck."""
    return _STEPS * step_p99_s


def read_beats(folder: Path) -> Iterator[Beat]:
    """Of the processes that still run. What they do not write themselves is passed over."""
    for path in sorted(folder.glob("*.json")):
        try:
            beat = _BEAT.validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            logger.warning("%s is no heartbeat: %r", path, error)
            continue
        if is_alive(beat.process):
            yield beat
