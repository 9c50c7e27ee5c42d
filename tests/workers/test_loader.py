"""Checkpoints as users have them: sharded, half-width, damaged, and not supported."""

import json
import time
from pathlib import Path

import pytest
import torch
from factories import LlamaShape, llama_tensors, make_llama
from model_driver import all_logits, load_runner, random_prompt
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from pagefleet.workers import loader
from pagefleet.workers.loader import Checkpoint, CheckpointError, resolve_folder
from pagefleet.workers.models.config import ModelError, UnsupportedModel

SHAPE = LlamaShape()


def shard(folder: Path, num_shards: int) -> None:
    """Spread model.safetensors over several files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for number in range(num_shards):
        name = f"model-{number + 1:05}-of-{num_shards:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[number::num_shards]}
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_shards_and_one_file_are_the_same_model(tmp_path: Path) -> None:
    whole, parts = make_llama(tmp_path / "whole"), make_llama(tmp_path / "parts")
    shard(parts, 3)
    prompts = [random_prompt(20, SHAPE.vocab_size)]
    first, second = (load_runner(folder) for folder in (whole, parts))
    assert torch.equal(all_logits(first, prompts, 20)[0], all_logits(second, prompts, 20)[0])
    assert first.model_info.fingerprint == second.model_info.fingerprint


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_half_width_weights_are_served_in_float32_on_the_cpu(
    tmp_path: Path, stored: torch.dtype
) -> None:
    folder = make_llama(tmp_path / "model")
    tensors = {name: value.to(stored) for name, value in llama_tensors(SHAPE).items()}
    rewrite(folder, tensors)
    widened = make_llama(tmp_path / "wide")
    rewrite(widened, {name: value.float() for name, value in tensors.items()})
    runner = load_runner(folder, device="cpu")
    assert runner.model_info.dtype == "float32"
    prompts = [random_prompt(20, SHAPE.vocab_size)]
    expected = all_logits(load_runner(widened), prompts, 20)[0]
    assert torch.equal(all_logits(runner, prompts, 20)[0], expected)


def test_the_fingerprint_follows_content_alone(tmp_path: Path) -> None:
    folder, twin = make_llama(tmp_path / "a"), make_llama(tmp_path / "b")
    known = Checkpoint(folder).fingerprint()
    assert len(known) == 32
    config = json.loads((twin / "config.json").read_text())
    written_by_another = config | {"transformers_version": "9.9", "_name_or_path": "x"}
    (twin / "config.json").write_text(json.dumps(written_by_another, indent=2))
    assert Checkpoint(twin).fingerprint() == known
    (twin / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    assert Checkpoint(twin).fingerprint() != known
    assert Checkpoint(make_llama(tmp_path / "c", seed=1)).fingerprint() != known
    tensors = llama_tensors(SHAPE)
    tensors["model.layers.1.mlp.down_proj.weight"][-1, -1] += 1
    rewrite(folder, tensors)
    assert Checkpoint(folder).fingerprint() != known


def test_the_fingerprint_of_a_large_model_reads_little_of_it(tmp_path: Path) -> None:
    folder = make_llama(
        tmp_path / "large", vocab_size=60_000, hidden_size=256, num_layers=1, scale=1.0
    )
    checkpoint = Checkpoint(folder)
    checkpoint.fingerprint()
    started = time.process_time()
    checkpoint.fingerprint()
    assert time.process_time() - started < 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supported"),
        ({"architectures": []}, "'unnamed' is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.*'fp8'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "RoPE type 'yarn'"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic"}}, "'dynamic'"),
        ({"partial_rotary_factor": 0.5, "rope_scaling": {"type": "default"}}, "partial_rotary"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    folder = make_llama(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UnsupportedModel, match=message):
        load_runner(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "many"}, "vocab_size is 'many', not a positive whole number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, not true or false"),
        ({"vocab_size": 132}, r"embed_tokens.weight has shape \[131, 64\].*\[132, 64\]"),
        ({"num_hidden_layers": 3}, r"model\.layers\.2\.\S+ is missing"),
        ({"num_hidden_layers": 1}, r"tensors without a use: model\.layers\.1"),
        ({"attention_bias": True}, r"q_proj\.bias is missing"),
    ],
    ids=str,
)
def test_a_configuration_that_does_not_fit_is_named(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    folder = make_llama(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=message):
        load_runner(folder)


def test_unused_weights_and_adapters_are_refused(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "model")
    rewrite(
        folder, llama_tensors(SHAPE) | {"model.layers.0.self_attn.q_norm.weight": torch.ones(4)}
    )
    with pytest.raises(UnsupportedModel, match=r"without a use: model.layers.0.self_attn.q_norm"):
        load_runner(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="adapter"):
        load_runner(folder)


def test_derived_tensors_and_a_stored_tied_head_are_harmless(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "model", tied=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    rewrite(folder, tensors)
    load_runner(folder)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "model")
    tensors = llama_tensors(SHAPE)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)
    rewrite(folder, tensors)
    with pytest.raises(UnsupportedModel, match=r"up_proj.weight of dtype I8"):
        load_runner(folder)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "model")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for content in (whole[:-10], whole[:100], b"", b"\x00" * 64):
        weights.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            load_runner(folder)
    weights.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is not a format read here"):
        load_runner(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        load_runner(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "model")
    shard(folder, 3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00003"):
        load_runner(folder)


def test_a_name_that_is_neither_folder_nor_hub_id_is_refused(tmp_path: Path) -> None:
    for name in (str(tmp_path / "nothing"), "no-such-model", "./a/b"):
        with pytest.raises(CheckpointError, match="neither a folder nor a hub id"):
            resolve_folder(name)


def test_a_hub_id_comes_from_the_cache_when_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--someone--tiny"
    snapshot = make_llama(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    assert resolve_folder("someone/tiny") == snapshot
    with pytest.raises(CheckpointError, match="someone/other cannot be had from the hub"):
        resolve_folder("someone/other")


def test_ends_come_from_the_generation_config_where_it_has_them(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "model")
    assert load_runner(folder).model_info.eos_token_ids == (2,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 9], "bos_token_id": 3}')
    info = load_runner(folder).model_info
    assert info.eos_token_ids == (5, 9)
    assert info.bos_token_id == 3
    assert info.tokenizer_dir == str(folder)


def test_a_longer_context_than_the_model_has_is_refused(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "model")
    assert load_runner(folder, max_context=100).model_info.max_context == 100
    with pytest.raises(ModelError, match="exceeds the model's 512 positions"):
        load_runner(folder, max_context=513)


def test_float32_weights_are_mapped_not_copied(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "model")
    checkpoint = Checkpoint(folder)
    source = loader.CheckpointSource(checkpoint, torch.float32, torch.device("cpu"))
    name = "model.norm.weight"
    first, second = source.tensor(name, (64,)), source.tensor(name, (64,))
    assert first.data_ptr() == second.data_ptr()


@pytest.mark.parametrize("shards", [1, 4])
def test_a_folder_written_by_transformers_is_served(tmp_path: Path, shards: int) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    config = LlamaConfig(
        vocab_size=131,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rope_parameters=rope,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path, max_shard_size="1GB" if shards == 1 else "100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) >= shards
    prompt = random_prompt(100, 131)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    found = all_logits(load_runner(tmp_path), [prompt], 33)[0]
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-4)
