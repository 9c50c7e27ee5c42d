"""The faults that happen to blocks: fresh ones full of NaN, guards around a pool, late copies.

Knows bytes and ids. Which faults are on is `faults.Faults`; answers are the same with all of them.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections import deque

import numpy as np
import torch
from torch import Tensor

from ..scheduler.output import CopyDone, CopyJob, Int32Array, SchedulerOutput
from .copier import Copier

NUM_GUARDS = 2  # one block before and one behind each pool
_GUARD_BYTE = 0xA5
_POLLS = 4  # a late copy begins when it has been asked for so often


class GuardChanged(RuntimeError):
    """Something wrote outside of the pool: no block's content can be trusted any more."""


class BlockGuard:
    """The first and the last block of each pool, which nobody is ever given."""

    def __init__(self, *pools: Tensor) -> None:
        self._guards = [guard.view(torch.uint8) for pool in pools for guard in (pool[0], pool[-1])]
        for guard in self._guards:
            guard.fill_(_GUARD_BYTE)

    @staticmethod
    def inner(pool: Tensor) -> Tensor:
        """What lies between the guards, the same memory."""
        return pool[1:-1]

    def check(self) -> None:
        """Raises GuardChanged."""
        changed = [i for i, guard in enumerate(self._guards) if (guard != _GUARD_BYTE).any()]
        if changed:
            raise GuardChanged(f"guards {changed} of {len(self._guards)} have been written to")


def fill_with_nan(pool: Tensor, blocks: Tensor | None = None) -> None:
    """All blocks, or those of the ids given: int64 [n], on the pool's device."""
    value = torch.nan
    if pool.dtype.itemsize == 1:  # few operations know such floats; all ones is NaN
        pool, value = pool.view(torch.uint8), 0xFF
    if blocks is None:
        pool.fill_(value)
    else:
        pool[blocks] = value


def fresh_blocks(output: SchedulerOutput, block_size: int) -> Int32Array:
    """Blocks that no token has been computed into before this step: int32 [n].

    A row's blocks behind its computed tokens, where it is new, and all that a known row gets.
    """
    fresh = [output.table_blocks]
    for new in output.new_rows:
        entries = np.flatnonzero(output.rows == new.row)
        if len(entries) > 0:
            num_computed = int(output.num_computed_tokens[entries[0]])
            fresh.append(new.block_table[-(-num_computed // block_size) :])
    return np.concatenate(fresh)


class LateCopier:
    """Holds each copy back before the real copier gets it, in the order of submission.

    Whoever reuses, writes or reads a block before the copy's `CopyDone` spoils the copy.
    """

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._held: deque[tuple[int, CopyJob]] = deque()
        self._num_polls = 0

    def submit(self, job: CopyJob) -> None:
        """Note it down."""
        self._held.append((self._num_polls + _POLLS, job))

    def poll(self) -> tuple[CopyDone, ...]:
        """Begin what is due; tell what has ended."""
        self._num_polls += 1
        while self._held and self._held[0][0] <= self._num_polls:
            self._copier.submit(self._held.popleft()[1])
        return self._copier.poll()

    def close(self) -> None:
        """What was held back is dropped: nobody asks for it any more."""
        self._copier.close()
