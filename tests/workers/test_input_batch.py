"""The kept arrays against a plain Python model of the same deltas."""

import numpy as np
import pytest
import torch

from pagefleet.protos.messages import SamplingParams
from pagefleet.scheduler.output import NewRow, SchedulerOutput
from pagefleet.workers.input_batch import InputBatch

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def new_row(row: int, tokens: list[int], blocks: list[int], **fields: object) -> NewRow:
    sampling = SamplingParams(temperature=0.0, **fields)  # pyright: ignore
    return NewRow(row, row, ids(*tokens), len(tokens), ids(*blocks), sampling, 0)


def make_batch(block_size: int = 4) -> InputBatch:
    return InputBatch(num_rows=5, max_context=32, block_size=block_size, device=CPU)


def test_a_mixed_step_is_laid_out_flat() -> None:
    batch = make_batch()
    batch.apply(
        SchedulerOutput(
            step=1,
            new_rows=(new_row(3, [10, 11, 12, 13, 14], [7, 2]), new_row(1, [20, 21, 22], [9])),
        )
    )
    step = batch.prepare(
        SchedulerOutput(
            step=1,
            rows=ids(1, 3),
            num_scheduled_tokens=ids(1, 4),
            num_computed_tokens=ids(2, 1),
        )
    )
    assert step.token_ids.tolist() == [22, 11, 12, 13, 14]
    assert step.token_ids.dtype == torch.int64
    metadata = step.metadata
    assert metadata.positions.tolist() == [2, 1, 2, 3, 4]
    assert metadata.slots.tolist() == [9 * 4 + 2, 7 * 4 + 1, 7 * 4 + 2, 7 * 4 + 3, 2 * 4]
    assert metadata.query_starts.tolist() == [0, 1, 5]
    assert metadata.context_lens.tolist() == [3, 5]
    assert metadata.block_tables[:, 0].tolist() == [9, 7]
    assert metadata.block_tables[1].tolist() == [7, 2]
    assert (metadata.num_decodes, metadata.max_query_len, metadata.max_context_len) == (1, 4, 5)
    for tensor in (metadata.query_starts, metadata.context_lens, metadata.block_tables):
        assert tensor.dtype == torch.int32


def test_blocks_are_appended_in_order_and_tails_replaced() -> None:
    batch = make_batch()
    batch.apply(SchedulerOutput(step=1, new_rows=(new_row(0, [1], [5]), new_row(2, [1], [6]))))
    batch.apply(
        SchedulerOutput(step=2, table_rows=ids(2, 0, 2, 2), table_blocks=ids(10, 11, 12, 13))
    )
    assert batch.block_tables[2, :4].tolist() == [6, 10, 12, 13]
    assert batch.block_tables[0, :2].tolist() == [5, 11]
    batch.apply(SchedulerOutput(step=3, tail_rows=ids(2, 0), tail_blocks=ids(20, 21)))
    assert batch.block_tables[2, :4].tolist() == [6, 10, 12, 20]
    assert batch.block_tables[0, :2].tolist() == [5, 21]
    assert batch.num_blocks[[0, 2]].tolist() == [2, 4]


def test_a_tail_may_be_replaced_in_the_step_that_appends() -> None:
    batch = make_batch()
    batch.apply(SchedulerOutput(step=1, new_rows=(new_row(0, [1], [5]),)))
    batch.apply(
        SchedulerOutput(
            step=2,
            table_rows=ids(0),
            table_blocks=ids(8),
            tail_rows=ids(0),
            tail_blocks=ids(9),
        )
    )
    assert batch.block_tables[0, :2].tolist() == [9, 8]


def test_a_table_is_cut_before_it_grows_again() -> None:
    batch = make_batch()
    batch.apply(SchedulerOutput(step=1, new_rows=(new_row(0, [1], [5, 6, 7]),)))
    batch.apply(
        SchedulerOutput(
            step=2, cut_rows=ids(0), cut_lengths=ids(1), table_rows=ids(0), table_blocks=ids(8)
        )
    )
    assert batch.num_blocks[0] == 2 and batch.block_tables[0, :2].tolist() == [5, 8]


