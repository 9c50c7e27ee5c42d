"""A pool as a picture."""

import numpy as np
from scheduler_harness import make_request

from pagefleet.protos.messages import CacheIdentity
from pagefleet.scheduler.block_map import BlockState, make_map
from pagefleet.scheduler.config import SchedulerConfig
from pagefleet.scheduler.output import ModelRunnerOutput
from pagefleet.scheduler.scheduler import Scheduler

CLEAN, CACHED, REFERENCED, SHARED, FENCED, HOST = BlockState


def decode(cells: bytes) -> list[tuple[BlockState, int]]:
    return [(BlockState(cell & 7), cell >> 3) for cell in cells]


def test_a_cell_for_each_block_where_there_is_room() -> None:
    states = np.array([CLEAN, CACHED, REFERENCED, SHARED, FENCED, HOST], dtype=np.uint8)
    made = make_map(states, 100)
    assert made.num_blocks == 6
    assert decode(made.cells) == [(state, 31) for state in BlockState]


def test_a_cell_shows_what_most_of_its_blocks_are_and_how_many() -> None:
    states = np.array([CLEAN] * 6 + [CACHED] * 2 + [REFERENCED] * 5 + [SHARED] * 3, dtype=np.uint8)
    assert decode(make_map(states, 2).cells) == [(CLEAN, 24), (REFERENCED, 20)]


def test_of_equals_the_rarer_state_is_shown() -> None:
    states = np.array([CLEAN, FENCED, CACHED, REFERENCED], dtype=np.uint8)
    assert decode(make_map(states, 1).cells) == [(FENCED, 8)]


def test_cells_cover_every_block_once_at_odd_sizes() -> None:
    rng = np.random.default_rng(0)
    for num_blocks, max_cells in ((0, 5), (1, 5), (7, 3), (1000, 999), (100_003, 512)):
        states = rng.integers(0, 2, num_blocks).astype(np.uint8)
        made = make_map(states, max_cells)
        assert len(made.cells) == min(num_blocks, max_cells)
        starts = np.arange(len(made.cells)) * num_blocks // max(len(made.cells), 1)
        for index, (state, level) in enumerate(decode(made.cells)):
            run = states[starts[index] : starts[index + 1] if index + 1 < len(starts) else None]
            share = np.count_nonzero(run == state) / len(run)
            assert share >= 0.5 and share <= level / 31 < share + 1 / 31 + 1e-9


def test_tells_shared_from_referenced_and_cached_from_clean() -> None:
    identity = CacheIdentity("model", 0, "float32", 4)
    config = SchedulerConfig(num_blocks=16, block_size=4, max_num_sequences=4, max_context=64)
    scheduler = Scheduler(config, identity)

    def step() -> None:
        output = scheduler.schedule(0.0)
        assert output is not None
        tokens = np.full(len(output.sample_rows), 9, dtype=np.int32)
        scheduler.update(output, ModelRunnerOutput(output.step, tokens), 0.0)

    scheduler.add_request(make_request(8, key="a", max_tokens=1), 0.0)
    while scheduler.has_unfinished():
        step()
    scheduler.add_request(make_request(10, key="b", n=2, max_tokens=8), 0.0)
    step()
    device, host = scheduler.block_maps(1000)
    counts = {state: decode(device.cells).count((state, 31)) for state in BlockState}
    stats = scheduler.stats().device
    assert counts[CLEAN] == stats.clean and counts[CACHED] == stats.cached_idle
    assert counts[REFERENCED] + counts[SHARED] == stats.referenced
    assert counts[SHARED] >= 2, "both samples hold the prompt's full blocks"
    assert (host.num_blocks, host.cells) == (0, b"")
