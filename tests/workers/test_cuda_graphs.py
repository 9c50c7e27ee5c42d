"""The bookkeeping of recorded decode steps: sizes, padding, buffers. What is recorded here is a
closure; a real recording needs a GPU and is made in tests/gpu."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from factories import make_llama
from model_driver import GREEDY, load_runner, make_request, random_prompt, serve
from torch import Tensor

from pagefleet.kernels.metadata import AttentionMetadata, HostLayout
from pagefleet.workers import model_runner
from pagefleet.workers.cuda_graphs import DecodeGraphs, GraphSettings, graph_sizes
from pagefleet.workers.input_batch import StepLayout
from pagefleet.workers.loaded_model import pick_device
from pagefleet.workers.model_runner import ModelRunner
from pagefleet.workers.promised_tokens import TokenFeed

CPU = torch.device("cpu")
BLOCK_SIZE, MAX_BLOCKS, NULL_BLOCK = 4, 8, 20


class Replayed:
    """Runs again what was recorded, into the same tensor, as a graph does."""

    def __init__(self, run: Callable[[], Tensor]) -> None:
        self._run = run
        self.output = run()

    @torch.inference_mode()
    def replay(self) -> None:
        self.output.copy_(self._run())


def make_graphs(forward: Callable[[Tensor, AttentionMetadata], Tensor], sizes: tuple[int, ...]):
    planned: list[tuple[int, HostLayout]] = []
    settings = GraphSettings(sizes, BLOCK_SIZE, MAX_BLOCKS, NULL_BLOCK, CPU)

    def plan(metadata: AttentionMetadata, host: HostLayout, max_num_pages: int) -> None:
        assert max_num_pages == sizes[-1] * MAX_BLOCKS
        planned.append((len(metadata.context_lens), host))

    return DecodeGraphs(settings, forward, plan, Replayed), planned


def decodes(context_lens: list[int], seed: int = 0) -> StepLayout:
    rng = np.random.default_rng(seed)
    lens = np.array(context_lens, dtype=np.int32)
    tables = rng.permutation(NULL_BLOCK)[: len(lens) * 2].reshape(len(lens), 2).astype(np.int32)
    positions = lens.astype(np.int64) - 1
    blocks = tables[np.arange(len(lens)), positions // BLOCK_SIZE].astype(np.int64)
    return StepLayout(
        token_ids=rng.integers(0, 100, len(lens)),
        positions=positions,
        slots=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
        attention=HostLayout(np.arange(len(lens) + 1, dtype=np.int32), lens, tables),
        num_decodes=len(lens),
        max_query_len=1,
    )


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (9, (1, 2, 4, 8, 9)),
        (64, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
        (150, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 150)),
    ],
)
def test_sizes_end_with_the_whole_batch(most: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(most) == sizes


@pytest.mark.parametrize("most", [5, 100, 256, 1000])
def test_at_most_a_quarter_is_computed_for_nothing(most: int) -> None:
    sizes = graph_sizes(most)
    assert sorted(set(sizes)) == list(sizes)
    for count in range(32, most + 1):
        size = next(size for size in sizes if size >= count)
        assert size - count <= size / 4


def test_a_step_is_padded_to_the_next_size_with_rows_in_the_null_block() -> None:
    seen: list[AttentionMetadata] = []

    def forward(token_ids: Tensor, metadata: AttentionMetadata) -> Tensor:
        seen.append(metadata)
        return token_ids.unsqueeze(1).float()

    graphs, planned = make_graphs(forward, (1, 2, 4))
    assert [size for size, _ in planned] == [4, 2, 1], "the largest is recorded first"
    layout = decodes([7, 1, 5])
    hidden = graphs.run(layout)
    metadata, (size, host) = seen[-1], planned[-1]
    assert size == len(metadata.context_lens) == metadata.num_decodes == 4
    assert hidden.flatten().tolist() == layout.token_ids.tolist()
    assert metadata.context_lens.tolist() == host.context_lens.tolist() == [7, 1, 5, 1]
    assert metadata.positions.tolist() == [6, 0, 4, 0]
    assert metadata.slots.tolist() == [*layout.slots.tolist(), NULL_BLOCK * BLOCK_SIZE]
    assert metadata.block_tables[:3, :2].tolist() == layout.attention.block_tables.tolist()
    assert metadata.block_tables[3, 0] == host.block_tables[3, 0] == NULL_BLOCK
    assert metadata.query_starts.tolist() == host.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert metadata.max_context_len == MAX_BLOCKS * BLOCK_SIZE


def test_tokens_that_only_the_device_knows_are_fed_to_a_recording() -> None:
    def forward(token_ids: Tensor, metadata: AttentionMetadata) -> Tensor:
        return token_ids.to(torch.float32).unsqueeze(1)

    graphs = make_graphs(forward, (2, 4))[0]
    layout = decodes([7, 1, 5])
    feed = TokenFeed(np.array([2, 0]), np.array([1, 0]), torch.tensor([70, 80]))
    hidden = graphs.run(replace(layout, feed=feed))
    assert hidden.flatten().tolist() == [70, int(layout.token_ids[1]), 80]


def test_a_smaller_step_leaves_nothing_of_the_larger_one_before() -> None:
    seen: list[tuple[Tensor, AttentionMetadata]] = []

    def forward(token_ids: Tensor, metadata: AttentionMetadata) -> Tensor:
        seen.append((token_ids, metadata))
        return token_ids.unsqueeze(1).float()

    graphs, _ = make_graphs(forward, (4,))
    graphs.run(decodes([7, 6, 5, 8]))
    graphs.run(decodes([3], seed=1))
    token_ids, metadata = seen[-1]
    assert token_ids[1:].tolist() == [0, 0, 0]
    assert metadata.context_lens.tolist() == [3, 1, 1, 1]
    assert metadata.slots[1:].unique().tolist() == [NULL_BLOCK * BLOCK_SIZE]
    assert metadata.block_tables[1:, 0].unique().tolist() == [NULL_BLOCK]


def test_only_decodes_that_fit_are_held() -> None:
    graphs, _ = make_graphs(lambda token_ids, _: token_ids.unsqueeze(1).float(), (1, 2))
    assert graphs.holds(decodes([3, 4]))
    assert not graphs.holds(decodes([3, 4, 5]))
    mixed = decodes([3, 4])
    prompt = StepLayout(
        mixed.token_ids, mixed.positions, mixed.slots, mixed.attention, 1, max_query_len=5
    )
    assert not graphs.holds(prompt)


@pytest.mark.parametrize(
    ("name", "device"), [("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")]
)
def test_a_gpu_is_named_by_its_number(name: str, device: str) -> None:
    """torch.cuda.set_device refuses one without."""
    assert pick_device(name) == torch.device(device)


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    return load_runner(make_llama(tmp_path / "model"), num_blocks=NULL_BLOCK + 1, block_size=4)


def test_the_model_computes_the_same_padded(runner: ModelRunner) -> None:
    """The real decoder over the real pool, and over a null block full of NaN."""
    runner.storage.pool.normal_(std=0.5)
    runner.storage.pool[NULL_BLOCK] = float("nan")

    @torch.inference_mode()
    def forward(token_ids: Tensor, metadata: AttentionMetadata) -> Tensor:
        layers = runner.storage.layers
        return runner.decoder.forward(token_ids, layers, metadata, None).clone()

    graphs, _ = make_graphs(forward, (1, 4))
    for lens in ([7, 1, 5], [8], [2, 2, 2, 2]):
        layout = decodes(lens, seed=len(lens))
        step = runner.batch.on_device(layout)
        before = runner.storage.pool.clone()
        expected = forward(step.token_ids, step.metadata)
        runner.storage.pool.copy_(before)
        torch.testing.assert_close(graphs.run(layout), expected, rtol=1e-5, atol=1e-5)
        changed = (runner.storage.pool != before).flatten(1).any(1)
        changed[NULL_BLOCK] = False  # NaN differs from itself
        assert set(changed.nonzero().flatten().tolist()) <= set((layout.slots // 4).tolist())


def test_served_answers_are_the_same_with_recorded_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner's own use of them: prompts and decodes side by side, rows coming and going."""
    folder = make_llama(tmp_path / "model")
    requests = [
        make_request(
            str(index),
            random_prompt(length, 100, seed=index),
            replace(GREEDY, max_tokens=8 + 4 * index),
        )
        for index, length in enumerate([3, 40, 17, 8, 60])
    ]
    plain = serve(load_runner(folder), requests)
    replays: list[int] = []

    class Counted(Replayed):
        def replay(self) -> None:
            replays.append(len(self.output))
            super().replay()

    monkeypatch.setattr(model_runner, "_graph_sizes", lambda *_: (1, 2, 4, 8))
    monkeypatch.setattr(model_runner, "CudaCapture", lambda _: Counted)
    recorded = load_runner(folder)
    assert recorded.storage.null_block == recorded.num_blocks == 64
    found = serve(recorded, requests)
    assert {key: answer.token_ids for key, answer in found.items()} == {
        key: answer.token_ids for key, answer in plain.items()
    }
    assert set(replays) == {1, 2, 4, 8}, "steps that only decode were replayed"
