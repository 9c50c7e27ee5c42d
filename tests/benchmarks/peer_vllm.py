"""vLLM on the same workloads, in the interpreter that PEER_VLLM_PYTHON names; nothing otherwise.

Run as a script by that interpreter, this file reads the workloads from stdin and writes what it
measured to the file named in them. It imports nothing of ours there.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_workloads import Workload

BLOCK_SIZE = 32  # the smallest that its CPU kernels take
MAX_CONTEXT = 2048
MEMORY_SHARE = 0.6  # of all memory; it refuses to start where less is free
_PRELOADED = ("libtcmalloc_minimal.so.4", "libiomp5.so")  # as its guide for CPUs asks


@dataclass(frozen=True, slots=True)
class PeerRun:
    """Medians of one workload. tokens: generated ids by (prompt, sample), of the last run."""

    seconds: float
    first_token_s: float
    tokens: dict[tuple[int, int], list[int]]


def peer_python() -> str | None:
    """The interpreter that has vLLM."""
    return os.environ.get("PEER_VLLM_PYTHON")


def peer_environment() -> dict[str, str]:
    """All cores, no network, and what it wants preloaded, where the environment has it."""
    python = peer_python()
    folder = Path(python).parents[1] / "lib" if python else Path("/nowhere")
    preloaded = [str(folder / name) for name in _PRELOADED if (folder / name).exists()]
    # How our threads wait is not for its OpenMP runtime, which keeps its default.
    inherited = {name: value for name, value in os.environ.items() if "OMP_" not in name}
    return inherited | {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "LD_PRELOAD": ":".join(preloaded),
    }


def run_vllm(
    folder: Path,
    workloads: list["Workload"],
    prompts: dict[str, list[list[int]]],
    repeats: int,
    pool_tokens: int,
    dtype: str = "float32",
) -> dict[str, PeerRun]:
    """By workload; empty where there is no vLLM. One process for each pool and setting."""
    python = peer_python()
    if python is None:
        return {}
    groups: dict[tuple[int | None, bool], list[Workload]] = {}
    for workload in workloads:
        groups.setdefault((workload.pool_tokens, workload.prefix_caching), []).append(workload)
    runs: dict[str, PeerRun] = {}
    for group in groups.values():
        job = {
            "model": str(folder),
            "dtype": dtype,
            "repeats": repeats,
            "pool_tokens": (tokens := group[0].pool_tokens or pool_tokens),
            "pool_bytes": kv_bytes(folder, tokens, itemsize=2 if dtype == "bfloat16" else 4),
            "workloads": [asdict(workload) for workload in group],
            "prompts": {workload.name: prompts[workload.name] for workload in group},
        }
        runs |= _run_job(python, job)
    return runs


def kv_bytes(folder: Path, num_tokens: int, itemsize: int = 4) -> int:
    """What a pool of so many tokens takes, and the block that it never gives out."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    width = config["hidden_size"] // config["num_attention_heads"]
    width = (config.get("head_dim") or width) * config["num_key_value_heads"]
    return 2 * width * config["num_hidden_layers"] * itemsize * (num_tokens + BLOCK_SIZE)


def _run_job(python: str, job: dict[str, object]) -> dict[str, PeerRun]:
    """Nothing where it fails; why stands among its logs."""
    with tempfile.NamedTemporaryFile(suffix=".json") as results:
        ran = subprocess.run(
            [python, __file__],
            input=json.dumps(job | {"results": results.name}),
            text=True,
            check=False,
            stdout=sys.stderr,
            env=peer_environment(),
        )
        if ran.returncode != 0:
            print("vLLM failed; its logs above say why", file=sys.stderr)
            return {}
        found = json.loads(Path(results.name).read_text(encoding="utf-8"))
    return {
        name: PeerRun(
            run["seconds"],
            run["first_token_s"],
            {(prompt, sample): tokens for prompt, sample, tokens in run["tokens"]},
        )
        for name, run in found.items()
    }


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.load(sys.stdin)
    workloads = job["workloads"]
    llm = LLM(
        model=job["model"],
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=MAX_CONTEXT,
        block_size=BLOCK_SIZE,
        # the same number of tokens as our pool; without the bytes it takes what is free
        num_gpu_blocks_override=job["pool_tokens"] // BLOCK_SIZE + 1,
        kv_cache_memory_bytes=job["pool_bytes"],
        enable_prefix_caching=workloads[0]["prefix_caching"],
        gpu_memory_utilization=MEMORY_SHARE,
    )

    def run(workload: dict[str, object], max_tokens: int) -> tuple[float, list[object]]:
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        # It takes no greedy request of several samples: each is a request of its own.
        prompts = [
            {"prompt_token_ids": ids}
            for ids in job["prompts"][workload["name"]]
            for _ in range(workload["n"])
        ]
        llm.reset_prefix_cache()
        began = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - began, outputs

    found: dict[str, dict[str, object]] = {}
    run(workloads[0], 2)  # warm-up
    for workload in workloads:
        times, firsts, outputs = [], [], []
        for _ in range(job["repeats"]):
            if workload["num_prompts"] == 1:
                firsts.append(run(workload, 1)[0])
            seconds, outputs = run(workload, workload["num_output_tokens"])
            times.append(seconds)
        found[workload["name"]] = {
            "seconds": statistics.median(times),
            "first_token_s": statistics.median(firsts) if firsts else 0.0,
            "tokens": [
                (*divmod(place, workload["n"]), list(output.outputs[0].token_ids))
                for place, output in enumerate(outputs)
            ],
        }
    Path(job["results"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
