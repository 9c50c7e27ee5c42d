"""What a sequence may go on with, by its own text: where its last tokens stood before.

Knows one sequence's tokens; not who drafts, how many, or whether they were right.

    tokens   … a b c d e f … a b c        the last three stood before: d e f is the draft
                      ▲            ▲
                  candidate       end
"""

from array import array

import numpy as np

from .output import Int32Array

# Places looked at in one search, the latest first: text that repeats has many.
_MAX_CANDIDATES = 8
_MIN_TABLE = 64
_FACTOR = 0x9E3779B1
_MASK = 0xFFFFFFFF
_NONE = -1


class NgramProposer:
    """The places of every `min_length` tokens in a row, in a hash table of chains.

    A place is the position behind such a run. It is entered once something stands there, so the
    search never finds the end itself. Unequal runs may share a chain: tokens are compared.
    """

    def __init__(self, min_length: int, max_length: int) -> None:
        self._min_length = min_length
        self._max_length = max_length
        self._num_entered = 0  # places below this are in the table
        self._bits = 0
        self._heads = array("i")
        self._previous = array("i")  # by place, the one before it in its chain

    def propose(self, tokens: Int32Array, num_tokens: int, count: int) -> list[int]:
        """Up to `count` tokens that followed the longest match of the end; none without one.

        tokens: int32, of which the first `num_tokens` are known. They only ever grow.
        """
        if num_tokens <= self._min_length:
            return []
        self._enter(tokens, num_tokens)
        place = self._find(tokens, num_tokens)
        if place == _NONE:
            return []
        # What is copied may reach into the copy: a period shorter than the draft goes on.
        draft: list[int] = tokens[place : min(num_tokens, place + count)].tolist()
        period = num_tokens - place
        while len(draft) < count:
            draft.append(draft[len(draft) - period])
        return draft

    def _find(self, tokens: Int32Array, num_tokens: int) -> int:
        """The place behind the longest match, the latest of equal ones."""
        end: list[int] = tokens[max(0, num_tokens - self._max_length) : num_tokens].tolist()
        end.reverse()
        best, best_length = _NONE, self._min_length - 1
        place = self._heads[self._slot(end[self._min_length - 1 :: -1])]
        for _ in range(_MAX_CANDIDATES):
            if place == _NONE:
                break
            length = _match(tokens[max(0, place - len(end)) : place].tolist(), end)
            if length > best_length:
                best, best_length = place, length
                if length == len(end):
                    break
            place = self._previous[place]
        return best

    def _enter(self, tokens: Int32Array, num_tokens: int) -> None:
        """Enter the places up to, not including, the end."""
        if num_tokens > len(self._heads):
            self._rebuild(tokens, num_tokens)
            return
        length = self._min_length
        first = max(self._num_entered, length)
        recent: list[int] = tokens[first - length : num_tokens].tolist()
        for place in range(first, num_tokens):
            start = place - first
            slot = self._slot(recent[start : start + length])
            self._previous[place] = self._heads[slot]
            self._heads[slot] = place
        self._num_entered = num_tokens

    def _slot(self, run: list[int]) -> int:
        """Where the chain of `min_length` tokens begins."""
        state = 0
        for token in run:
            state = ((state ^ token) * _FACTOR) & _MASK
        return state >> (32 - self._bits)

    def _rebuild(self, tokens: Int32Array, num_tokens: int) -> None:
        """A table with room for as many places again, all known ones entered at once."""
        self._bits = max(_MIN_TABLE, 2 * num_tokens).bit_length()
        size, length = 1 << self._bits, self._min_length
        known = tokens[:num_tokens].astype(np.uint64)
        states = np.zeros(num_tokens - length, dtype=np.uint64)
        for offset in range(length):
            states ^= known[offset : offset + len(states)]
            states *= np.uint64(_FACTOR)
            states &= np.uint64(_MASK)
        slots = (states >> np.uint64(32 - self._bits)).astype(np.int64)
        places = np.arange(length, num_tokens, dtype=np.int32)
        heads = np.full(size, _NONE, dtype=np.int32)
        heads[slots] = places  # of equal slots the last is kept
        previous = np.full(size, _NONE, dtype=np.int32)
        order = np.argsort(slots, kind="stable")
        is_same = slots[order[1:]] == slots[order[:-1]]
        previous[places[order[1:]][is_same]] = places[order[:-1]][is_same]
        self._heads, self._previous = array("i"), array("i")
        self._heads.frombytes(heads.tobytes())
        self._previous.frombytes(previous.tobytes())
        self._num_entered = num_tokens


def _match(before: list[int], end: list[int]) -> int:
    """How many of the tokens before a place, from its end, equal those of `end`, the last first."""
    length = 0
    for token, wanted in zip(reversed(before), end, strict=False):
        if token != wanted:
            break
        length += 1
    return length
