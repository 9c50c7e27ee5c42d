"""Every model family against transformers: logits, and greedy tokens through cache, chunks and
preemption."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_driver import (
    GREEDY,
    Answer,
    all_logits,
    load_runner,
    make_request,
    random_prompt,
    serve,
)
from model_families import CONFIGS, ORIGINAL_LENGTH, VOCAB_SIZE, load_reference, make_checkpoint
from transformers import PreTrainedModel

from pagefleet.scheduler.config import PreemptionMode
from pagefleet.workers.config import WorkerConfig
from pagefleet.workers.model_runner import ModelRunner
from pagefleet.workers.models.config import ModelError, UnsupportedModel
from pagefleet.workers.models.families import read_config

NEAR_TIE = 1e-4
# Longer than Phi-3's original length: transformers chooses its factors by each prompt's length,
# a replica once by its longest context.
LENGTHS = (70, 90)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's checkpoint, made once."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = make_checkpoint(tmp_path_factory.mktemp(family), family)
        return made[family]

    return make


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, prompts: list[list[int]]) -> list[torch.Tensor]:
    return [model(torch.tensor([prompt])).logits[0] for prompt in prompts]


def assert_equal_logits(folder: Path, chunks: tuple[int, ...], **settings: object) -> None:
    prompts = [random_prompt(length, VOCAB_SIZE, length) for length in LENGTHS]
    expected = reference_logits(load_reference(folder), prompts)
    runner = load_runner(folder, **settings)
    for chunk in chunks:
        for found, wanted in zip(all_logits(runner, prompts, chunk), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-4)
    runner.close()


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_equal_transformers(folder_of: Callable[[str], Path], family: str) -> None:
    assert_equal_logits(folder_of(family), (16, 90))


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_equal_transformers_in_any_chunks(
    folder_of: Callable[[str], Path], family: str, deterministic: bool, kernels: str
) -> None:
    settings = {"deterministic": deterministic, "block_size": 5}
    assert_equal_logits(folder_of(family), (1, 7, 64), **settings)


@torch.inference_mode()
def assert_greedy(model: PreTrainedModel, prompt: list[int], answer: Answer) -> None:
    """Every token is transformers' best after the tokens before it, near ties apart."""
    tokens = [*prompt, *answer.token_ids]
    logits = model(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer.token_ids).unsqueeze(1)).flatten()
    behind = logits.amax(-1) - chosen
    assert (behind <= NEAR_TIE).all(), f"token {int(behind.argmax())} is behind by {behind.max()}"


def check_answers(folder: Path, num_tokens: int, num_blocks: int, mode: PreemptionMode) -> None:
    """Four requests in a pool for two or three; two share a beginning, one hits all of another's
    prompt."""
    shared = random_prompt(64, VOCAB_SIZE, 3)
    prompts = {
        "first": [*shared, 5, 6],
        "hit": [*shared, 7, 8, 9],
        "same": [*shared, 5, 6],
        "other": random_prompt(75, VOCAB_SIZE, 4),
    }
    runner = load_runner(folder, host_memory=2**21)
    sampling = replace(GREEDY, max_tokens=num_tokens)
    answers = serve(
        runner,
        [make_request(key, prompt, sampling) for key, prompt in prompts.items()],
        num_blocks=num_blocks,
        num_host_blocks=40 if mode is PreemptionMode.SWAP else 0,
        prefill_chunk=23,
        preemption_mode=mode,
    )
    runner.close()
    usages = [answer.usage for answer in answers.values() if answer.usage]
    assert sum(usage.preemptions for usage in usages) > 0
    assert sum(usage.cached_tokens for usage in usages) > 0
    model = load_reference(folder)
    for key, prompt in prompts.items():
        answer = answers[key, 0]
        assert len(answer.token_ids) == num_tokens
        assert_greedy(model, prompt, answer)


@pytest.mark.parametrize("family", ["gemma3", "phi3", "qwen3-moe"])
def test_answers_equal_transformers(folder_of: Callable[[str], Path], family: str) -> None:
    check_answers(folder_of(family), 24, 13, PreemptionMode.SWAP)


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_128_tokens_equal_transformers(folder_of: Callable[[str], Path], family: str) -> None:
    check_answers(folder_of(family), 128, 13, PreemptionMode.SWAP)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "smollm3", "mixtral"])
def test_128_tokens_equal_transformers_when_computed_again(
    folder_of: Callable[[str], Path], family: str
) -> None:
    check_answers(folder_of(family), 128, 13, PreemptionMode.RECOMPUTE)


