"""The committed *_pb2 files are what grpcio-tools 1.71.2 makes of the .proto files.

`PAGEFLEET_PROTOC_PYTHON` may name an interpreter that has that version; else a throw-away venv is
made, and the test is skipped where that cannot be done.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROTOS = Path(__file__).parents[2] / "protos"
SOURCES = ("inference.proto", "engine.proto")
PACKAGES = ("grpcio-tools==1.71.2", "setuptools<81")


@pytest.fixture
def protoc_python(tmp_path: Path) -> str:
    named = os.environ.get("PAGEFLEET_PROTOC_PYTHON")
    if named:
        return named
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    installed = subprocess.run(
        [python, "-m", "pip", "install", "-q", *PACKAGES], capture_output=True, text=True
    )
    if installed.returncode != 0:
        pytest.skip(f"grpcio-tools 1.71.2 cannot be installed: {installed.stderr[-300:]}")
    return python


@pytest.mark.slow
def test_generated_code_is_current(protoc_python: str, tmp_path: Path):
    subprocess.run(
        [
            *(protoc_python, "-m", "grpc_tools.protoc", f"-Ipagefleet/protos={PROTOS}"),
            *(f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "pyi")),
            *(str(PROTOS / source) for source in SOURCES),
        ],
        check=True,
    )
    generated = {path.name: path.read_text() for path in tmp_path.glob("pagefleet/protos/*")}
    committed = {path.name: path.read_text() for path in PROTOS.glob("*_pb2*.py*")}
    assert generated == committed, "run `make protos` and commit the result"
