"""Steps survive the way to the other ranks."""

from dataclasses import fields, is_dataclass

import numpy as np

from pagefleet.protos.messages import SamplingParams
from pagefleet.scheduler.output import CopyJob, CopyKind, DeviceCopy, NewRow, SchedulerOutput
from pagefleet.workers.step_codec import StepKind, StepMessage, decode_step, encode_step


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


SAMPLING = SamplingParams(
    max_tokens=9,
    min_tokens=1,
    temperature=0.1,
    top_k=5,
    top_p=1 / 3,
    min_p=1e-9,
    seed=2**64 - 1,
    n=2,
    stop=("end é",),
    stop_token_ids=(3, 4),
    ignore_eos=True,
    repetition_penalty=1.1,
    presence_penalty=-0.5,
    frequency_penalty=0.5,
    logit_bias=((7, -100.0), (8, 0.25)),
    logprobs=0,
    prompt_logprobs=2,
    skip_special_tokens=False,
    grammar="start: /a+/",
    beam_width=3,
    length_penalty=0.0,
)
OUTPUT = SchedulerOutput(
    step=2**40,
    rows=ints(4, 1),
    num_scheduled_tokens=ints(1, 7),
    num_computed_tokens=ints(30, 0),
    sample_entries=ints(0, 1, 1),
    sample_rows=ints(4, 1, 2),
    removed_rows=ints(9),
    new_rows=(
        NewRow(1, 11, ints(*range(7)), 6, ints(5), SAMPLING, 1),
        NewRow(2, 12, ints(), 0, ints(5, 6), SamplingParams(seed=1), 2),
    ),
    cut_rows=ints(4, 1),
    cut_lengths=ints(2, 3),
    table_rows=ints(4, 4),
    table_blocks=ints(20, 21),
    tail_rows=ints(4),
    tail_blocks=ints(22),
    device_copies=(DeviceCopy(19, 22, 3),),
    copy_jobs=(
        CopyJob(1, CopyKind.STORE, ints(1, 2), ints(3, 4)),
        CopyJob(2, CopyKind.LOAD, ints(8), ints(9)),
        CopyJob(3, CopyKind.IMPORT, ints(0, 1), ints(5, 6), staging=7),
    ),
    draft_token_ids=ints(-1, -1, 5, 6).reshape(2, 2),
)


def assert_same(found: object, wanted: object) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, np.ndarray):
        assert isinstance(found, np.ndarray)
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        assert (found == wanted).all()
    elif is_dataclass(wanted):
        for field in fields(wanted):
            assert_same(getattr(found, field.name), getattr(wanted, field.name))
    elif isinstance(wanted, tuple):
        assert isinstance(found, tuple)
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert found == wanted


def test_every_field_survives() -> None:
    message = StepMessage(StepKind.EXECUTE, OUTPUT, ints(1, 2, 3), ints(8))
    assert_same(decode_step(encode_step(message)), message)


def test_the_example_sets_every_field() -> None:
    """A field added to a message must be added above, and then to the codec."""
    for example, neutral in ((SAMPLING, SamplingParams()), (OUTPUT, SchedulerOutput(step=0))):
        for field in fields(example):
            value, default = getattr(example, field.name), getattr(neutral, field.name)
            changed = len(value) > 0 if isinstance(value, np.ndarray) else value != default
            assert changed, field.name
    assert len(fields(NewRow)) == 7 and len(fields(CopyJob)) == 5 and len(fields(DeviceCopy)) == 3


def test_an_empty_step_survives() -> None:
    message = StepMessage(StepKind.EXECUTE, SchedulerOutput(step=3))
    assert_same(decode_step(encode_step(message)), message)


def test_orders_without_a_step_survive() -> None:
    for message in (StepMessage(StepKind.STOP), StepMessage(StepKind.POLL, copy_jobs=ints(4, 5))):
        assert_same(decode_step(encode_step(message)), message)


def test_arrays_can_be_handed_to_torch() -> None:
    decoded = decode_step(encode_step(StepMessage(StepKind.EXECUTE, OUTPUT)))
    assert decoded.output is not None
    assert decoded.output.rows.flags.writeable and decoded.output.rows.flags.aligned
