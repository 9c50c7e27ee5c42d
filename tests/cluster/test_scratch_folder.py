"""Scratch folders go with their owner, and at the next start where it was killed."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagefleet.cluster.config import CommandError
from pagefleet.cluster.scratch_folder import scratch_folder

HOLD = (
    "import sys, time; from pathlib import Path;"
    "from pagefleet.cluster.scratch_folder import scratch_folder\n"
    "with scratch_folder(Path(sys.argv[1])) as folder:\n"
    "    (folder / 'session').mkdir()\n"
    "    print(folder, flush=True)\n"
    "    time.sleep(600)"
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def holder(root: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLD, str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def folder_of(holder: subprocess.Popen[str]) -> Path:
    assert holder.stdout is not None
    return Path(holder.stdout.readline().strip())


def test_is_empty_private_and_gone_afterwards(root: Path):
    with scratch_folder(root) as folder:
        assert (folder.parent, list(folder.iterdir())) == (root, [])
        assert root.stat().st_mode & 0o777 == 0o700
        (folder / "file").write_text("x")
    assert not list(root.iterdir())


def test_a_killed_owner_s_is_removed_at_the_next_start_and_a_living_one_s_never(
    root: Path, holder: subprocess.Popen[str]
):
    held = folder_of(holder)
    with scratch_folder(root) as folder:
        assert folder != held
    assert (held / "session").is_dir(), "its owner lives"
    holder.kill()
    holder.wait(timeout=20)
    assert (held / "session").is_dir(), "nobody could remove it"
    with scratch_folder(root) as folder:
        assert {path.stem for path in root.iterdir()} == {folder.name}


def test_what_came_back_after_its_owner_s_end_is_removed(root: Path):
    with scratch_folder(root) as folder:
        pass
    (folder / "logs").mkdir(parents=True)  # by a daemon that took longer to end
    with scratch_folder(root):
        assert not folder.exists()


def test_refuses_a_root_that_others_can_change(root: Path, tmp_path: Path):
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(CommandError, match="only this user"), scratch_folder(root):
        pass
    elsewhere = tmp_path / "elsewhere"
    elsewhere.symlink_to(tmp_path)
    with pytest.raises(CommandError, match="only this user"), scratch_folder(elsewhere):
        pass
