"""What is installed is what the repository holds."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from fresh_process import loaded_with

ROOT = Path(__file__).parent.parent
NOT_PACKAGES = {"build", "deploy", "dist", "tests"}


def settings() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_listed():
    found = {"pagefleet"}
    for init in ROOT.glob("*/**/__init__.py"):
        folders = init.parent.relative_to(ROOT).parts
        if folders[0] not in NOT_PACKAGES and not folders[0].startswith("."):
            found.add(".".join(("pagefleet", *folders)))
    assert found == set(settings()["tool"]["setuptools"]["packages"])


def test_torch_stays_in_the_range_that_has_a_cpu_build():
    assert "torch>=2.9,<2.14" in settings()["project"]["dependencies"]


def test_only_the_processes_that_compute_load_torch():
    """It takes seconds: the command, the supervisor, the controller and the gateway do without. Web
    servers are loaded by the gateway's process alone."""
    modules = ("cluster.serve_command", "cluster.gateway_actor", "cluster.controller_actor")
    modules += ("workers.worker", "workers.rank_worker")  # imported by who creates the actors
    assert {"torch", "fastapi"} & loaded_with(*modules) == set()


@pytest.mark.slow
def test_the_wheel_holds_code_and_data_and_no_tests(tmp_path: Path):
    source = tmp_path / "source"  # setuptools leaves build/ behind and would reuse it
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path)]
    subprocess.run([*command, str(source)], check=True)
    (wheel,) = tmp_path.glob("pagefleet-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"pagefleet/cluster/main.py", "pagefleet/protos/inference.proto"} <= names
    page = {"index.html", "app.js", "style.css"}
    assert {f"pagefleet/cluster/dashboard/static/{name}" for name in page} <= names
    assert not [name for name in names if name.startswith(("tests/", "pagefleet/tests/"))]
