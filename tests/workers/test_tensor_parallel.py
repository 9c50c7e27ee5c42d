"""A model cut over ranks says what the whole model says."""

import signal
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import model_ranks as programs
import pytest
import torch
from factories import LlamaShape, convert_stories260k, find_stories260k, make_llama
from model_driver import GREEDY, Answer, Guesses, load_runner, make_request, random_prompt, serve
from rank_processes import Died, RankProcesses
from transformers import AutoModelForCausalLM

from pagefleet.kernels import cpu_library
from pagefleet.protos.messages import SamplingParams
from pagefleet.scheduler.config import PreemptionMode
from pagefleet.workers import shared_memory_group
from pagefleet.workers.faults import Faults
from pagefleet.workers.models.config import UnsupportedModel

pytestmark = pytest.mark.skipif(
    not shared_memory_group.is_available(), reason="the compiled collectives are missing"
)
KERNELS = "cpu" if cpu_library.is_available() else "reference"
SHAPES = {
    "even": LlamaShape(num_heads=8, num_kv_heads=4, head_dim=8, vocab_size=133),
    "tied-9-3": LlamaShape(num_heads=9, num_kv_heads=3, head_dim=16, hidden_size=72, tied=True),
    "shared-kv": LlamaShape(num_heads=8, num_kv_heads=1, intermediate_size=99, vocab_size=130),
    "biases": LlamaShape(num_kv_heads=4, attention_bias=True, mlp_bias=True),
}


BEAMS = SamplingParams(temperature=0.0, beam_width=3, n=3, max_tokens=12)


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    started = RankProcesses()
    yield started
    started.close()


@pytest.fixture
def name() -> str:
    return uuid4().hex


