"""Faults that a worker can be told to have, so that tests and drills find what they uncover.

    preempt-every=N   a running sequence is preempted every N steps
    hash-bits=N       block hashes keep N of their 128 bits, so that different blocks collide
    late-copies       copies between the tiers begin late: nobody may count on their being quick
    nan-fill          blocks are NaN until they are written: whoever reads too early is found out
    guard-block       a block before and one behind each pool, which nothing may ever change

Answers are the same with any of them; only for tests, since each costs time. Knows their names and
values, not what they do.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Faults:
    """Which are on. Field names are the names with underscores."""

    preempt_every: int | None = None
    hash_bits: int = 128
    late_copies: bool = False
    nan_fill: bool = False
    guard_block: bool = False

    def __post_init__(self) -> None:
        if self.preempt_every is not None and self.preempt_every < 1:
            raise ValueError(f"preempt-every must be at least 1, is {self.preempt_every}")
        if not 1 <= self.hash_bits <= 128:
            raise ValueError(f"hash-bits must be in [1, 128], is {self.hash_bits}")

    @classmethod
    def parse(cls, texts: Iterable[str]) -> "Faults":
        """From `name` and `name=number`. Raises ValueError for what is no fault."""
        chosen = dict(_parse(text) for text in texts)
        return cls(**chosen)  # pyright: ignore[reportArgumentType]


_NAMES = {field.name.replace("_", "-"): field.name for field in fields(Faults)}
_COUNTS = ("preempt-every", "hash-bits")


def _parse(text: str) -> tuple[str, int | bool]:
    name, equals, value = text.partition("=")
    if name not in _NAMES:
        known = ", ".join(f"{known}=N" if known in _COUNTS else known for known in _NAMES)
        raise ValueError(f"{name!r} is none of {known}")
    if name not in _COUNTS:
        if equals:
            raise ValueError(f"{name} takes no value, is given {value!r}")
        return _NAMES[name], True
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise ValueError(f"{name} needs a number, like {name}=8")
    return _NAMES[name], int(value)
