"""What `serve` finds out about a checkpoint folder before it starts anything."""

from pathlib import Path

import pytest
from rich.console import Console
from tiny_model import make_tiny_model

from pagefleet.cluster.config import ClusterConfig, CommandError, NamedModel
from pagefleet.cluster.serve_command import resolve_models


@pytest.mark.parametrize(("name", "problem"), [("x.json", "fast"), ("tokenizer.json", "is no")])
def test_a_tokenizer_that_cannot_be_read(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text("{")
    config = ClusterConfig((NamedModel(str(tmp_path), "broken"),))
    with pytest.raises(CommandError, match=problem):
        resolve_models(config, Console())


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("config.json", "{bad", r"config\.json is not valid JSON"),
        ("config.json", '{"architectures": ["Mamba"]}', r"config\.json: architecture 'Mamba'"),
        ("tokenizer_config.json", "{bad", r"tokenizer_config\.json is not valid JSON"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json does not hold"),
        ("chat_template.jinja", "{% for m in %}", "chat template cannot be read: Expected"),
        ("config.json", None, "no config.json"),
    ],
)
def test_files_that_cannot_be_used(
    tmp_path: Path, name: str, text: str | None, problem: str
) -> None:
    make_tiny_model(tmp_path)
    (tmp_path / name).unlink() if text is None else (tmp_path / name).write_text(text)
    config = ClusterConfig((NamedModel(str(tmp_path), "broken"),))
    with pytest.raises(CommandError, match=problem):
        resolve_models(config, Console())


def test_a_gguf_file_needs_no_configuration(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).unlink()
    (tmp_path / "model.gguf").touch()
    config = ClusterConfig((NamedModel(str(tmp_path), "tiny"),))
    assert resolve_models(config, Console()).models[0].checkpoint == str(tmp_path.resolve())
