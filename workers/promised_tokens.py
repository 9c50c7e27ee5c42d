"""Tokens that the device has chosen and the host does not know yet, so that a step need not wait.

    step N      forward ─ sample ──► token ids, on the device ──┬──► host, when it has come
    step N+1    token ids with gaps ◄───────── feed ────────────┘

Knows rows as numbers, and tensors of token ids; no parameters, no blocks.
"""
# pyright: reportUnknownMemberType=false

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..scheduler.output import Int32Array
from .upload import upload

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenFeed:
    """places: int64 [k] in a step's token ids; samples: int64 [k], which of `source` belong there.
    source: int64 [n], on the device."""

    places: Int64Array
    samples: Int64Array
    source: Tensor

    def write(self, token_ids: Tensor) -> None:
        """Fill the gaps, on the device, in place."""
        device = token_ids.device
        chosen = self.source.index_select(0, upload(self.samples, device))
        token_ids.index_copy_(0, upload(self.places, device), chosen)


@dataclass(frozen=True, slots=True)
class Promise:
    """What a launched step will have said.

    rows: int32 [n], by sample; entered: int64 [n], which occupant of the row it was.
    positions: int64 [num_plain], where the first samples belong; the rows behind those have
    guessed, and how many of theirs count is not known: offsets, as in `DraftSamples`, of all.
    """

    rows: Int32Array
    entered: Int64Array
    positions: Int64Array
    offsets: Int64Array | None

    @property
    def num_plain(self) -> int:
        """Samples of rows that have not guessed."""
        return len(self.positions)


class PromisedTokens:
    """Which rows end in a token that only the device knows: those of the last step launched."""

    def __init__(self, num_rows: int) -> None:
        self._samples = np.full(num_rows, -1, dtype=np.int64)  # by row, the place in the source
        self._source: Tensor | None = None
        self._latest: Promise | None = None

    def add(self, promise: Promise, source: Tensor) -> None:
        """A step was launched. Whatever was promised before it is known by the next one."""
        self._samples.fill(-1)
        num_plain = promise.num_plain
        self._samples[promise.rows[:num_plain]] = np.arange(num_plain)
        self._source, self._latest = source, promise

    def keep(self, promise: Promise) -> None:
        """Its tokens are known."""
        if self._latest is promise:
            self._source = self._latest = None

    def forget(self, row: int) -> None:
        """The row has another occupant, all of whose tokens are known."""
        self._samples[row] = -1

    def feed(
        self, rows: Int32Array, positions: Int64Array, num_tokens: Int64Array
    ) -> TokenFeed | None:
        """For a step's tokens, of these rows at these positions; None: all of them are known.
        num_tokens: int64, by row."""
        if self._source is None:
            return None
        samples = self._samples[rows]
        places = np.flatnonzero((samples >= 0) & (positions == num_tokens[rows] - 1))
        return TokenFeed(places, samples[places], self._source) if len(places) > 0 else None

    def is_unknown(self, rows: Int32Array) -> bool:
        """Whether any of the rows ends in such a token."""
        return self._source is not None and bool((self._samples[rows] >= 0).any())
