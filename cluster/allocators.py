"""Paged allocation beside the ways of old: what each does with the same memory and sequences.

A model of memory only: sequences grow by one slot a step, all together, and finish at their
length; there is always one more waiting, so every allocator is measured full. Knows nothing of
time, of prefixes, or of the real scheduler.

    paged            blocks, taken as the sequence grows
    reserve-to-max   one contiguous piece of the longest length allowed
    power-of-two     one contiguous, aligned piece of the next power of two of the final length
    exact            one contiguous piece of exactly the final length (needs an oracle)

Contiguous pieces never move: what is free in pieces too small for the next sequence is external
fragmentation.
"""

# matplotlib is not wholly typed.
# pyright: reportUnknownMemberType=false

import gzip
import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Protocol, cast

from .config import CommandError

ALLOCATORS = ("paged", "reserve-to-max", "power-of-two", "exact")


@dataclass(frozen=True, slots=True)
class Lengths:
    """One sequence: tokens known when it enters, and tokens it will generate."""

    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def final(self) -> int:
        """Slots that it fills at its end."""
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass(frozen=True, slots=True)
class MemorySplit:
    """Where the slots are; they add up to the memory's size.

    useful: hold a token. reserved: will hold one later. internal: never will, though taken.
    external: free, enough in sum for the next sequence, but in pieces too small. free: the rest.
    """

    useful: float
    reserved: float
    internal: float
    external: float
    free: float


@dataclass(frozen=True, slots=True)
class AllocatorResult:
    """Means over the steps at which a sequence was waiting, as shares of the memory."""

    allocator: str
    split: MemorySplit
    mean_held: float
    max_held: int
    num_finished: int
    num_preempted: int
    num_too_long: int
    num_steps: int


