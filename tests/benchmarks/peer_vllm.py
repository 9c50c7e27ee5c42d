"""vLLM on the same workloads, in the interpreter that PEER_VLLM_PYTHON names; nothing otherwise.

Run as a script by that interpreter, this file reads the workloads from stdin and writes seconds
to the file named in them. It imports nothing of ours there.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_workloads import Workload

BLOCK_SIZE = 32  # the smallest that its CPU kernels take


def run_vllm(
    folder: Path, workloads: list["Workload"], prompts: dict[str, list[list[int]]], repeats: int
) -> dict[str, float]:
    """Median seconds by workload; empty where there is no vLLM. One process a pool and setting."""
    python = os.environ.get("PEER_VLLM_PYTHON")
    if not python:
        return {}
    groups: dict[tuple[int | None, bool], list[Workload]] = {}
    for workload in workloads:
        groups.setdefault((workload.pool_tokens, workload.prefix_caching), []).append(workload)
    seconds: dict[str, float] = {}
    for group in groups.values():
        job = {
            "model": str(folder),
            "repeats": repeats,
            "workloads": [asdict(workload) for workload in group],
            "prompts": {workload.name: prompts[workload.name] for workload in group},
        }
        seconds |= _run_job(python, job)
    return seconds


def _run_job(python: str, job: dict[str, object]) -> dict[str, float]:
    settings = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with tempfile.NamedTemporaryFile(suffix=".json") as results:
        subprocess.run(
            [python, __file__],
            input=json.dumps(job | {"results": results.name}),
            text=True,
            check=True,
            env=os.environ | settings,
        )
        return json.loads(Path(results.name).read_text(encoding="utf-8"))


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.load(sys.stdin)
    workloads = job["workloads"]
    # Blocks of all, not bytes: the same number of tokens as our pool.
    pool_tokens = workloads[0]["pool_tokens"] or 32 * 1024
    llm = LLM(
        model=job["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=pool_tokens // BLOCK_SIZE,
        enable_prefix_caching=workloads[0]["prefix_caching"],
    )
    seconds: dict[str, float] = {}
    for workload in workloads:
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=workload["num_output_tokens"],
            n=workload["n"],
            ignore_eos=True,
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"][workload["name"]]]
        llm.generate(prompts[:1], sampling, use_tqdm=False)  # warm-up
        times: list[float] = []
        for _ in range(job["repeats"]):
            llm.reset_prefix_cache()
            began = time.perf_counter()
            llm.generate(prompts, sampling, use_tqdm=False)
            times.append(time.perf_counter() - began)
        seconds[workload["name"]] = statistics.median(times)
    Path(job["results"]).write_text(json.dumps(seconds), encoding="utf-8")


if __name__ == "__main__":
    main()
