"""The workloads of `bench_engine.py`: token ids and lengths, the same for every engine."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts that start together. n: samples of each. shared: their common prefix, in tokens.

    pool_tokens: size of the KV pool; None = large. same_as: the workload with the same prompts,
    which comes before it: an engine without a pool or a prefix cache cannot tell them apart.
    """

    name: str
    num_prompts: int
    num_prompt_tokens: int
    num_output_tokens: int
    n: int = 1
    shared: int = 0
    prefix_caching: bool = True
    pool_tokens: int | None = None
    same_as: str | None = None

    @property
    def num_generated(self) -> int:
        return self.num_prompts * self.n * self.num_output_tokens

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random ids, clear of the first few, where special tokens stand."""
        generator = np.random.default_rng(sum(map(ord, self.same_as or self.name)))
        low = min(16, vocab_size // 2)
        shared = generator.integers(low, vocab_size, self.shared)
        own = (self.num_prompts, self.num_prompt_tokens - self.shared)
        return [
            [*shared.tolist(), *row.tolist()] for row in generator.integers(low, vocab_size, own)
        ]


WORKLOADS = (
    Workload("single", 1, 128, 64),
    Workload("batch32", 32, 128, 64),
    Workload("batch8long", 8, 1024, 64),
    Workload("prefix32", 32, 544, 32, shared=512),
    Workload("prefix32-off", 32, 544, 32, shared=512, prefix_caching=False, same_as="prefix32"),
    Workload("nsample", 8, 128, 64, n=4),
    Workload("loose", 16, 256, 128),
    Workload("tight", 16, 256, 128, pool_tokens=3072, same_as="loose"),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama-architecture model with random weights."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int


SHAPES = {
    "4x256": Shape(4, 256, 4, 2, 64, 1024, 8192),
    "smollm2": Shape(30, 576, 9, 3, 64, 1536, 49152),
    "qwen3-0.6b": Shape(28, 1024, 16, 8, 128, 3072, 151936),
}
