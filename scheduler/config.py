"""The scheduler's settings: values only, checked once."""

from dataclasses import dataclass
from enum import StrEnum


class PreemptionMode(StrEnum):
    """What becomes of a victim's KV when device blocks run out."""

    RECOMPUTE = "recompute"
    SWAP = "swap"
    AUTO = "auto"  # whichever is estimated to cost fewer milliseconds


class AdmissionRule(StrEnum):
    """How many free blocks a waiting sequence needs to enter beside others."""

    KNOWN_LENGTH = "known-length"  # for the tokens known now; it may be preempted later
    FULL_LENGTH = "full-length"  # for the longest it may become: fewer run, fewer are preempted


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policies of one replica's scheduler.

    num_blocks / num_host_blocks: sizes of the two tiers, in blocks.
    max_num_sequences: rows of the input batch. max_num_batched_tokens: tokens of one step.
    prefill_chunk: most prompt tokens of one sequence in one step; None = the step's budget.
    max_context: longest sequence, prompt and output together.
    admission_rule, watermark: a sequence enters where the blocks that the rule asks for are free
    and so many more, a share of the pool, for the growth of what runs already.
    block_bytes: of all layers on one rank, for the cost of copies. copy_bytes_per_s,
    prefill_tokens_per_s: first guesses, replaced by what is measured.
    write_back_blocks: so many blocks next in turn for eviction are kept on the host ahead of it;
    0 = nothing is written back.
    max_num_waiting: longest queue; a request beyond it is refused with a hint. None = no bound.
    num_speculative_tokens: most tokens that a sequence may guess ahead of one step, from its own
    text; 0 = none. prompt_lookup_min / prompt_lookup_max: how many of its last tokens must, and
    may at most, be the same at the place that it continues from.
    preempt_every: force a preemption every so many steps; a fault drill. None = never.
    hash_bits: fewer than 128 only to provoke collisions.
    """

    num_blocks: int
    block_size: int = 16
    num_host_blocks: int = 0
    max_num_sequences: int = 256
    max_num_batched_tokens: int = 2048
    prefill_chunk: int | None = None
    max_context: int = 8192
    enable_prefix_caching: bool = True
    preemption_mode: PreemptionMode = PreemptionMode.AUTO
    admission_rule: AdmissionRule = AdmissionRule.KNOWN_LENGTH
    watermark: float = 0.01
    block_bytes: int = 0
    copy_bytes_per_s: float = 4e9
    prefill_tokens_per_s: float = 1000.0
    write_back_blocks: int = 32
    max_num_waiting: int | None = None
    num_speculative_tokens: int = 0
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    preempt_every: int | None = None
    hash_bits: int = 128

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_sequences", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, is {getattr(self, name)}")
        if self.prefill_chunk is not None and self.prefill_chunk < 1:
            raise ValueError(f"prefill_chunk must be at least 1, is {self.prefill_chunk}")
        if self.max_num_waiting is not None and self.max_num_waiting < 1:
            raise ValueError(f"max_num_waiting must be at least 1, is {self.max_num_waiting}")
        if self.num_speculative_tokens < 0:
            raise ValueError(
                f"num_speculative_tokens must not be negative, is {self.num_speculative_tokens}"
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ValueError(
                "prompt_lookup_min must be at least 1 and at most prompt_lookup_max, is "
                f"{self.prompt_lookup_min} of {self.prompt_lookup_max}"
            )
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be in [0, 1), is {self.watermark}")
        if self.copy_bytes_per_s <= 0.0 or self.prefill_tokens_per_s <= 0.0:
            raise ValueError("copy_bytes_per_s and prefill_tokens_per_s must be positive")
        if not 1 <= self.hash_bits <= 128:
            raise ValueError(f"hash_bits must be in [1, 128], is {self.hash_bits}")