class ContiguousMemory:
    """Slots handed out in contiguous pieces, first fit, never moved."""

    def __init__(self, num_slots: int, free: Sequence[tuple[int, int]] | None = None) -> None:
        self._free = [(0, num_slots)] if free is None else sorted(free)  # (start, length)

    @property
    def num_free(self) -> int:
        """Free slots in all pieces together."""
        return sum(length for _, length in self._free)

    def allocate(self, size: int, alignment: int = 1) -> int | None:
        """The start of a piece of `size`; None where no free piece is large enough."""
        for place, (start, length) in enumerate(self._free):
            begin = -(-start // alignment) * alignment
            end = begin + size
            if end <= start + length:
                rest = [(start, begin - start), (end, start + length - end)]
                self._free[place : place + 1] = [piece for piece in rest if piece[1] > 0]
                return begin
        return None

    def release(self, start: int, size: int) -> None:
        """Give a piece back; it joins free neighbours."""
        merged: list[tuple[int, int]] = []
        for piece_start, length in sorted([*self._free, (start, size)]):
            if merged and sum(merged[-1]) == piece_start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                assert not merged or sum(merged[-1]) < piece_start, f"{start} was free already"
                merged.append((piece_start, length))
        self._free = merged


class Allocator(Protocol):
    """What the replay asks of a way to allocate. Sequences are told apart by their index."""

    def admit(self, sequence: int, lengths: Lengths) -> bool:
        """Take what the sequence needs to enter; False and nothing changed where it cannot."""
        ...

    def grow(self, sequence: int, num_tokens: int) -> bool:
        """Make room for `num_tokens` in all; False where there is none."""
        ...

    def release(self, sequence: int) -> None:
        """Give all of it back."""
        ...

    def taken(self, sequence: int) -> int:
        """Slots it holds."""
        ...

    def lost_to_pieces(self, lengths: Lengths) -> bool:
        """Whether `lengths`, refused just now, would fit if all free slots lay together."""
        ...


class PagedAllocator:
    """A count of free blocks is all there is to it: any block serves any sequence."""

    def __init__(self, num_slots: int, block_size: int) -> None:
        self._block_size = block_size
        self._num_free = num_slots // block_size
        self._blocks: dict[int, int] = {}

    def admit(self, sequence: int, lengths: Lengths) -> bool:
        """Blocks of the prompt and of the first token."""
        self._blocks[sequence] = 0
        if self.grow(sequence, lengths.num_prompt_tokens + 1):
            return True
        del self._blocks[sequence]
        return False

    def grow(self, sequence: int, num_tokens: int) -> bool:
        """The blocks that are missing, or none."""
        missing = -(-num_tokens // self._block_size) - self._blocks[sequence]
        if missing > self._num_free:
            return False
        self._num_free -= missing
        self._blocks[sequence] += missing
        return True

    def release(self, sequence: int) -> None:
        """Back to the free blocks."""
        self._num_free += self._blocks.pop(sequence)

    def taken(self, sequence: int) -> int:
        """Slots of its blocks."""
        return self._blocks[sequence] * self._block_size

    def lost_to_pieces(self, lengths: Lengths) -> bool:
        """Never: blocks need not lie together."""
        return False


class ContiguousAllocator:
    """One piece a sequence, taken whole at the start. `policy` says how large it is."""

    def __init__(self, num_slots: int, policy: str, max_length: int) -> None:
        self._memory = ContiguousMemory(num_slots)
        self._policy = policy
        self._max_length = max_length
        self._pieces: dict[int, tuple[int, int]] = {}  # sequence → (start, size)

    def _size(self, lengths: Lengths) -> int:
        if self._policy == "reserve-to-max":
            return self._max_length
        if self._policy == "power-of-two":
            return 1 << (lengths.final - 1).bit_length()
        return lengths.final

    def admit(self, sequence: int, lengths: Lengths) -> bool:
        """All that it will ever need, in one piece."""
        size = self._size(lengths)
        alignment = size if self._policy == "power-of-two" else 1
        start = self._memory.allocate(size, alignment)
        if start is None:
            return False
        self._pieces[sequence] = (start, size)
        return True

    def grow(self, sequence: int, num_tokens: int) -> bool:
        """Nothing to do: the piece holds its final length."""
        return num_tokens <= self._pieces[sequence][1]

    def release(self, sequence: int) -> None:
        """The piece becomes free."""
        self._memory.release(*self._pieces.pop(sequence))

    def taken(self, sequence: int) -> int:
        """Size of its piece."""
        return self._pieces[sequence][1]

    def lost_to_pieces(self, lengths: Lengths) -> bool:
        """Enough is free, but not in one piece."""
        return self._memory.num_free >= self._size(lengths)


def make_allocator(name: str, num_slots: int, block_size: int, max_length: int) -> Allocator:
    """An empty allocator by its name."""
    if name == "paged":
        return PagedAllocator(num_slots, block_size)
    if name in ALLOCATORS:
        return ContiguousAllocator(num_slots, name, max_length)
    raise CommandError(f"allocator {name!r} is not one of {', '.join(ALLOCATORS)}")


@dataclass(slots=True)
class _Running:
    sequence: int
    lengths: Lengths
    num_tokens: int


@dataclass(slots=True)
class _Replay:
    """Memory kept full from one queue. A preempted sequence starts again at the queue's head."""

    allocator: Allocator
    num_slots: int
    waiting: deque[tuple[int, Lengths]]
    running: list[_Running] = field(default_factory=list[_Running])
    num_finished: int = 0
    num_preempted: int = 0

    def run(self) -> Iterator[MemorySplit]:
        """The split of each step at which something waits that does not fit."""
        self._admit()
        while self.waiting:
            yield self._split()
            self._grow()
            self._admit()

    def _admit(self) -> None:
        while self.waiting and self.allocator.admit(*self.waiting[0]):
            sequence, lengths = self.waiting.popleft()
            self.running.append(_Running(sequence, lengths, lengths.num_prompt_tokens))

    def _grow(self) -> None:
        survivors: list[_Running] = []
        queue = deque(self.running)
        while queue:
            entry = queue.popleft()
            if entry.num_tokens >= entry.lengths.final:
                self.allocator.release(entry.sequence)
                self.num_finished += 1
                continue
            while not self.allocator.grow(entry.sequence, entry.num_tokens + 1):
                # the youngest goes, as in the scheduler: it has least to lose
                victim = queue.pop() if queue else entry
                self.allocator.release(victim.sequence)
                self.waiting.appendleft((victim.sequence, victim.lengths))
                self.num_preempted += 1
                if victim is entry:
                    break
            else:
                entry.num_tokens += 1
                survivors.append(entry)
        self.running = survivors

    def _split(self) -> MemorySplit:
        useful = sum(entry.num_tokens for entry in self.running)
        taken = sum(self.allocator.taken(entry.sequence) for entry in self.running)
        # a block taken ahead is reserved as far as its sequence will come to fill it
        reserved = sum(
            min(entry.lengths.final, self.allocator.taken(entry.sequence)) - entry.num_tokens
            for entry in self.running
        )
        idle = self.num_slots - taken
        lost = self.allocator.lost_to_pieces(self.waiting[0][1])
        return MemorySplit(
            useful=useful,
            reserved=reserved,
            internal=taken - useful - reserved,
            external=idle if lost else 0,
            free=0 if lost else idle,
        )


def replay(
    name: str, sequences: Sequence[Lengths], num_slots: int, block_size: int, max_length: int
) -> AllocatorResult:
    """Run `sequences` through one allocator and average how the memory was used."""
    if max_length > num_slots:
        raise CommandError(f"a sequence of {max_length} tokens cannot fit {num_slots} slots")
    held = [lengths for lengths in sequences if lengths.final <= max_length]
    if not held:
        raise CommandError(f"no sequence of the trace is within {max_length} tokens")
    allocator = make_allocator(name, num_slots, block_size, max_length)
    state = _Replay(allocator, num_slots, deque(enumerate(held)))
    names = [part.name for part in fields(MemorySplit)]
    sums = dict.fromkeys(names, 0.0)
    num_steps = total_held = max_held = 0
    for split in state.run():
        num_steps += 1
        total_held += len(state.running)
        max_held = max(max_held, len(state.running))
        for part in names:
            sums[part] += getattr(split, part)
    if not num_steps:
        raise CommandError(f"the whole trace fits {num_slots} slots at once: nothing to compare")
    means = {part: sums[part] / num_steps / num_slots for part in names}
    return AllocatorResult(
        allocator=name,
        split=MemorySplit(**means),
        mean_held=total_held / num_steps,
        max_held=max_held,
        num_finished=state.num_finished,
        num_preempted=state.num_preempted,
        num_too_long=len(sequences) - len(held),
        num_steps=num_steps,
    )


def read_lengths(path: Path, limit: int | None = None) -> list[Lengths]:
    """The (`in`, `out`) of a trace: JSON lines, gzipped or plain."""
    opener = gzip.open if path.suffix == ".gz" else open
    lengths: list[Lengths] = []
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                row = cast("dict[str, int]", json.loads(line))
                lengths.append(Lengths(max(1, row["in"]), max(1, row["out"])))
                if len(lengths) == limit:
                    break
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{path} is not a trace of lengths: {error!r}") from error
    return lengths


def plot(results: Sequence[AllocatorResult], path: Path) -> None:
    """One stacked bar per allocator, as a PNG (or whatever `path`'s ending says)."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CommandError("plots need matplotlib: pip install 'pagefleet[plot]'") from error
    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = [f"{result.allocator}\n{result.mean_held:.1f} held" for result in results]
    left = [0.0] * len(results)
    for part, colour in zip(
        (part.name for part in fields(MemorySplit)),
        ("#2a7f62", "#9ccb86", "#e9b44c", "#c8553d", "#d9d9d9"),
        strict=True,
    ):
        values = [100 * cast(float, getattr(result.split, part)) for result in results]
        axes.barh(names, values, left=left, color=colour, label=part)
        left = [start + value for start, value in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of KV slots, %")
    figure.legend(loc="outside upper center", ncols=5, frameon=False)
    figure.savefig(path, dpi=150)
