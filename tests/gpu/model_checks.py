"""(b) Greedy tokens of whole models against transformers; (c) answers and bytes under swapping."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from model_driver import GREEDY, make_request, random_prompt, serve
from torch import Tensor

from pagefleet.scheduler.config import PreemptionMode
from pagefleet.scheduler.output import CopyJob, CopyKind
from pagefleet.workers.block_storage import BlockStorage
from pagefleet.workers.config import WorkerConfig
from pagefleet.workers.model_runner import ModelRunner

from .clock import Finding

# Of the best logit: two bfloat16 computations of the same sum differ by some of their last bits.
NEAR_TIE = 0.03


def load(folder: Path, device: torch.device, **settings: object) -> ModelRunner:
    fields = {"max_num_sequences": 32, "max_num_batched_tokens": 2048, "max_context": 2048}
    config = WorkerConfig(str(folder), device=device.type, **(fields | settings))  # pyright: ignore
    return ModelRunner.load(config)


def greedy_answers(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[list[int]]:
    """All prompts together."""
    sampling = replace(GREEDY, max_tokens=max_tokens)
    requests = [make_request(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]
    answers = serve(runner, requests, max_num_batched_tokens=2048)
    return [answers[str(index), 0].token_ids for index in range(len(prompts))]


def compare_with_transformers(
    folder: Path,
    device: torch.device,
    vocab_size: int,
    name: str,
    max_tokens: int,
    **settings: object,
) -> list[Finding]:
    """Each of our tokens has to be transformers' best behind the same tokens, or as good as."""
    prompts = [random_prompt(length, vocab_size, seed=length) for length in (5, 130, 17, 64)]
    runner = load(folder, device, **settings)
    kernels = runner.decoder.backend.name
    answers = greedy_answers(runner, prompts, max_tokens)
    again = greedy_answers(runner, prompts, max_tokens)
    runner.close()
    del runner
    free(device)
    best, near = _judge(folder, device, prompts, answers)
    case = f"{name}, {kernels}: tokens "
    pairs = zip(answers, again, strict=True)
    same = np.mean([a == b for pair in pairs for a, b in zip(*pair, strict=True)])
    return [
        Finding("models", case + "that are transformers' best, or tied", near, "share", 0.99),
        Finding("models", case + "that are transformers' best", best, "share"),
        Finding("models", case + "repeated over cached prefixes", float(same), "share"),
    ]


@torch.inference_mode()
def _judge(
    folder: Path,
    device: torch.device,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
) -> tuple[float, float]:
    """Shares of our tokens that are transformers' best, and that are within a near tie of it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device).eval()
    best, near = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor([[*prompt, *answer]], device=device)
        logits: Tensor = model(tokens).logits[0, len(prompt) - 1 : -1].float()
        ours = logits.gather(1, torch.tensor(answer, device=device).unsqueeze(1)).squeeze(1)
        most = logits.amax(-1)
        best.append((ours >= most).float().mean())
        near.append((most - ours <= NEAR_TIE * most.abs()).float().mean())
    del model
    free(device)
    return float(torch.stack(best).mean()), float(torch.stack(near).mean())


def check_swapping(folder: Path, device: torch.device, vocab_size: int) -> list[Finding]:
    """Sequences that leave for the host every few steps say what they say undisturbed."""
    block_bytes = 2**21
    runner = load(
        folder,
        device,
        deterministic=True,
        num_blocks=128,
        host_memory=256 * block_bytes,
        dtype="float32",
    )
    prompts = [random_prompt(60 + 7 * i, vocab_size, seed=i) for i in range(8)]
    sampling = replace(GREEDY, max_tokens=48)
    requests = [make_request(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]
    undisturbed = serve(runner, requests)
    swapped = serve(
        runner,
        requests,
        num_blocks=40,
        num_host_blocks=min(64, runner.num_host_blocks),
        preemption_mode=PreemptionMode.SWAP,
        preempt_every=3,
    )
    equal = [undisturbed[key].token_ids == swapped[key].token_ids for key in undisturbed]
    usages = [answer.usage for answer in swapped.values()]
    preemptions = sum(usage.preemptions for usage in usages if usage is not None)
    equal_bytes = _round_trip(runner.storage)
    findings = [
        Finding("swaps", "answers equal under swapping", float(np.mean(equal)), "share", 1.0),
        Finding("swaps", "preemptions meanwhile", preemptions, "times", 1.0),
        Finding("swaps", "bytes equal after a round trip", equal_bytes, "share", 1.0),
    ]
    runner.close()
    return findings


def _round_trip(storage: BlockStorage) -> float:
    """Out, spoilt and in again to other places, while the step's stream writes elsewhere."""
    count = min(storage.num_blocks // 4, storage.num_host_blocks)
    rng = np.random.default_rng(0)
    places = rng.permutation(storage.num_blocks).astype(np.int32)
    sources, targets, busy = places[:count], places[count : 2 * count], places[2 * count :]
    hosts = rng.permutation(storage.num_host_blocks)[:count].astype(np.int32)
    pool = storage.pool
    pool[torch.from_numpy(sources).long().to(pool.device)] = 0.25
    pool[int(sources[0])] = 0.5  # the last writes before the copy: they have to be seen
    expected = pool[torch.from_numpy(sources).long().to(pool.device)].clone()
    storage.submit((CopyJob(10_000, CopyKind.STORE, sources, hosts),))
    pool[torch.from_numpy(busy).long().to(pool.device)] = 1.0
    _wait(storage)
    pool[torch.from_numpy(sources).long().to(pool.device)] = -1.0
    storage.submit((CopyJob(10_001, CopyKind.LOAD, hosts, targets),))
    _wait(storage)
    found = pool[torch.from_numpy(targets).long().to(pool.device)]
    return float((found == expected).float().mean())


def _wait(storage: BlockStorage) -> None:
    while not storage.poll():
        pass


def free(device: torch.device) -> None:
    """Give back what torch keeps for later."""
    import gc

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
