"""A folder for what one process leaves on disk while it runs; gone when it ends, however it ends.

    /tmp/pagefleet-UID/    this user's alone
        1f03a9.lock        held (flock) by its owner, from before the folder is until after it
        1f03a9/            the scratch folder

A process that is killed removes nothing, so whoever begins next removes folders that nobody holds.
Knows nothing of what lies in them.
"""

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from .config import CommandError

_LOCK = ".lock"


@contextmanager
def scratch_folder(root: Path | None = None) -> Generator[Path]:
    """A new, empty one while the block runs; its path is short enough for sockets below it.

    Raises CommandError where there can be none.
    """
    root = _root() if root is None else root
    try:
        _make_private(root)
        _remove_abandoned(root)
        lock, folder = _create(root)
    except OSError as error:
        raise CommandError(f"no folder can be made in {root}: {error.strerror or error}") from error
    with lock:
        try:
            yield folder
        finally:
            _remove(folder)


def _root() -> Path:
    # sockets' paths may have 107 bytes at most, and TMPDIR can be long
    parent = Path("/tmp") if os.access("/tmp", os.W_OK) else Path(tempfile.gettempdir())
    return parent / f"pagefleet-{os.getuid()}"


def _make_private(root: Path) -> None:
    with suppress(FileExistsError):
        root.mkdir(mode=0o700)
    found = root.lstat()  # /tmp is everybody's: another user may have been there first
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise CommandError(f"{root} is not a folder that only this user can change: remove it")


def _create(root: Path) -> tuple[BinaryIO, Path]:
    folder = root / secrets.token_hex(3)
    lock = folder.with_suffix(_LOCK)
    new = folder.with_suffix(".new")
    # Held before it has the name that others look for: none of them can come between.
    file = new.open("xb")
    fcntl.flock(file, fcntl.LOCK_EX)
    new.rename(lock)
    folder.mkdir(mode=0o700)
    return file, folder


def _remove_abandoned(root: Path) -> None:
    for name in {path.stem for path in root.iterdir() if path.suffix in ("", _LOCK)}:
        folder = root / name
        try:
            file = folder.with_suffix(_LOCK).open("rb")
        except FileNotFoundError:
            # What its owner had started wrote on for a moment after it had removed the folder.
            shutil.rmtree(folder, ignore_errors=True)
            continue
        with file, suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder)


def _remove(folder: Path) -> None:
    """By who holds its lock."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_suffix(_LOCK).unlink(missing_ok=True)