@torch.inference_mode()
def transformers_logits(folder: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return [model(torch.tensor([prompt])).logits[0] for prompt in prompts]


def leaders(results: list[object]) -> object:
    for result in results:
        assert not isinstance(result, Exception | Died), results
    return results[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kernels", dict.fromkeys(["reference", KERNELS]))
def test_logits_equal_transformers(
    processes: RankProcesses,
    name: str,
    tmp_path: Path,
    shape: str,
    world_size: int,
    kernels: str,
) -> None:
    folder = make_llama(tmp_path / "model", SHAPES[shape])
    prompts = [random_prompt(length, SHAPES[shape].vocab_size, length) for length in (1, 17, 60)]
    expected = transformers_logits(folder, prompts)
    program = (programs.logits_of, world_size, folder, name, kernels, prompts, (7, 60))
    for logits in leaders(processes.run(*program)):
        for found, wanted in zip(logits, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-4)


def test_logits_of_a_trained_model_equal_transformers(
    processes: RankProcesses, name: str, tmp_path: Path
) -> None:
    source = find_stories260k()
    if source is None:
        pytest.skip("stories260K is not on this machine")
    folder = convert_stories260k(source, tmp_path / "stories")
    prompts = [[1, *random_prompt(50, 512, 3)]]
    expected = transformers_logits(folder, prompts)
    program = (programs.logits_of, 4, folder, name, KERNELS, prompts, (64,))
    torch.testing.assert_close(
        leaders(processes.run(*program))[0][0], expected[0], rtol=0.0, atol=1e-4
    )


def test_faults_and_guesses_on_every_rank_change_no_answer(
    processes: RankProcesses, name: str, tmp_path: Path
) -> None:
    folder = make_llama(tmp_path / "model", num_heads=8, num_kv_heads=4, head_dim=8)
    requests = [make_request(str(i), random_prompt(9 + i, 131, i), GREEDY) for i in range(4)]
    requests.append(make_request("beams", random_prompt(21, 131, 9), BEAMS))
    faults = Faults(preempt_every=4, late_copies=True, nan_fill=True, guard_block=True)
    settings = {"host_memory": 2**19, "block_size": 4, "faults": faults}
    swapping: dict[str, object] = {
        "num_blocks": 40,
        "num_host_blocks": 60,
        "preemption_mode": PreemptionMode.SWAP,
    }
    program = (programs.answers_to, 2, folder, name, KERNELS, requests, settings, swapping)
    plain = serve(load_runner(folder, block_size=4), requests)
    swapping["guesses"] = Guesses(plain, 0.7)
    found = leaders(processes.run(*program))
    assert tokens(found) == tokens(plain)
    assert sum(answer.usage.preemptions for answer in found.values()) > 0


def tokens(answers: dict[tuple[str, int], Answer]) -> dict[tuple[str, int], list[int]]:
    return {key: answer.token_ids for key, answer in answers.items()}


@pytest.mark.parametrize("world_size", [2, 4])
def test_answers_equal_one_ranks(
    processes: RankProcesses, name: str, tmp_path: Path, world_size: int
) -> None:
    """Greedy and drawn tokens, beams, logprobs, prefix hits, a shared prompt, preemption."""
    folder = make_llama(tmp_path / "model", num_heads=8, num_kv_heads=4, head_dim=8)
    long = random_prompt(70, 131, 5)
    drawn = SamplingParams(temperature=0.8, seed=7, max_tokens=24, ignore_eos=True, logprobs=2)
    greedy = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
    asked = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, prompt_logprobs=1)
    requests = [
        make_request("greedy", long, greedy),
        make_request("hit", [*long[:48], 3, 4, 5]),
        make_request("drawn", random_prompt(20, 131, 6), drawn, n=3),
        make_request("prompt", random_prompt(33, 131, 8), asked),
        make_request("beams", random_prompt(21, 131, 9), BEAMS),
    ]
    settings = {"num_blocks": 18, "prefill_chunk": 16}
    program = (programs.answers_to, world_size, folder, name, KERNELS, requests, {}, settings)
    found = leaders(processes.run(*program))
    expected = serve(load_runner(folder), requests, **settings)
    assert tokens(found) == tokens(expected)
    for key, answer in expected.items():
        assert found[key].finish_reason is answer.finish_reason
        for one, other in zip(found[key].logprobs, answer.logprobs, strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        for one, other in zip(found[key].prompt_logprobs, answer.prompt_logprobs, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_swapped_blocks_come_back_on_every_rank(
    processes: RankProcesses, name: str, tmp_path: Path
) -> None:
    folder = make_llama(tmp_path / "model", num_heads=9, num_kv_heads=3, hidden_size=72)
    requests = [make_request(str(i), random_prompt(40, 131, i)) for i in range(6)]
    swapping = {
        "num_blocks": 14,
        "num_host_blocks": 40,
        "preemption_mode": PreemptionMode.SWAP,
    }
    memory = {"host_memory": 4 * 2**20}
    program = (programs.answers_to, 2, folder, name, KERNELS, requests, memory, swapping)
    found = leaders(processes.run(*program))
    assert tokens(found) == tokens(serve(load_runner(folder), requests))
    assert sum(answer.usage.preemptions for answer in found.values()) > 0


def test_ranks_without_shared_memory_answer_the_same(
    processes: RankProcesses, name: str, tmp_path: Path
) -> None:
    folder = make_llama(tmp_path / "model", num_heads=9, num_kv_heads=3, hidden_size=72)
    requests = [make_request(str(i), random_prompt(20, 131, i)) for i in range(3)]
    settings = {"port_file": str(tmp_path / "port")}
    program = (programs.answers_to, 2, folder, name, KERNELS, requests, settings, {})
    found = leaders(processes.run(*program))
    assert tokens(found) == tokens(serve(load_runner(folder), requests))


def test_all_ranks_take_the_smallest_pool(
    processes: RankProcesses, name: str, tmp_path: Path
) -> None:
    folder = make_llama(tmp_path / "model", num_heads=9, num_kv_heads=3, hidden_size=72)
    by_rank = [
        {"num_blocks": 50, "host_memory": 2**20},
        {"num_blocks": 31, "host_memory": 2**18},
        {"num_blocks": 40, "host_memory": 2**20},
    ]
    results = processes.run(programs.pool_sizes, 3, folder, name, by_rank)
    assert [(blocks, host) for blocks, host, _ in results] == [(31, 2**18 // 4096)] * 3


def test_a_rank_with_more_heads_takes_more_memory(
    processes: RankProcesses, name: str, tmp_path: Path
) -> None:
    folder = make_llama(tmp_path / "model", num_heads=9, num_kv_heads=3, hidden_size=72)
    results = processes.run(programs.pool_sizes, 2, folder, name, [{"num_blocks": 8}] * 2)
    assert results[0][2] == 2 * results[1][2]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_ends_the_steps_on_all(
    processes: RankProcesses, name: str, tmp_path: Path, victim: int
) -> None:
    folder = make_llama(tmp_path / "model", num_heads=8, num_kv_heads=4, head_dim=8)
    requests = [make_request("long", random_prompt(9, 131, 1), GREEDY)]
    results = processes.run(programs.serve_until_killed, 3, folder, name, victim, requests)
    for rank, result in enumerate(results):
        if rank == victim:
            assert result == Died(-signal.SIGKILL)
        else:
            error_name, elapsed_s = result
            assert error_name in ("RankLost", "GroupAborted") and elapsed_s < 5.0


def test_a_model_that_cannot_be_cut_is_refused_by_every_rank(
    processes: RankProcesses, name: str, tmp_path: Path
) -> None:
    folder = make_llama(tmp_path / "model", num_heads=2, num_kv_heads=2, head_dim=8)
    results = processes.run(programs.logits_of, 3, folder, name, "reference", [[1]], (1,))
    assert any(isinstance(result, UnsupportedModel) for result in results)
    assert all(isinstance(result, Exception) for result in results)


@pytest.mark.slow
def test_loading_takes_little_more_than_the_shard(
    processes: RankProcesses, name: str, tmp_path: Path
) -> None:
    folder = make_llama(
        tmp_path / "model",
        hidden_size=512,
        intermediate_size=1536,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        num_layers=24,
        vocab_size=4096,
    )
    for shard, most in processes.run(programs.load_and_weigh, 2, folder, name, KERNELS):
        print(f"shard {shard / 2**20:.0f} MiB, most {most / 2**20:.0f} MiB")
        assert most <= 1.1 * shard
