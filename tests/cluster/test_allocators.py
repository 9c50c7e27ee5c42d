"""Paged and contiguous allocation: worked cases, and sums that must hold on a real mixture."""

import gzip
import json
from pathlib import Path

import pytest

from pagefleet.cluster.allocators import (
    ALLOCATORS,
    AllocatorResult,
    ContiguousMemory,
    Lengths,
    MemorySplit,
    plot,
    read_lengths,
    replay,
)
from pagefleet.cluster.config import CommandError

# long and short prompts, long and short outputs, none a multiple of 16
MIXED = [Lengths(17 + 61 * (i % 7), 5 + 37 * (i % 11)) for i in range(300)]


def run(name: str, sequences: list[Lengths] = MIXED, num_slots: int = 4096) -> AllocatorResult:
    return replay(name, sequences, num_slots, block_size=16, max_length=1024)


def test_free_pieces_of_128_128_and_64_cannot_serve_256():
    memory = ContiguousMemory(640, free=[(0, 128), (256, 128), (512, 64)])
    assert memory.num_free == 320
    assert memory.allocate(256) is None
    memory.release(128, 128)  # what lay between the first two
    assert memory.allocate(256) == 0


def test_pieces_join_their_neighbours_when_released():
    memory = ContiguousMemory(100)
    starts = [memory.allocate(25) for _ in range(4)]
    assert starts == [0, 25, 50, 75]
    assert memory.allocate(1) is None
    for start in (25, 75, 0, 50):
        memory.release(start, 25)
    assert memory.allocate(100) == 0


def test_an_aligned_piece_leaves_the_gap_before_it_free():
    memory = ContiguousMemory(64)
    assert memory.allocate(3) == 0
    assert memory.allocate(16, alignment=16) == 16
    assert memory.allocate(13) == 3


@pytest.mark.parametrize("name", ALLOCATORS)
def test_the_parts_add_up_and_every_sequence_finishes(name: str):
    result = run(name)
    split = result.split
    parts = (split.useful, split.reserved, split.internal, split.external, split.free)
    assert sum(parts) == pytest.approx(1.0)
    assert min(parts) >= 0.0
    still_running = len(MIXED) - result.num_finished
    assert 0 < still_running <= result.max_held  # the replay ends when nothing waits


def test_paged_holds_most_and_wastes_under_a_block_each():
    results = {name: run(name) for name in ALLOCATORS}
    paged = results["paged"]
    assert paged.split.useful > max(
        result.split.useful for name, result in results.items() if name != "paged"
    )
    assert paged.split.external == 0.0
    assert paged.split.internal * 4096 < 16 * paged.mean_held
    assert results["exact"].split.internal == 0.0
    assert results["exact"].split.external > 0.0
    assert results["reserve-to-max"].max_held == 4
    assert results["power-of-two"].mean_held > results["reserve-to-max"].mean_held


def test_paged_preempts_the_youngest_when_blocks_run_out():
    result = replay("paged", [Lengths(8, 40)] * 6, num_slots=64, block_size=16, max_length=64)
    assert result.num_preempted > 0
    assert result.num_finished + result.max_held >= 6


def test_sequences_beyond_the_longest_length_are_counted_not_served():
    assert run("exact", [*MIXED, Lengths(2000, 1)]).num_too_long == 1
    with pytest.raises(CommandError, match="no sequence"):
        run("exact", [Lengths(2000, 1)])
    with pytest.raises(CommandError, match="at once"):
        run("exact", [Lengths(1, 1)])


def test_a_trace_is_read_plain_or_gzipped(tmp_path: Path):
    rows = "".join(json.dumps({"t": t, "in": 10 + t, "out": t}) + "\n" for t in range(3))
    plain, packed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    plain.write_text(rows)
    packed.write_bytes(gzip.compress(rows.encode()))
    expected = [Lengths(10, 1), Lengths(11, 1), Lengths(12, 2)]
    assert read_lengths(plain) == read_lengths(packed) == expected
    assert read_lengths(plain, limit=2) == expected[:2]
    plain.write_text('{"in": 3}\n')
    with pytest.raises(CommandError, match=r"a\.jsonl"):
        read_lengths(plain)


def test_the_plot_is_a_png(tmp_path: Path):
    split = MemorySplit(0.5, 0.2, 0.1, 0.1, 0.1)
    plot([AllocatorResult("paged", split, 3.0, 4, 10, 0, 0, 100)], tmp_path / "split.png")
    assert (tmp_path / "split.png").read_bytes().startswith(b"\x89PNG")
