"""The GPU kernels compiled and run where there is a GPU; where there is none, that the script which
proves them says so, and runs."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("check.py")
NO_GPU = 3
has_gpu = torch.cuda.is_available()


def run_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    # It interprets kernels by its own choice, where there is no GPU.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(has_gpu, reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_could_not_do() -> None:
    ended = run_check()
    assert ended.returncode == NO_GPU, ended.stdout + ended.stderr
    for part in ("kernels", "models", "swaps", "speed"):
        assert f"not done: {part}: needs a GPU" in ended.stdout
    assert "nothing was proved" in ended.stdout


@pytest.mark.slow
@pytest.mark.skipif(has_gpu, reason="there is a GPU")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_every_part_runs_in_a_rehearsal(tmp_path: Path) -> None:
    ended = run_check("--rehearse", "--json", str(tmp_path / "found.json"))
    assert ended.returncode == NO_GPU, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert {finding["part"] for finding in found["findings"]} >= {
        *("kernels", "models", "swaps", "speed", "machine")
    }
    assert found["skipped"] == {}
    assert all(finding["passed"] for finding in found["findings"])


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu, reason="needs a GPU")
@pytest.mark.parametrize("part", ["kernels", "swaps"])
def test_on_a_gpu_every_finding_passes(part: str, tmp_path: Path) -> None:
    ended = run_check("--only", part, "--json", str(tmp_path / "found.json"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
