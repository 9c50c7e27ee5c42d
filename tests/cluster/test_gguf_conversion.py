"""What the GGUF converter refuses; test_default_model.py compares what it writes."""

from pathlib import Path

import gguf
import pytest
from factories import make_llama
from quantized_factories import write_gguf

from pagefleet.cluster.config import CommandError
from pagefleet.cluster.gguf_conversion import convert


@pytest.mark.parametrize(
    ("architecture", "message"),
    [("smollm3", "architecture 'smollm3'"), ("llama", "tokenizer None, expected 'smollm'")],
)
def test_another_kind_of_model_is_refused(tmp_path: Path, architecture: str, message: str) -> None:
    folder = make_llama(tmp_path / "plain")
    write_gguf(folder, tmp_path / "gguf", architecture, gguf.GGMLQuantizationType.F32)
    with pytest.raises(CommandError, match=message):
        convert(tmp_path / "gguf" / "model.gguf", tmp_path, lambda done, total: None)
    assert not (tmp_path / "model.safetensors").exists()
