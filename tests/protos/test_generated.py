"""The committed *_pb2 files are what grpcio-tools 1.71.2 makes of the .proto files.

Runs where that version is at hand: `PAGEFLEET_PROTOC_PYTHON` names an interpreter that has it
(`.ci/run` makes one), else this one is tried.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROTOS = Path(__file__).parents[2] / "protos"
SOURCES = ("inference.proto", "engine.proto")


@pytest.fixture
def protoc() -> str:
    python = os.environ.get("PAGEFLEET_PROTOC_PYTHON", sys.executable)
    query = "from importlib.metadata import version; print(version('grpcio-tools'))"
    found = subprocess.run([python, "-c", query], capture_output=True, text=True)
    if found.stdout.strip() != "1.71.2":
        pytest.skip("needs grpcio-tools 1.71.2; PAGEFLEET_PROTOC_PYTHON may name a Python with it")
    return python


def test_generated_code_is_current(protoc: str, tmp_path: Path):
    subprocess.run(
        [
            *(protoc, "-m", "grpc_tools.protoc", f"-Ipagefleet/protos={PROTOS}"),
            *(f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "pyi")),
            *(str(PROTOS / source) for source in SOURCES),
        ],
        check=True,
    )
    generated = {path.name: path.read_text() for path in tmp_path.glob("pagefleet/protos/*")}
    committed = {path.name: path.read_text() for path in PROTOS.glob("*_pb2*.py*")}
    assert generated == committed, "run `make protos` and commit the result"
