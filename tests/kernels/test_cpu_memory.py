import numpy as np
import pytest

from pagefleet.kernels import cpu_library, cpu_memory

pytestmark = pytest.mark.skipif(
    not cpu_library.is_available(), reason="the compiled kernels were not built"
)


@pytest.mark.parametrize("block_bytes", [1, 63, 64, 4096, 4096 + 64, 4096 + 8, 2**19])
def test_whole_blocks_move_between_pools(block_bytes: int) -> None:
    generator = np.random.default_rng(block_bytes)
    source = generator.integers(256, size=(9, block_bytes), dtype=np.uint8)
    target = np.zeros((7, block_bytes), dtype=np.uint8)
    sources, targets = np.array([8, 0, 3, 3], np.int32), np.array([6, 0, 1, 5], np.int32)
    cpu_memory.copy_bytes(source, sources, target, targets)
    assert (target[targets] == source[sources]).all()
    assert not target[[2, 3, 4]].any()
    cpu_memory.copy_bytes(source, sources[:0], target, targets[:0])


def test_blocks_that_begin_anywhere_in_memory_move_too() -> None:
    memory = np.zeros(4 * 128 + 1, dtype=np.uint8)
    source, target = np.full((4, 128), 7, dtype=np.uint8), memory[1:].reshape(4, 128)
    cpu_memory.copy_bytes(source, np.array([1], np.int32), target, np.array([2], np.int32))
    assert (target[2] == 7).all()
    assert memory.sum() == 7 * 128