@pytest.mark.parametrize("length", [ORIGINAL_LENGTH, ORIGINAL_LENGTH + 1])
def test_longrope_follows_the_longest_context(
    folder_of: Callable[[str], Path], length: int
) -> None:
    folder = folder_of("phi3")
    prompt = random_prompt(length, VOCAB_SIZE)
    expected = reference_logits(load_reference(folder), [prompt])[0]
    found = all_logits(load_runner(folder, max_context=length), [prompt], 30)[0]
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-4)


def change_config(folder: Path, changes: dict[str, object]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# Fields that are not written where they have the family's own default.
LEFT_OUT = {
    "gemma2": ("hidden_activation", "tie_word_embeddings", "rms_norm_eps"),
    "gemma3_text": ("hidden_activation", "tie_word_embeddings", "rms_norm_eps"),
    "mixtral": ("rms_norm_eps", "tie_word_embeddings"),
    "phi3": ("rms_norm_eps",),
    "olmoe": ("rms_norm_eps",),
}


def as_before_transformers_5(config: dict[str, object]) -> dict[str, object]:
    """The same model in the words of older files: flat rotary fields, defaults left out."""
    old = {name: value for name, value in config.items() if name != "rope_parameters"}
    rope = config["rope_parameters"]
    if "full_attention" in rope:
        full = rope["full_attention"]
        old["rope_theta"] = full["rope_theta"]
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        old["rope_scaling"] = {"rope_type": "linear", "factor": full["factor"]}
    else:
        old["rope_theta"] = rope["rope_theta"]
        old["partial_rotary_factor"] = rope.get("partial_rotary_factor", 1.0)
    if rope.get("rope_type") == "longrope":
        factors = {name: rope[name] for name in ("short_factor", "long_factor")}
        old["rope_scaling"] = {"type": "su", **factors}
    for name in LEFT_OUT.get(str(config["model_type"]), ()):
        del old[name]
    return old


@pytest.mark.parametrize("family", CONFIGS)
def test_older_files_mean_the_same(
    folder_of: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    config = json.loads((folder_of(family) / "config.json").read_text())
    for name, values in (("new", config), ("old", as_before_transformers_5(config))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(values))
    assert read_config(tmp_path / "old") == read_config(tmp_path / "new")


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"layer_types": ["sliding_attention", "chunked_attention"]}, "'chunked_att"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation 'relu'"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"layer_types": ["full_attention"]}, "layer_types .* a list of 3 names"),
        ("phi3", {"rope_parameters": {"type": "su", "short_factor": [1.0]}}, "short_factor"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok is 6, not at most the 5"),
        ("olmoe", {"num_experts": 5}, r"gate.weight has shape \[6, 64\].* for \[5, 64\]"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_named(
    tmp_path: Path, family: str, changes: dict[str, object], message: str
) -> None:
    folder = make_checkpoint(tmp_path, family)
    change_config(folder, changes)
    with pytest.raises(ModelError, match=message):
        load_runner(folder)


def test_other_architectures_are_refused_with_those_that_are_served(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "granite")
    change_config(folder, {"architectures": ["Qwen2MoeForCausalLM"]})
    with pytest.raises(UnsupportedModel, match=r"'Qwen2MoeForCausalLM'.*Qwen3MoeForCausalLM"):
        load_runner(folder)


def test_progress_ends_when_all_is_read(folder_of: Callable[[str], Path]) -> None:
    told: list[tuple[int, int]] = []
    config = WorkerConfig(model=str(folder_of("mixtral")), num_blocks=4)
    ModelRunner.load(config, progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] > 20


@pytest.mark.parametrize("family", CONFIGS)
def test_bfloat16_is_near_float32(folder_of: Callable[[str], Path], family: str) -> None:
    prompts = [random_prompt(40, VOCAB_SIZE)]
    wide = all_logits(load_runner(folder_of(family)), prompts, 40)[0]
    narrow = all_logits(load_runner(folder_of(family), dtype="bfloat16"), prompts, 40)[0]
    assert narrow.dtype == torch.float32
    assert (wide - narrow).square().mean() < 0.01 * wide.square().mean()


@pytest.mark.parametrize("family", ["gemma2", "phi3", "qwen3-moe"])
def test_deterministic_logits_depend_on_neither_batch_nor_chunk(
    folder_of: Callable[[str], Path], family: str, kernels: str
) -> None:
    runner = load_runner(folder_of(family), deterministic=True)
    prompts = [random_prompt(length, VOCAB_SIZE, length) for length in (90, 33)]
    expected = [all_logits(runner, [prompt], 90)[0] for prompt in prompts]
    for chunk in (7, 64):
        together = all_logits(runner, prompts, chunk, seed=chunk)
        for found, wanted in zip(together, expected, strict=True):
            assert torch.equal(found, wanted), f"chunks of {chunk} change logits"
