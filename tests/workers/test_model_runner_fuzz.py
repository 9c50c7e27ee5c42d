"""Random requests, pools and preemptions: each sample says what it says alone.

Scheduler, input batch, kernels, sampler and copies together, in deterministic mode. Reads
FUZZ_SEED and FUZZ_STEPS (rounds).
"""

import os
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
from factories import make_llama
from model_driver import (
    IDENTITY,
    Answer,
    Guesses,
    Steps,
    collect,
    load_runner,
    make_request,
    random_prompt,
)

from pagefleet.protos.messages import EngineRequest, FinishReason, SamplingParams
from pagefleet.scheduler.config import PreemptionMode, SchedulerConfig
from pagefleet.scheduler.scheduler import Scheduler
from pagefleet.workers.model_runner import ModelRunner

SEED = int(os.environ.get("FUZZ_SEED", "0"))
ROUNDS = int(os.environ.get("FUZZ_STEPS", "3"))
VOCAB = 131
LONGEST = 150  # prompt and output


def random_sampling(choose: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=choose.randint(1, 40),
        min_tokens=choose.choice([0, 0, 3]),
        temperature=choose.choice([0.0, 0.5, 1.0, 1.5]),
        top_k=choose.choice([0, 0, 1, 5, 200]),
        top_p=choose.choice([1.0, 0.9, 0.3]),
        min_p=choose.choice([0.0, 0.0, 0.1]),
        seed=choose.getrandbits(64),
        stop_token_ids=tuple(choose.sample(range(VOCAB), choose.choice([0, 0, 4]))),
        ignore_eos=choose.random() < 0.5,
        repetition_penalty=choose.choice([1.0, 1.0, 1.2]),
        presence_penalty=choose.choice([0.0, 0.0, 0.7]),
        frequency_penalty=choose.choice([0.0, 0.0, -0.4]),
        logit_bias=choose.choice([(), ((7, 3.0), (9, -50.0))]),
        logprobs=choose.choice([None, None, 0, 4]),
        prompt_logprobs=choose.choice([None, None, None, 1]),
    )


def random_requests(choose: random.Random, count: int) -> list[EngineRequest]:
    """Some share a beginning, some are forked into several samples."""
    beginnings = [random_prompt(length, VOCAB, length) for length in (0, 16, 40, 64)]
    requests: list[EngineRequest] = []
    for number in range(count):
        own = random_prompt(choose.randint(1, 40), VOCAB, choose.getrandbits(30))
        prompt = choose.choice(beginnings) + own
        n = choose.choice([1, 1, 1, 3])
        requests.append(make_request(f"r{number}", prompt, random_sampling(choose), n))
    return requests


def random_config(choose: random.Random, runner: ModelRunner) -> SchedulerConfig:
    mode = choose.choice(list(PreemptionMode))
    return replace(
        runner.config.scheduler_config(
            choose.choice([12, 20, 40, runner.num_blocks]),
            choose.choice([0, 8, runner.num_host_blocks]),
            LONGEST,
        ),
        block_bytes=runner.storage.layout.num_bytes,
        prefill_chunk=choose.choice([None, 1, 7, 16]),
        max_num_batched_tokens=choose.choice([16, 64, 512]),
        max_num_sequences=choose.choice([3, 8, 16]),
        enable_prefix_caching=choose.random() < 0.7,
        preemption_mode=mode,
        preempt_every=choose.choice([None, 5]),
        num_speculative_tokens=choose.choice([0, 1, 4]),
    )


def run(
    runner: ModelRunner,
    config: SchedulerConfig,
    requests: list[EngineRequest],
    choose: random.Random,
    cancel_rate: float = 0.02,
    guesses: Guesses | None = None,
    overlap: bool = False,
) -> tuple[dict[tuple[str, int], Answer], set[str]]:
    """Requests arrive between steps and some are cancelled; returns answers and who was."""
    scheduler = Scheduler(config, IDENTITY, runner.model_info.eos_token_ids)
    if guesses is not None and config.num_speculative_tokens:
        guesses.replace_in(scheduler)
    answers: dict[tuple[str, int], Answer] = {}
    cancelled: set[str] = set()
    waiting = list(requests)
    steps, deadline = Steps(runner, scheduler, overlap), time.monotonic() + 200.0
    while waiting or scheduler.has_unfinished():
        assert time.monotonic() < deadline, "the scheduler does not come to an end"
        while waiting and choose.random() < 0.4:
            scheduler.add_request(waiting.pop(0), float(steps.number))
        if choose.random() < cancel_rate:
            key = choose.choice(requests).request_key
            if scheduler.abort_request(key):
                cancelled.add(key)
        steps.step()
        collect(scheduler, answers)
    steps.finish()
    while True:
        device, host = scheduler.stats().device, scheduler.stats().host
        if device.referenced + device.fenced + host.referenced == 0:
            return answers, cancelled
        scheduler.copies_done(runner.poll_copies())
        assert time.monotonic() < deadline, f"blocks are left over: {device}, {host}"


@pytest.mark.slow
@pytest.mark.parametrize("round_number", range(ROUNDS))
def test_whatever_happens_each_sample_says_what_it_says_alone(
    round_number: int, tmp_path: Path
) -> None:
    choose = random.Random(SEED * 1000 + round_number)
    folder = make_llama(tmp_path / "model", num_heads=8, tied=choose.random() < 0.5)
    runner = load_runner(
        folder, num_blocks=128, host_memory=2**20, deterministic=True, max_context=LONGEST
    )
    requests = random_requests(choose, 40)
    loose = runner.config.scheduler_config(runner.num_blocks, 0, LONGEST)
    alone: dict[tuple[str, int], Answer] = {}
    for request in requests:
        for sample in request.samples:
            single = replace(request, samples=(sample,))
            alone |= run(runner, loose, [single], choose, cancel_rate=0.0)[0]
    for _ in range(6):
        config = random_config(choose, runner)
        guesses = Guesses(alone, 0.8, choose.getrandbits(30))
        overlap = choose.random() < 0.5
        answers, cancelled = run(runner, config, requests, choose, guesses=guesses, overlap=overlap)
        for key, expected in alone.items():
            if key[0] in cancelled:
                continue
            found = answers[key]
            assert found.finish_reason is not FinishReason.ERROR, f"{key}: {found.error}"
            if found.finish_reason is FinishReason.KV_EXHAUSTED:
                assert found.token_ids == expected.token_ids[: len(found.token_ids)]
                continue
            assert found.token_ids == expected.token_ids, f"{key} with {config}"
            assert found.logprobs == expected.logprobs, f"{key} with {config}"
            if key[1] == 0:
                assert found.prompt_logprobs == expected.prompt_logprobs, f"{key} with {config}"
