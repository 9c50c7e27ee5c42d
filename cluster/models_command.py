"""`pagefleet models`: which checkpoints are on this machine, and fetching more.

Knows the default model's cache and the hub's. Knows nothing of what is being served.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import default_model
from .config import CommandError, format_bytes

# What serving needs; a repository may hold the same weights in several other formats.
_CHECKPOINT_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja"]


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A checkpoint that `pagefleet serve --model` can take without a download."""

    name: str
    path: str
    num_bytes: int
    is_default: bool


def list_models() -> list[LocalModel]:
    """The default model, if it was fetched, then those in the hub's cache."""
    models: list[LocalModel] = []
    if default_model.is_cached():
        folder = default_model.folder()
        size = sum(path.stat().st_size for path in folder.iterdir())
        models.append(LocalModel(default_model.NAME, str(folder), size, is_default=True))
    return models + _hub_models()


def _hub_models() -> list[LocalModel]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return [
        LocalModel(repository.repo_id, str(repository.repo_path), repository.size_on_disk, False)
        for repository in sorted(repositories, key=lambda repository: repository.repo_id)
        if repository.repo_type == "model"
    ]


def fetch_default(console: Console) -> Path:
    """The default model's folder, with a progress display if it has to be made first."""
    if default_model.is_cached():
        return default_model.folder()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as display:
        task = display.add_task(default_model.NAME, total=None)

        def show(what: str, share: float | None) -> None:
            display.update(task, description=what, total=1.0 if share else None, completed=share)

        return default_model.fetch(show)


def fetch_from_hub(model: str) -> Path:
    """Download a checkpoint into the hub's cache; the hub's own progress bars are shown."""
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=_CHECKPOINT_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CommandError(f"{model} could not be fetched from the hub: {error}") from error


def models_table(models: Sequence[LocalModel]) -> Table:
    """One row a model."""
    table = Table(box=None)
    for header in ("model", "size", "folder"):
        # a folder is there to be copied: rather two lines than half of it
        table.add_column(header, justify="right" if header == "size" else "left", overflow="fold")
    for model in models:
        name = f"{model.name} (default)" if model.is_default else model.name
        table.add_row(name, format_bytes(model.num_bytes), model.path)
    return table
