"""`transformers` on the workloads of the benchmarks, in this process: a static batch, or batched as
requests come and go."""

import time
from pathlib import Path

import torch
from engine_workloads import Workload
from our_engine import Measured
from transformers import AutoModelForCausalLM, GenerationConfig

_NO_TOKEN = -1


class Transformers:
    """`generate` on the whole batch at once; every prompt of a workload has the same length."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def run(self, workload: Workload, prompts: list[list[int]]) -> Measured:
        batch = torch.tensor(prompts).repeat_interleave(workload.n, dim=0)
        began = time.perf_counter()
        self._generate(batch, 1)
        first_token_s = time.perf_counter() - began
        began = time.perf_counter()
        output = self._generate(batch, workload.num_output_tokens)
        seconds = time.perf_counter() - began
        rows = output[:, batch.shape[1] :].tolist()
        keys = ((row // workload.n, row % workload.n) for row in range(len(rows)))
        return Measured(seconds, first_token_s, dict(zip(keys, rows, strict=True)))

    @torch.inference_mode()
    def _generate(self, batch: torch.Tensor, num_tokens: int) -> torch.Tensor:
        return self._model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )


class ContinuousTransformers:
    """`generate_batch`: its own scheduler over its own paged cache."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def run(self, workload: Workload, prompts: list[list[int]]) -> Measured:
        inputs = [prompt for prompt in prompts for _ in range(workload.n)]
        settings = GenerationConfig(
            max_new_tokens=workload.num_output_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=_NO_TOKEN,
        )
        began = time.perf_counter()
        outputs = self._model.generate_batch(inputs, settings, record_timestamps=True)
        seconds = time.perf_counter() - began
        tokens = {
            (place // workload.n, place % workload.n): output.generated_tokens
            for place, output in enumerate(outputs.values())
        }
        assert len(tokens) == len(inputs), f"{len(inputs) - len(tokens)} requests did not end"
        first = min(output.timestamps[0] for output in outputs.values())
        return Measured(seconds, first - began, tokens)
