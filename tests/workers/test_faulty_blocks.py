"""Faults on purpose: what they do, and that answers do not change."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from factories import make_llama
from model_driver import load_runner, make_request, random_prompt, serve

from pagefleet.kernels.reference import ReferenceBackend
from pagefleet.protos.messages import SamplingParams
from pagefleet.scheduler.config import PreemptionMode
from pagefleet.scheduler.output import CopyJob, CopyKind, NewRow, SchedulerOutput
from pagefleet.workers.block_storage import BlockLayout, BlockStorage
from pagefleet.workers.faults import Faults
from pagefleet.workers.faulty_blocks import GuardChanged, fresh_blocks

VOCAB = 64
LAYOUT = BlockLayout(2, 4, 2, 8, torch.float32)
EVERYTHING = Faults(preempt_every=5, hash_bits=4, late_copies=True, nan_fill=True, guard_block=True)


def make_storage(faults: Faults) -> BlockStorage:
    return BlockStorage(LAYOUT, 6, 4, torch.device("cpu"), ReferenceBackend(), faults)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_faults_are_read_by_name() -> None:
    texts = ["preempt-every=7", "hash-bits=8", "late-copies", "nan-fill", "guard-block"]
    assert Faults.parse(texts) == Faults(7, 8, True, True, True)
    assert Faults.parse([]) == Faults()


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "late_copies",
        "late-copies=1",
        "hash-bits",
        "hash-bits=",
        "hash-bits=0",
        "hash-bits=129",
        "hash-bits=x",
        "preempt-every=0",
        "preempt-every=-1",
        "",
    ],
)
def test_what_is_no_fault_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Faults.parse([text])


def test_a_guard_finds_writes_outside_the_pool() -> None:
    storage = make_storage(Faults(guard_block=True))
    assert len(storage.pool) == 6 and len(storage.host_pool) == 4
    storage.pool.fill_(1.0)
    storage.host_pool.fill_(1.0)
    storage.check_guard()
    whole = torch.as_strided(
        storage.pool, (1,), (1,), storage.pool.storage_offset() + storage.pool.numel()
    )
    whole[0] = 7.0
    with pytest.raises(GuardChanged):
        storage.check_guard()


def test_pools_begin_as_nan_and_fresh_blocks_become_so_again() -> None:
    storage = make_storage(Faults(nan_fill=True))
    assert storage.pool.isnan().all() and storage.host_pool.isnan().all()
    storage.pool.fill_(1.0)
    storage.take_fresh(SchedulerOutput(step=1, table_rows=ints(0), table_blocks=ints(4)))
    assert storage.pool[4].isnan().all()
    assert not storage.pool[[0, 1, 2, 3, 5]].isnan().any()


def test_blocks_behind_what_is_computed_are_fresh() -> None:
    table = ints(9, 8, 7, 6)
    new = NewRow(3, 1, ints(*range(14)), 14, table, SamplingParams(), 0)
    held = replace(new, row=5, block_table=ints(1, 2))
    output = SchedulerOutput(
        step=1,
        rows=ints(3),
        num_scheduled_tokens=ints(9),
        num_computed_tokens=ints(5),
        new_rows=(new, held),
        table_rows=ints(0),
        table_blocks=ints(20),
    )
    assert fresh_blocks(output, 4).tolist() == [20, 7, 6]


def test_a_late_copy_begins_only_after_some_polls() -> None:
    storage = make_storage(Faults(late_copies=True))
    storage.pool.fill_(1.0)
    storage.host_pool.fill_(0.0)
    storage.submit((CopyJob(1, CopyKind.STORE, ints(2), ints(0)),))
    assert storage.poll() == () and not storage.host_pool.any()
    polls = 1
    while not storage.poll():
        polls += 1
    assert polls >= 3
    assert (storage.host_pool[0] == 1.0).all()
    storage.close()


@pytest.mark.parametrize("mode", list(PreemptionMode))
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_answers_stay_the_same_with_everything_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: PreemptionMode, backend: str
) -> None:
    """Samples, beams and shared prefixes in a tight pool, with every fault there is."""
    monkeypatch.setenv("PAGEFLEET_KERNELS", backend)
    folder = make_llama(tmp_path / "tiny", vocab_size=VOCAB, scale=0.7)
    shared = random_prompt(9, VOCAB)
    prompts = [[*shared, *random_prompt(length, VOCAB, seed=length)] for length in (1, 4, 7, 12)]
    sampling = SamplingParams(max_tokens=12, seed=3, n=2, ignore_eos=True)
    beams = SamplingParams(max_tokens=8, beam_width=3, n=3, temperature=0.0)
    requests = [make_request(f"s{i}", p, sampling, n=2) for i, p in enumerate(prompts)]
    requests += [make_request(f"b{i}", p, beams) for i, p in enumerate(prompts[:2])]
    settings = {"block_size": 4, "deterministic": True, "host_memory": 2**18}
    runner = load_runner(folder, **settings)
    expected = serve(runner, requests)
    runner.close()
    runner = load_runner(folder, faults=EVERYTHING, **settings)
    found = serve(
        runner,
        requests,
        num_blocks=24,
        num_host_blocks=min(40, runner.num_host_blocks),
        prefill_chunk=5,
        preemption_mode=mode,
    )
    runner.close()
    assert found.keys() == expected.keys()
    for key, answer in expected.items():
        assert found[key].token_ids == answer.token_ids, key
        assert not found[key].error
    usages = [answer.usage for answer in found.values() if answer.usage is not None]
    assert sum(usage.preemptions for usage in usages) > 0
