"""The memory of processes over time, by what each of them is; knows the operating system only.

Private memory (USS): what would be free again if the process went. What lives as long as the run
is compared with itself; what is killed and comes again, with its predecessors at the same age.
"""

import re
import statistics
import time
from dataclasses import dataclass, field

import psutil

_ACTOR = re.compile(r"ray::(\w+)")
_MIB = 2**20


@dataclass(slots=True)
class Life:
    """One process: its name, and what it held at which age."""

    name: str
    born_s: float
    samples: list[tuple[float, int]] = field(default_factory=list)  # (age in s, bytes)

    @property
    def age_s(self) -> float:
        """When it was last seen."""
        return self.samples[-1][0]

    def held_at(self, age_s: float, window_s: float = 10.0) -> float | None:
        """Bytes around that age; None if it was not seen then."""
        near = [held for age, held in self.samples if abs(age - age_s) <= window_s]
        return statistics.median(near) if near else None


@dataclass(frozen=True, slots=True)
class Trend:
    """What came of one process, or of one kind of them. change: from first to last, as a share."""

    name: str
    num_lives: int
    at_age_s: float
    first_mib: float
    last_mib: float

    @property
    def change(self) -> float:
        return self.last_mib / self.first_mib - 1.0


class MemoryWatch:
    """Looks at all processes below this one whenever it is told to."""

    def __init__(self) -> None:
        self.lives: dict[tuple[int, float], Life] = {}

    def look(self) -> None:
        """One sample of each that lives."""
        now = time.time()
        for process in psutil.Process().children(recursive=True):
            try:
                name, born = _name_of(process), process.create_time()
                held = process.memory_full_info().uss
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
            life = self.lives.setdefault((process.pid, born), Life(name, born))
            life.name = life.name if name == "IDLE" else name  # an actor's process is renamed
            life.samples.append((now - born, held))

    def lasting(self, since_s: float) -> list[Trend]:
        """Of those seen from `since_s` (a time) to now: the first fifth beside the last."""
        newest = max(life.born_s + life.age_s for life in self.lives.values())
        found: list[Trend] = []
        for life in self.lives.values():
            later = [held for age, held in life.samples if life.born_s + age >= since_s]
            if life.born_s > since_s or newest - life.born_s - life.age_s > 30 or len(later) < 5:
                continue
            part = max(1, len(later) // 5)
            first, last = statistics.median(later[:part]), statistics.median(later[-part:])
            found.append(Trend(life.name, 1, life.age_s, first / _MIB, last / _MIB))
        return found

    def curves(self, names: set[str]) -> dict[str, list[tuple[int, float]]]:
        """(age in s, MiB) of the longest life of each: for who asks how memory grew."""
        longest: dict[str, Life] = {}
        for life in sorted(self.lives.values(), key=lambda life: life.age_s):
            longest[life.name] = life
        return {
            name: [(round(age), round(held / _MIB, 1)) for age, held in longest[name].samples]
            for name in names & longest.keys()
        }

    def successors(self, names: set[str], age_s: float, since_s: float) -> list[Trend]:
        """Of each kind: those born since then, at the same age, the first half beside the last."""
        found: list[Trend] = []
        for name in sorted(names):
            lives = [life for life in self.lives.values() if life.name == name]
            later = sorted((life for life in lives if life.born_s >= since_s), key=_born)
            held = [at for life in later if (at := life.held_at(age_s)) is not None]
            if len(held) < 2:
                continue
            half = len(held) // 2
            first, last = statistics.median(held[:half]), statistics.median(held[-half:])
            found.append(Trend(name, len(held), age_s, first / _MIB, last / _MIB))
        return found


def _born(life: Life) -> float:
    return life.born_s


def _name_of(process: psutil.Process) -> str:
    """The actor's class, or the program's name."""
    found = _ACTOR.match(" ".join(process.cmdline()))
    return found.group(1) if found else process.name()
