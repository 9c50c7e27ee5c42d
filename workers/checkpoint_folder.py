"""Which files of a folder are its checkpoint. Loads no torch: it is asked before anything else."""

from pathlib import Path

from .models.config import CheckpointError


def find_gguf(folder: Path) -> Path | None:
    """The folder's GGUF file, if that is how it has its weights."""
    files = sorted(folder.glob("*.gguf"))
    if not files or any(folder.glob("*.safetensors")):
        return None
    if len(files) > 1:
        raise CheckpointError(f"{folder} holds several GGUF files: {files[0].name}, …")
    return files[0]
