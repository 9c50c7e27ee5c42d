"""What this machine could reach at best: how fast it reads and multiplies, measured in this run."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from engine_workloads import Workload
from transformers import LlamaConfig

_READ_BYTES = 1 << 29
_REPEATS = 9


@dataclass(frozen=True, slots=True)
class Machine:
    """bandwidth: bytes a second of a sequential sum. flops: a second, of a float32 product of 512
    rows."""

    bandwidth: float
    flops: float

    @classmethod
    def measure(cls) -> "Machine":
        """With as many threads as torch has here."""
        data = torch.ones(_READ_BYTES // 4)
        left, right = torch.randn(512, 2048), torch.randn(2048, 2048)
        read = [_seconds(data.sum) for _ in range(_REPEATS)]
        multiply = [_seconds(lambda: left @ right) for _ in range(_REPEATS)]
        num_flops = 2 * 512 * 2048 * 2048
        return cls(_READ_BYTES / statistics.median(read), num_flops / statistics.median(multiply))

    @classmethod
    def median(cls, machines: Sequence["Machine"]) -> "Machine":
        """One machine at several times."""
        return cls(
            statistics.median(machine.bandwidth for machine in machines),
            statistics.median(machine.flops for machine in machines),
        )

    def seconds(self, workload: Workload, model: LlamaConfig, weight_bytes: int = 4) -> float:
        """The time that its weights' bytes and its operations need, whichever is longer in the
        prefill and in each decode step. Reading the KV cache is not counted."""
        head_dim, width = model.head_dim, model.hidden_size
        kv_size = model.num_key_value_heads * head_dim
        q_size = model.num_attention_heads * head_dim
        layer = width * (2 * q_size + 2 * kv_size) + 3 * width * model.intermediate_size
        layers, head = model.num_hidden_layers * layer, model.vocab_size * width
        rows, length = workload.num_prompts * workload.n, workload.num_prompt_tokens
        own = length - workload.shared
        is_shared = workload.prefix_caching
        num_computed = workload.num_prompts * (own if is_shared else length)
        num_computed += workload.shared if is_shared else 0
        pair = 4 * q_size * model.num_hidden_layers  # of one query with one key and value
        prefill = 2 * layers * num_computed + 2 * head * workload.num_prompts
        prefill += pair * num_computed * (length + workload.shared * is_shared) // 2
        read_s = (layers + head) * weight_bytes / self.bandwidth
        context = length + workload.num_output_tokens / 2
        step_s = rows * (2 * (layers + head) + pair * context) / self.flops
        num_steps = workload.num_output_tokens - 1
        return max(prefill / self.flops, read_s) + num_steps * max(step_s, read_s)


def _seconds(call: object) -> float:
    began = time.perf_counter()
    call()  # pyright: ignore
    return time.perf_counter() - began
