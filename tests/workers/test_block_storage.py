"""Copies inside and between the tiers, byte for byte."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from pagefleet.kernels import block_copy
from pagefleet.kernels.reference import ReferenceBackend
from pagefleet.kernels.select import select_backend
from pagefleet.scheduler.output import CopyDone, CopyJob, CopyKind, DeviceCopy
from pagefleet.workers.block_storage import BlockLayout, BlockStorage
from pagefleet.workers.faults import Faults


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def storage(request: pytest.FixtureRequest) -> Iterator[BlockStorage]:
    layout = BlockLayout(3, 4, 2, 8, request.param)
    made = BlockStorage(layout, 12, 6, torch.device("cpu"), ReferenceBackend())
    made.pool.copy_(torch.randn(made.pool.shape))
    made.host_pool.copy_(torch.randn(made.host_pool.shape))
    yield made
    made.close()


def job(job_id: int, kind: CopyKind, sources: list[int], targets: list[int]) -> CopyJob:
    return CopyJob(
        job_id, kind, np.array(sources, dtype=np.int32), np.array(targets, dtype=np.int32)
    )


def wait_for(storage: BlockStorage, count: int) -> list[CopyDone]:
    """Ask until `count` jobs ended."""
    done: list[CopyDone] = []
    deadline = time.monotonic() + 20.0
    while len(done) < count:
        assert time.monotonic() < deadline, f"only {done} ended"
        done += storage.poll()
    return done


def test_a_layer_is_a_view_of_the_pool(storage: BlockStorage) -> None:
    assert len(storage.layers) == 3
    assert storage.layers[1].shape == (12, 2, 4, 2, 8)
    storage.layers[1][5, 0, 2] = 7.0
    assert (storage.pool[5, 1, 0, 2] == 7.0).all()
    assert storage.pool[0].is_contiguous()
    assert storage.layout.num_bytes == storage.pool[0].numel() * storage.pool.element_size()


def test_copy_on_write_leaves_the_source(storage: BlockStorage) -> None:
    before = storage.pool.clone()
    storage.copy_on_write((DeviceCopy(3, 7, 2), DeviceCopy(0, 11, 4)))
    assert torch.equal(storage.pool[7, :, :, :2], before[3, :, :, :2])
    assert torch.equal(storage.pool[7, :, :, 2:], before[7, :, :, 2:])
    assert torch.equal(storage.pool[11], before[0])
    others = [index for index in range(12) if index not in (7, 11)]
    assert torch.equal(storage.pool[others], before[others])
    storage.copy_on_write(())


def test_blocks_go_to_the_host_and_come_back(storage: BlockStorage) -> None:
    blocks = storage.pool[[2, 3, 9]].clone()
    storage.submit((job(1, CopyKind.STORE, [2, 3, 9], [4, 5, 0]),))
    assert [done.job_id for done in wait_for(storage, 1)] == [1]
    assert torch.equal(storage.host_pool[[4, 5, 0]], blocks)
    storage.pool.fill_(float("nan"))
    storage.submit((job(2, CopyKind.LOAD, [4, 5], [8, 1]), job(3, CopyKind.LOAD, [0], [10])))
    assert {done.job_id for done in wait_for(storage, 2)} == {2, 3}
    assert torch.equal(storage.pool[[8, 1, 10]], blocks)
    untouched = [index for index in range(12) if index not in (8, 1, 10)]
    assert storage.pool[untouched].isnan().all()


def test_the_compiled_backend_copies_the_same_bytes() -> None:
    layout = BlockLayout(3, 4, 2, 8, torch.float32)
    backend = select_backend(torch.device("cpu"), torch.float32, deterministic=False)
    storage = BlockStorage(layout, 12, 6, torch.device("cpu"), backend)
    storage.pool.copy_(torch.randn(storage.pool.shape))
    blocks = storage.pool[[2, 3, 9]].clone()
    storage.submit((job(1, CopyKind.STORE, [2, 3, 9], [4, 5, 0]),))
    wait_for(storage, 1)
    storage.submit((job(2, CopyKind.LOAD, [0, 4], [11, 1]),))
    wait_for(storage, 1)
    assert torch.equal(storage.pool[[1, 3, 11]], blocks)
    storage.close()


def test_a_slow_copy_keeps_nobody_waiting(
    storage: BlockStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_copy = threading.Event()
    copy_bytes = block_copy.copy_bytes

    def slow(*arguments: np.ndarray) -> None:
        assert may_copy.wait(20.0)
        copy_bytes(*arguments)

    monkeypatch.setattr(block_copy, "copy_bytes", slow)
    block = storage.pool[2].clone()
    storage.submit((job(1, CopyKind.STORE, [2], [0]),))
    assert storage.poll() == ()
    storage.pool[3] = 1.0  # a step writes its own blocks meanwhile
    may_copy.set()
    assert [done.job_id for done in wait_for(storage, 1)] == [1]
    assert torch.equal(storage.host_pool[0], block)


@pytest.mark.parametrize("seed", range(3))
def test_many_jobs_in_order_keep_every_byte(storage: BlockStorage, seed: int) -> None:
    generator = np.random.default_rng(seed)
    expected_pool, expected_host = storage.pool.clone(), storage.host_pool.clone()
    for number in range(50):
        count = int(generator.integers(0, 5))
        device = generator.permutation(12)[:count].tolist()
        host = generator.permutation(6)[:count].tolist()
        if generator.random() < 0.5:
            storage.submit((job(number, CopyKind.STORE, device, host),))
            expected_host[host] = expected_pool[device]
        else:
            storage.submit((job(number, CopyKind.LOAD, host, device),))
            expected_pool[device] = expected_host[host]
    ended = wait_for(storage, 50)
    assert [done.job_id for done in ended] == list(range(50))
    assert all(done.ok and done.elapsed_s > 0.0 for done in ended)
    assert torch.equal(storage.pool, expected_pool)
    assert torch.equal(storage.host_pool, expected_host)


@pytest.mark.parametrize(
    ("sources", "targets"), [([12], [0]), ([0], [6]), ([-1], [0]), ([0, 1], [0])]
)
def test_a_job_outside_the_pools_is_a_bug(
    storage: BlockStorage, sources: list[int], targets: list[int]
) -> None:
    with pytest.raises(AssertionError):
        storage.submit((job(1, CopyKind.STORE, sources, targets),))


def test_without_a_host_tier_nothing_is_started() -> None:
    before = threading.active_count()
    layout = BlockLayout(3, 4, 2, 8, torch.float32)
    storage = BlockStorage(layout, 4, 0, torch.device("cpu"), ReferenceBackend())
    storage.submit(())
    assert storage.poll() == ()
    assert threading.active_count() == before
    storage.close()


def test_a_null_block_lies_behind_those_that_the_scheduler_knows() -> None:
    layout = BlockLayout(3, 4, 2, 8, torch.float32)
    device, backend = torch.device("cpu"), ReferenceBackend()
    storage = BlockStorage(layout, 12, 6, device, backend, has_null_block=True)
    assert storage.null_block == storage.num_blocks == 12
    assert len(storage.pool) == 13
    assert len(storage.host_pool) == 6


def test_blocks_of_fp8_are_copied_on_write_swapped_and_spoilt() -> None:
    layout = BlockLayout(3, 4, 2, 8, torch.float8_e4m3fn)
    faults, backend = Faults(nan_fill=True), select_backend(torch.device("cpu"), torch.float32)
    storage = BlockStorage(layout, 12, 6, torch.device("cpu"), backend, faults)
    assert storage.pool.float().isnan().all()
    storage.pool.copy_(torch.randn(storage.pool.shape))
    before = storage.pool.float()
    storage.copy_on_write((DeviceCopy(3, 7, 2),))
    storage.submit((job(1, CopyKind.STORE, [2, 3], [4, 5]),))
    wait_for(storage, 1)
    storage.close()
    assert torch.equal(storage.pool[7, :, :, :2].float(), before[3, :, :, :2])
    assert torch.equal(storage.pool[7, :, :, 2:].float(), before[7, :, :, 2:])
    assert torch.equal(storage.host_pool[[4, 5]].float(), before[[2, 3]])
    assert storage.layout.num_bytes == 3 * 2 * 4 * 2 * 8
