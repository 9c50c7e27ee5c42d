"""The step's input, kept between steps: one row per running sequence, updated by deltas.

Knows tokens, block tables and sampling parameters as arrays; no object per token, no tensor on
a device but the step's own. The scheduler owns the meaning of rows; this only obeys.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.metadata import AttentionMetadata, HostLayout
from ..protos.messages import SamplingParams
from ..scheduler.output import Int32Array, NewRow, SchedulerOutput, num_beam_candidates
from .drafts import DraftSamples
from .grammar import GrammarState
from .promised_tokens import Int64Array, Promise, PromisedTokens, TokenFeed
from .upload import upload

Float32Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepInput:
    """What the model computes in one step. token_ids: int64 [T]."""

    token_ids: Tensor
    metadata: AttentionMetadata


@dataclass(frozen=True, slots=True)
class StepLayout:
    """A step's input in host memory. token_ids, positions, slots: int64 [T]; attention, num_decodes
    and max_query_len: as in `AttentionMetadata`. feed: for token ids that only the device knows."""

    token_ids: Int64Array
    positions: Int64Array
    slots: Int64Array
    attention: HostLayout
    num_decodes: int
    max_query_len: int
    feed: TokenFeed | None = None

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one token."""
        return self.num_decodes == len(self.attention.context_lens)


class SamplingRows:
    """Sampling parameters by row: arrays for what every row has, dicts for what few have.

    penalised, biased, floored (min_tokens), reporting (logprobs): whether a row needs that work.
    forbidden_ids: what min_tokens keeps back; empty where the row has no min_tokens.
    num_candidates: how many of its best tokens a beam offers.
    """

    def __init__(self, num_rows: int) -> None:
        self.temperature = np.ones(num_rows, dtype=np.float32)
        self.top_k = np.zeros(num_rows, dtype=np.int64)
        self.top_p = np.ones(num_rows, dtype=np.float32)
        self.min_p = np.zeros(num_rows, dtype=np.float32)
        self.repetition = np.ones(num_rows, dtype=np.float32)
        self.presence = np.zeros(num_rows, dtype=np.float32)
        self.frequency = np.zeros(num_rows, dtype=np.float32)
        self.seed = np.zeros(num_rows, dtype=np.uint64)
        self.sample_index = np.zeros(num_rows, dtype=np.int64)
        self.min_tokens = np.zeros(num_rows, dtype=np.int64)
        self.is_random = np.zeros(num_rows, dtype=np.bool_)
        self.is_penalised = np.zeros(num_rows, dtype=np.bool_)
        self.has_grammar = np.zeros(num_rows, dtype=np.bool_)
        self.is_special = np.zeros(num_rows, dtype=np.bool_)  # anything but plain greedy or draw
        self.logit_bias: dict[int, tuple[Int64Array, Float32Array]] = {}
        self.forbidden_ids: dict[int, Int64Array] = {}
        self.num_logprobs: dict[int, int] = {}
        self.num_prompt_logprobs: dict[int, int] = {}
        self.grammars: dict[int, GrammarState] = {}
        self.num_candidates: dict[int, int] = {}

    def set(self, new: NewRow, eos_token_ids: tuple[int, ...]) -> None:
        """Take over a new row's parameters."""
        row, params = new.row, new.sampling
        self._clear_rare(row)
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.repetition[row] = params.repetition_penalty
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        assert params.seed is not None or params.temperature == 0.0, f"row {row} has no seed"
        self.seed[row] = params.seed or 0
        self.sample_index[row] = new.sample_index
        self.min_tokens[row] = params.min_tokens
        self.is_random[row] = params.temperature > 0.0 and params.beam_width <= 1
        self.is_penalised[row] = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        self._set_rare(row, params, eos_token_ids)

    def _set_rare(self, row: int, params: SamplingParams, eos_token_ids: tuple[int, ...]) -> None:
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            bias = np.array(ids, dtype=np.int64), np.array(values, dtype=np.float32)
            self.logit_bias[row] = bias
        if params.min_tokens > 0:
            eos = () if params.ignore_eos else eos_token_ids
            self.forbidden_ids[row] = np.array((*eos, *params.stop_token_ids), dtype=np.int64)
        if params.logprobs is not None:
            self.num_logprobs[row] = params.logprobs
        if params.prompt_logprobs is not None:
            self.num_prompt_logprobs[row] = params.prompt_logprobs
        if params.grammar:
            self.grammars[row] = GrammarState(params.grammar)
        self.has_grammar[row] = row in self.grammars
        if params.beam_width > 1:
            self.num_candidates[row] = num_beam_candidates(params, len(eos_token_ids))
        self.is_special[row] = (
            self.is_penalised[row]
            or row in self.logit_bias
            or row in self.forbidden_ids
            or row in self.num_logprobs
            or row in self.grammars
            or row in self.num_candidates
        )

    def _clear_rare(self, row: int) -> None:
        for by_row in (
            self.logit_bias,
            self.forbidden_ids,
            self.num_logprobs,
            self.num_prompt_logprobs,
            self.grammars,
            self.num_candidates,
        ):
            by_row.pop(row, None)


