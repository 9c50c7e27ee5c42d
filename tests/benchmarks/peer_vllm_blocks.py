"""The operations of `bench_block_pool` on vLLM's own pool, manager and scheduler.

Run by the interpreter that PEER_VLLM_PYTHON names; imports nothing of ours. For each line on stdin
it measures everything once and writes one line of JSON: operation → microseconds of CPU time.
"""

import gc
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 16
PROMPT = list(range(4096))
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
    "rms_norm_eps": 1e-5,
}


def cpu_us(action: Callable[[], object]) -> float:
    start = time.process_time_ns()
    action()
    return (time.process_time_ns() - start) / 1000


def kv_config(num_blocks: int) -> KVCacheConfig:
    spec = FullAttentionSpec(BLOCK_SIZE, num_kv_heads=4, head_size=16, dtype=torch.float32)
    return KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])


def make_manager(num_blocks: int, caching: bool = True) -> KVCacheManager:
    return KVCacheManager(
        kv_config(num_blocks),
        max_model_len=8192,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        enable_caching=caching,
    )


class Peer:
    def __init__(self) -> None:
        has_xxhash = importlib.util.find_spec("xxhash") is not None
        self.hash_name = "xxhash" if has_xxhash else "sha256"  # its faster one where it can
        hash_fn = get_hash_fn_by_name(self.hash_name)
        init_none_hash(hash_fn)
        self.hasher = get_request_block_hasher(BLOCK_SIZE, hash_fn)
        self.number = 0
        folder = Path(tempfile.mkdtemp(prefix="peer-vllm-"))
        (folder / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
        self.model = ModelConfig(str(folder), skip_tokenizer_init=True, max_model_len=8192)

    def request(self, prompt: list[int], max_tokens: int = 16, hashed: bool = True) -> Request:
        self.number += 1
        params = SamplingParams(max_tokens=max_tokens)
        params.update_from_generation_config({}, eos_token_id=2)
        hasher = self.hasher if hashed else None
        return Request(f"r{self.number}", prompt, params, None, block_hasher=hasher)

    def hash(self) -> float:
        request = self.request(PROMPT, hashed=False)
        return cpu_us(lambda: [self.hasher(request) for _ in range(8)]) / 8 / 256

    def allocate_free(self, count: int) -> float:
        pool = BlockPool(20_000, True, BLOCK_SIZE)
        rounds = max(20, 8192 // count)

        def run() -> None:
            for _ in range(rounds):
                pool.free_blocks(pool.get_new_blocks(count))

        return cpu_us(run) / rounds / count

    def hit(self) -> tuple[float, float]:
        manager = make_manager(4000)
        first = self.request(PROMPT)
        manager.allocate_slots(first, len(PROMPT))
        manager.free(first)
        requests = [self.request(PROMPT) for _ in range(40)]
        lookup = cpu_us(lambda: [manager.get_computed_blocks(r) for r in requests]) / 40

        def run() -> None:
            for request in requests:
                blocks, count, *_ = manager.get_computed_blocks(request)
                manager.allocate_slots(request, len(PROMPT) - count, count, blocks)
                manager.free(request)

        return lookup, cpu_us(run) / 40

    def miss(self) -> float:
        manager = make_manager(4000)
        requests = [self.request([i, *PROMPT[1:64]]) for i in range(400)]
        return cpu_us(lambda: [manager.get_computed_blocks(r) for r in requests]) / 400

    def append(self) -> float:
        manager = make_manager(4000)
        request = self.request(PROMPT[:128], max_tokens=4000)
        manager.allocate_slots(request, 128)
        request.num_computed_tokens = 128
        total = 0.0
        for token in range(1600):
            request.append_output_token_ids(token)
            start = time.process_time_ns()
            manager.allocate_slots(request, 1)
            total += time.process_time_ns() - start
            request.num_computed_tokens += 1
        return total / 1000 / 1600

    def evict(self) -> float:
        manager = make_manager(100_001)
        for start in range(0, 100_000 * BLOCK_SIZE, 8000):
            request = self.request(list(range(start, start + 8000)))
            manager.allocate_slots(request, 8000)
            manager.free(request)
        pool = manager.block_pool
        return cpu_us(lambda: [pool.get_new_blocks(256) for _ in range(300)]) / 300 / 256

    def step(self, num_running: int) -> float:
        config = VllmConfig(
            model_config=self.model,
            cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_model_len=8192,
                is_encoder_decoder=False,
                max_num_seqs=num_running,
                max_num_batched_tokens=8192,
                async_scheduling=False,
            ),
        )
        config.cache_config.num_gpu_blocks = 20_000
        scheduler = Scheduler(
            config, kv_config(20_000), StructuredOutputManager(config), block_size=BLOCK_SIZE
        )
        for i in range(num_running):
            scheduler.add_request(self.request(list(range(i, i + 128 + i % 16)), 4000))
        gc.collect()
        gc.freeze()  # as its engine does once it has started
        times: list[float] = []
        while len(times) < 120:
            start = time.process_time_ns()
            output = scheduler.schedule()
            scheduled = time.process_time_ns() - start
            ids = list(output.num_scheduled_tokens)
            result = ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={name: i for i, name in enumerate(ids)},
                sampled_token_ids=[[7 + i] for i in range(len(ids))],
            )
            start = time.process_time_ns()
            scheduler.update_from_output(output, result)
            elapsed = scheduled + time.process_time_ns() - start
            if output.total_num_scheduled_tokens == num_running:
                times.append(elapsed / 1000)
        return sum(times[20:]) / len(times[20:])

    def measure(self) -> dict[str, float]:
        lookup, admit = self.hit()
        return {
            "block hash": self.hash(),
            "allocate and free 1": self.allocate_free(1),
            "allocate and free 16": self.allocate_free(16),
            "allocate and free 256": self.allocate_free(256),
            "hit 4096 lookup": lookup,
            "hit 4096 admit": admit,
            "lookup miss": self.miss(),
            "append one token": self.append(),
            "evict of 100000": self.evict(),
            "step of 32": self.step(32),
            "step of 128": self.step(128),
            "step of 256": self.step(256),
        }


def main() -> None:
    peer = Peer()
    answers = open(int(sys.argv[1]), "w", encoding="utf-8")  # noqa: SIM115 (stdout is vLLM's)
    for _ in sys.stdin:
        answers.write(json.dumps(peer.measure()) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
