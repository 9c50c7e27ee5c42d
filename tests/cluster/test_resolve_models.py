"""What `serve` finds out about a checkpoint folder before it starts anything."""

from pathlib import Path

import pytest
from rich.console import Console

from pagefleet.cluster.config import ClusterConfig, CommandError, NamedModel
from pagefleet.cluster.serve_command import resolve_models


@pytest.mark.parametrize(("name", "problem"), [("x.json", "fast"), ("tokenizer.json", "is no")])
def test_a_tokenizer_that_cannot_be_read(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text("{")
    config = ClusterConfig((NamedModel(str(tmp_path), "broken"),))
    with pytest.raises(CommandError, match=problem):
        resolve_models(config, Console())