class InputBatch:
    """Tokens and block tables of all rows.

    tokens: int32 [num_rows, max_context], prompt then output; block_tables: int32
    [num_rows, max_blocks]; num_tokens, num_prompt_tokens, num_blocks: int64 [num_rows].
    Beyond a row's counts both matrices hold whatever stood there before.
    """

    def __init__(
        self,
        num_rows: int,
        max_context: int,
        block_size: int,
        device: torch.device,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.block_size = block_size
        self.sampling = SamplingRows(num_rows)
        # One column more than the context: the token sampled at its very end needs a place.
        self.tokens = np.zeros((num_rows, max_context + 1), dtype=np.int32)
        self.block_tables = np.zeros((num_rows, -(-max_context // block_size)), dtype=np.int32)
        self.num_tokens = np.zeros(num_rows, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(num_rows, dtype=np.int64)
        self.num_blocks = np.zeros(num_rows, dtype=np.int64)
        self._promised = PromisedTokens(num_rows)
        self._entered = np.zeros(num_rows, dtype=np.int64)  # occupants that each row has had
        self._device = device
        self._eos_token_ids = eos_token_ids
        self._decode_starts = np.arange(num_rows + 1, dtype=np.int32)

    def apply(self, output: SchedulerOutput) -> None:
        """The deltas of one step, in the order that `SchedulerOutput` promises."""
        for new in output.new_rows:
            self._set_row(new)
        if len(output.cut_rows) > 0:
            self.num_blocks[output.cut_rows] = output.cut_lengths
        if len(output.tail_rows) > 0:
            last = self.num_blocks[output.tail_rows] - 1
            self.block_tables[output.tail_rows, last] = output.tail_blocks
        if len(output.table_rows) > 0:
            self._append_blocks(output.table_rows, output.table_blocks)
        if output.draft_token_ids is not None:
            self._place_drafts(output.rows, output.draft_token_ids)

    def append_tokens(
        self, rows: Int32Array, token_ids: Int32Array, offsets: Int64Array | None = None
    ) -> None:
        """One sampled token for each of the rows, all different.

        offsets: where rows with guesses stand several times, how far behind the row's next place
        each token belongs; -1 among `token_ids` then stands for nothing.
        """
        if offsets is None:
            self.tokens[rows, self.num_tokens[rows]] = token_ids
            self.num_tokens[rows] += 1
            return
        counts = token_ids >= 0
        rows = rows[counts]
        self.tokens[rows, self.num_tokens[rows] + offsets[counts]] = token_ids[counts]
        np.add.at(self.num_tokens, rows, 1)

    def promise(
        self, output: SchedulerOutput, token_ids: Tensor, drafts: DraftSamples | None
    ) -> Promise:
        """A step has been launched whose samples are on the device alone, token_ids: int64 [n].
        Rows count their new token from now on; those that have guessed, once it is known."""
        rows = output.sample_rows
        num_plain = len(rows) if drafts is None else drafts.num_plain
        plain = rows[:num_plain]
        offsets = None if drafts is None else drafts.offsets
        promise = Promise(rows, self._entered[rows], self.num_tokens[plain], offsets)
        self.num_tokens[plain] += 1
        self._promised.add(promise, token_ids)
        return promise

    def keep(self, promise: Promise, token_ids: Int32Array) -> None:
        """What was promised has come: int32 [n]. A row may have another occupant since."""
        self._promised.keep(promise)
        num_plain = promise.num_plain
        stays = self._entered[promise.rows] == promise.entered
        plain = stays[:num_plain]
        rows, positions = promise.rows[:num_plain][plain], promise.positions[plain]
        self.tokens[rows, positions] = token_ids[:num_plain][plain]
        if promise.offsets is not None:
            guessed = slice(num_plain, None)
            counting = np.where(stays[guessed], token_ids[guessed], np.int32(-1))
            self.append_tokens(promise.rows[guessed], counting, promise.offsets[guessed])

    def needs_unknown_tokens(self, rows: Int32Array) -> bool:
        """Whether a choice among logits depends on tokens that only the device knows."""
        params = self.sampling
        if not params.is_special[rows].any():
            return False
        reads = params.is_penalised[rows] | params.has_grammar[rows]
        return self._promised.is_unknown(rows[reads])

    def prepare(self, output: SchedulerOutput) -> StepInput:
        """The step on the device; see `lay_out`."""
        return self.on_device(self.lay_out(output))

    def lay_out(self, output: SchedulerOutput) -> StepLayout:
        """Tokens, positions and slots of the scheduled rows, flat in the order of the batch."""
        if int(output.num_scheduled_tokens.sum()) == len(output.rows):
            return self._lay_out_decodes(output)
        counts = output.num_scheduled_tokens.astype(np.int64)
        first = output.num_computed_tokens.astype(np.int64)
        starts = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        positions = np.arange(int(starts[-1]), dtype=np.int64)
        positions += np.repeat(first - starts[:-1], counts)
        return self._make_layout(
            rows=np.repeat(output.rows, counts),
            positions=positions,
            tables=output.rows,
            query_starts=starts,
            context_lens=(first + counts).astype(np.int32),
            num_decodes=int((counts != 1).argmax()),
            max_query_len=int(counts.max()),
        )

    def on_device(self, layout: StepLayout) -> StepInput:
        """The tensors of a layout."""
        attention = layout.attention
        metadata = AttentionMetadata(
            query_starts=upload(attention.query_starts, self._device),
            context_lens=upload(attention.context_lens, self._device),
            block_tables=upload(attention.block_tables, self._device),
            positions=upload(layout.positions, self._device),
            slots=upload(layout.slots, self._device),
            num_decodes=layout.num_decodes,
            max_query_len=layout.max_query_len,
            max_context_len=int(attention.context_lens.max()),
            host=attention,
        )
        token_ids = upload(layout.token_ids, self._device)
        if layout.feed is not None:
            layout.feed.write(token_ids)
        return StepInput(token_ids, metadata)

    def _lay_out_decodes(self, output: SchedulerOutput) -> StepLayout:
        """As `lay_out`, one token per row: nothing to repeat or to sum."""
        num_rows = len(output.rows)
        return self._make_layout(
            rows=output.rows,
            positions=output.num_computed_tokens.astype(np.int64),
            tables=output.rows,
            query_starts=self._decode_starts[: num_rows + 1],
            context_lens=output.num_computed_tokens + np.int32(1),
            num_decodes=num_rows,
            max_query_len=1,
        )

    def _make_layout(
        self,
        rows: Int32Array,
        positions: Int64Array,
        tables: Int32Array,
        query_starts: Int32Array,
        context_lens: Int32Array,
        num_decodes: int,
        max_query_len: int,
    ) -> StepLayout:
        """rows, positions: of each token; tables: the row of each sequence."""
        block_indices, offsets = np.divmod(positions, self.block_size)
        slots = self.block_tables[rows, block_indices] * np.int64(self.block_size)
        slots += offsets
        num_blocks = -(-int(context_lens.max()) // self.block_size)
        block_tables = self.block_tables[tables, :num_blocks]
        return StepLayout(
            token_ids=self.tokens[rows, positions].astype(np.int64),
            positions=positions,
            slots=slots,
            attention=HostLayout(query_starts, context_lens, block_tables),
            num_decodes=num_decodes,
            max_query_len=max_query_len,
            feed=self._promised.feed(rows, positions, self.num_tokens),
        )

    def _set_row(self, new: NewRow) -> None:
        row, num_tokens, num_blocks = new.row, len(new.token_ids), len(new.block_table)
        self.tokens[row, :num_tokens] = new.token_ids
        self.block_tables[row, :num_blocks] = new.block_table
        self.num_tokens[row] = num_tokens
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.num_blocks[row] = num_blocks
        self._entered[row] += 1
        self._promised.forget(row)
        self.sampling.set(new, self._eos_token_ids)

    def _place_drafts(self, rows: Int32Array, drafts: Int32Array) -> None:
        """Guesses stand behind a row's tokens, where they are no part of it yet."""
        entries, offsets = np.nonzero(drafts >= 0)
        drafted = rows[entries]
        self.tokens[drafted, self.num_tokens[drafted] + offsets] = drafts[entries, offsets]

    def _append_blocks(self, rows: Int32Array, blocks: Int32Array) -> None:
        """A row may stand several times; its blocks are appended in the order given."""
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        is_first = np.empty(len(rows), dtype=np.bool_)
        is_first[0] = True
        np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
        first = np.flatnonzero(is_first)
        lengths = np.diff(np.append(first, len(rows)))
        within = np.arange(len(rows)) - np.repeat(first, lengths)
        self.block_tables[ordered, self.num_blocks[ordered] + within] = blocks[order]
        self.num_blocks[ordered[first]] += lengths