def test_guesses_are_computed_and_only_the_right_ones_stay() -> None:
    batch = make_batch()
    rows = (new_row(0, [1, 2], [5]), new_row(1, [3, 4, 5], [6]))
    output = SchedulerOutput(
        step=1,
        rows=ids(1, 0),
        num_scheduled_tokens=ids(1, 3),
        num_computed_tokens=ids(2, 1),
        sample_entries=ids(0, 1, 1, 1),
        sample_rows=ids(1, 0, 0, 0),
        new_rows=rows,
        draft_token_ids=np.array([[-1, -1], [8, 9]], dtype=np.int32),
    )
    batch.apply(output)
    assert batch.prepare(output).token_ids.tolist() == [5, 2, 8, 9]
    assert batch.num_tokens[:2].tolist() == [2, 3]
    batch.append_tokens(output.sample_rows, ids(7, 8, 6, -1), np.array([0, 0, 1, 2]))
    assert batch.num_tokens[:2].tolist() == [4, 4]
    assert batch.tokens[0, :4].tolist() == [1, 2, 8, 6] and batch.tokens[1, 3] == 7


def test_a_reused_row_forgets_what_stood_there() -> None:
    batch = make_batch()
    odd = {"logit_bias": ((1, 2.0),), "min_tokens": 3, "logprobs": 1, "prompt_logprobs": 1}
    batch.apply(SchedulerOutput(step=1, new_rows=(new_row(0, [1, 2, 3], [5], **odd),)))
    sampling = batch.sampling
    assert sampling.is_special[0]
    batch.apply(SchedulerOutput(step=2, removed_rows=ids(0), new_rows=(new_row(0, [9], [6]),)))
    assert not sampling.is_special[0]
    rare = (
        sampling.logit_bias,
        sampling.forbidden_ids,
        sampling.num_logprobs,
        sampling.num_prompt_logprobs,
    )
    assert rare == ({}, {}, {}, {})
    assert batch.num_tokens[0] == 1


def test_metadata_outlives_later_changes() -> None:
    batch = make_batch()
    batch.apply(SchedulerOutput(step=1, new_rows=(new_row(0, [1, 2], [5]),)))
    decode = SchedulerOutput(
        step=1, rows=ids(0), num_scheduled_tokens=ids(1), num_computed_tokens=ids(1)
    )
    step = batch.prepare(decode)
    batch.append_tokens(ids(0), ids(77))
    batch.apply(SchedulerOutput(step=2, tail_rows=ids(0), tail_blocks=ids(30)))
    assert step.metadata.block_tables.tolist() == [[5]]
    assert step.token_ids.tolist() == [2]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_any_sequence_of_deltas_equals_plain_lists(seed: int, block_size: int) -> None:
    generator = np.random.default_rng(seed)
    batch = make_batch(block_size)
    tokens: dict[int, list[int]] = {}
    tables: dict[int, list[int]] = {}
    for step in range(60):
        new_rows = []
        for row in generator.permutation(5)[: generator.integers(0, 2)].tolist():
            tokens[row] = generator.integers(0, 99, generator.integers(1, 12)).tolist()
            tables[row] = generator.integers(0, 50, -(-len(tokens[row]) // block_size)).tolist()
            new_rows.append(new_row(row, tokens[row], tables[row]))
        rows = [row for row in tokens if len(tokens[row]) < 31]
        if not rows:
            continue
        starts = {row: int(generator.integers(0, len(tokens[row]))) for row in rows}
        counts = {
            row: int(generator.integers(1, len(tokens[row]) - starts[row] + 1)) for row in rows
        }
        rows.sort(key=lambda row: counts[row] != 1)
        output = SchedulerOutput(
            step=step,
            rows=ids(*rows),
            num_scheduled_tokens=ids(*(counts[row] for row in rows)),
            num_computed_tokens=ids(*(starts[row] for row in rows)),
            new_rows=tuple(new_rows),
        )
        batch.apply(output)
        found = batch.prepare(output)
        pairs = [(row, starts[row] + i) for row in rows for i in range(counts[row])]
        assert found.token_ids.tolist() == [tokens[row][at] for row, at in pairs]
        assert found.metadata.positions.tolist() == [at for _, at in pairs]
        assert found.metadata.slots.tolist() == [
            tables[row][at // block_size] * block_size + at % block_size for row, at in pairs
        ]
        sampled = generator.integers(0, 99, len(rows)).astype(np.int32)
        batch.append_tokens(output.rows, sampled)
        grown: list[tuple[int, int]] = []
        for row, token in zip(rows, sampled.tolist(), strict=True):
            tokens[row].append(token)
            if len(tokens[row]) > len(tables[row]) * block_size:
                tables[row].append(int(generator.integers(0, 50)))
                grown.append((row, tables[row][-1]))
        grown_rows, blocks = [row for row, _ in grown], [block for _, block in grown]
        batch.apply(
            SchedulerOutput(step=step, table_rows=ids(*grown_rows), table_blocks=ids(*blocks))
        )
