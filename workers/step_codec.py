"""One step as bytes, for the ranks that obey the leader. Knows no transport.

    int64 header: kind, step, lengths │ int32 data, array after array │ JSON of what is rare

A decode step has no JSON. Nothing is pickled: a rank takes no code from the network.
"""

import json
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import cast

import numpy as np

from ..protos.messages import SamplingParams
from ..scheduler.output import (
    CopyJob,
    CopyKind,
    DeviceCopy,
    Int32Array,
    NewRow,
    SchedulerOutput,
)


class StepKind(IntEnum):
    """What the ranks are to do."""

    EXECUTE = 0  # run the step
    POLL = 1  # tell which copies have ended
    STOP = 2  # leave


def _no_ints() -> Int32Array:
    return np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class StepMessage:
    """What the leader tells the other ranks.

    output: None unless kind is EXECUTE.
    previous_tokens: int32, what the leader sampled in the step before, in the order of its
        `sample_rows`; the ranks append it before they look at this step.
    copy_jobs: int32, ids of the copies whose state every rank reports once the step is run.
    """

    kind: StepKind
    output: SchedulerOutput | None = None
    previous_tokens: Int32Array = field(default_factory=_no_ints)
    copy_jobs: Int32Array = field(default_factory=_no_ints)


_ARRAYS = (
    "rows",
    "num_scheduled_tokens",
    "num_computed_tokens",
    "sample_entries",
    "sample_rows",
    "removed_rows",
    "cut_rows",
    "cut_lengths",
    "table_rows",
    "table_blocks",
    "tail_rows",
    "tail_blocks",
)
# kind, step, bytes of JSON, width of the drafts (0 = none), then the length of each array:
# previous tokens, copy jobs, those of the output.
_HEADER = 4 + 2 + len(_ARRAYS)
_SAMPLING_DEFAULTS = {
    item.name: getattr(SamplingParams(), item.name) for item in fields(SamplingParams)
}


def encode_step(message: StepMessage) -> bytes:
    """The bytes that `decode_step` understands."""
    output = message.output or SchedulerOutput(step=0)
    arrays = [message.previous_tokens, message.copy_jobs]
    arrays += [getattr(output, name) for name in _ARRAYS]
    lengths = [len(array) for array in arrays]
    drafts = output.draft_token_ids
    if drafts is not None:
        arrays.append(drafts.ravel())
    for new in output.new_rows:
        arrays += [new.token_ids, new.block_table]
    for job in output.copy_jobs:
        arrays += [job.sources, job.targets]
    rare = _encode_rare(output)
    width = 0 if drafts is None else drafts.shape[1]
    header = np.array([message.kind, output.step, len(rare), width, *lengths], dtype=np.int64)
    data = np.concatenate(arrays, dtype=np.int32, casting="same_kind")
    return header.tobytes() + data.tobytes() + rare


def decode_step(message: bytes) -> StepMessage:
    """What `encode_step` was given."""
    # torch wants memory that it may write to.
    buffer = bytearray(message)
    kind, step, num_rare, width, *lengths = np.frombuffer(buffer, np.int64, _HEADER).tolist()
    end = len(buffer) - num_rare
    reader = _Reader(np.frombuffer(buffer[:end], np.int32, offset=8 * _HEADER))
    previous_tokens, copy_jobs, *arrays = (reader.take(length) for length in lengths)
    if kind != StepKind.EXECUTE:
        return StepMessage(StepKind(kind), None, previous_tokens, copy_jobs)
    named = dict(zip(_ARRAYS, arrays, strict=True))
    drafts = None
    if width > 0:
        drafts = reader.take(len(named["rows"]) * width).reshape(-1, width)
    rare = _Rare() if num_rare == 0 else _decode_rare(buffer[end:], reader)
    output = SchedulerOutput(
        step=step,
        **named,
        new_rows=rare.new_rows,
        device_copies=rare.device_copies,
        copy_jobs=rare.copy_jobs,
        draft_token_ids=drafts,
    )
    return StepMessage(StepKind.EXECUTE, output, previous_tokens, copy_jobs)


class _Reader:
    """Takes one array after the other."""

    def __init__(self, data: Int32Array) -> None:
        self._data = data
        self._at = 0

    def take(self, length: int) -> Int32Array:
        self._at += length
        return self._data[self._at - length : self._at]


@dataclass(frozen=True, slots=True)
class _Rare:
    new_rows: tuple[NewRow, ...] = ()
    device_copies: tuple[DeviceCopy, ...] = ()
    copy_jobs: tuple[CopyJob, ...] = ()


def _encode_rare(output: SchedulerOutput) -> bytes:
    if not (output.new_rows or output.device_copies or output.copy_jobs):
        return b""
    new_rows = [
        [
            new.row,
            new.sequence_id,
            len(new.token_ids),
            new.num_prompt_tokens,
            len(new.block_table),
            new.sample_index,
            _set_fields(new.sampling),
        ]
        for new in output.new_rows
    ]
    copies = [[copy.source, copy.target, copy.num_slots] for copy in output.device_copies]
    jobs = [[job.job_id, job.kind.value, len(job.sources), job.staging] for job in output.copy_jobs]
    return json.dumps([new_rows, copies, jobs], separators=(",", ":")).encode()


def _decode_rare(rare: bytearray, reader: _Reader) -> _Rare:
    new_rows, copies, jobs = json.loads(rare)
    return _Rare(
        new_rows=tuple(_new_row(entry, reader) for entry in new_rows),
        device_copies=tuple(DeviceCopy(*entry) for entry in copies),
        copy_jobs=tuple(
            CopyJob(job_id, CopyKind(kind), reader.take(length), reader.take(length), staging)
            for job_id, kind, length, staging in jobs
        ),
    )


def _new_row(entry: list[object], reader: _Reader) -> NewRow:
    row, sequence_id, num_tokens, num_prompt_tokens, num_blocks, index = cast(list[int], entry[:6])
    sampling = cast(dict[str, object], entry[6])
    return NewRow(
        row=row,
        sequence_id=sequence_id,
        token_ids=reader.take(num_tokens),
        num_prompt_tokens=num_prompt_tokens,
        block_table=reader.take(num_blocks),
        sampling=replace(SamplingParams(), **{k: _frozen(v) for k, v in sampling.items()}),
        sample_index=index,
    )


def _set_fields(params: SamplingParams) -> dict[str, object]:
    """Only what differs from the neutral values: most requests set three or four fields."""
    values = ((name, getattr(params, name)) for name in _SAMPLING_DEFAULTS)
    return {name: value for name, value in values if value != _SAMPLING_DEFAULTS[name]}


def _frozen(value: object) -> object:
    """JSON has lists where the messages have tuples."""
    if isinstance(value, list):
        return tuple(_frozen(item) for item in cast(list[object], value))
    return value
