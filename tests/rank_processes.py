"""Processes that tests use as ranks: started once, given one program after the other.

A program is a module-level function `(rank, world_size, *args) -> result` of an importable module.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Died:
    """The process ended before its program did."""

    exitcode: int


@dataclass
class _Rank:
    process: BaseProcess
    pipe: Connection


class RankProcesses:
    """Runs programs on as many processes as asked for; what died is replaced."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []

    def start(self, program: Callable[..., object], world_size: int, *args: object) -> None:
        """Begin `program` on ranks 0 .. world_size - 1."""
        self._ranks = [rank for rank in self._ranks if rank.process.is_alive()]
        while len(self._ranks) < world_size:
            self._ranks.append(_spawn())
        for index in range(world_size):
            self._ranks[index].pipe.send((program, (index, world_size, *args)))

    def pid(self, rank: int) -> int:
        """The process that is this rank of the program started last."""
        return self._ranks[rank].process.pid or 0

    def result(self, rank: int, timeout_s: float = 120.0) -> object:
        """What the rank's program returned or raised, or Died."""
        chosen = self._ranks[rank]
        assert chosen.pipe.poll(timeout_s), f"rank {rank} hangs"
        try:
            return chosen.pipe.recv()
        except (EOFError, ConnectionResetError):
            chosen.process.join()
            return Died(chosen.process.exitcode or 0)

    def run(
        self,
        program: Callable[..., object],
        world_size: int,
        *args: object,
        timeout_s: float = 120.0,
    ) -> list[object]:
        """All ranks' results."""
        self.start(program, world_size, *args)
        return [self.result(rank, timeout_s) for rank in range(world_size)]

    def close(self) -> None:
        """End every process, stopped ones too."""
        for rank in self._ranks:
            if rank.process.is_alive():
                os.kill(rank.process.pid or 0, signal.SIGKILL)
            rank.process.join()
            rank.pipe.close()


def _spawn() -> _Rank:
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return _Rank(process, ours)


def _serve(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            program, args = pipe.recv()
        except EOFError:
            return
        try:
            result = program(*args)
        except Exception as error:
            result = error
        pipe.send(result)
