"""The README's code does what it says: every block is run, against a live cluster."""

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_model import make_tiny_model

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
GRPC, HTTP = "127.0.0.1:50051", "127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[str]:
    lines = (
        line.partition("#")[0].strip() for block in blocks("console") for line in block.splitlines()
    )
    return [line for line in lines if line.startswith(f"{program} ")]


SERVED = [
    c for c in commands("pagefleet") if c.split()[1] in ("generate", "explain", "status", "bench")
]
ALONE = [c for c in commands("pagefleet") if c.split()[1] in ("plan", "models", "simulate")]
STARTED = [c for c in commands("pagefleet") if c.split()[1] == "serve"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("readme") / "tiny")


@pytest.fixture(scope="module")
def addresses(model: Path) -> Iterator[dict[str, str]]:
    """`pagefleet serve` on free ports; the README's stand for these."""
    command = [str(BIN / "pagefleet"), "serve", "--model", str(model), "--json"]
    command += ["--grpc-port", "0", "--http-port", "0", "--num-blocks", "256"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            facts = json.loads(process.stdout.readline())
            yield {GRPC: facts["grpc"], HTTP: facts["http"]}
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
        finally:
            if process.poll() is None:
                process.kill()


def run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def run_python(code: str, addresses: dict[str, str]) -> str:
    for written, real in addresses.items():
        code = code.replace(written, real)
    return run([sys.executable, "-c", code])


@pytest.mark.ray
@pytest.mark.parametrize("code", [code for code in blocks("python") if "LLM" not in code])
def test_a_client_gets_an_answer(code: str, addresses: dict[str, str]):
    assert run_python(code, addresses).strip()


@pytest.mark.ray
@pytest.mark.parametrize("command", SERVED)
def test_a_command_finds_the_cluster(command: str, addresses: dict[str, str]):
    _, *arguments = shlex.split(command)
    assert run([str(BIN / "pagefleet"), *arguments, "--server", addresses[GRPC]])


@pytest.mark.parametrize("command", ALONE)
def test_a_command_needs_no_cluster(command: str):
    _, *arguments = shlex.split(command)
    assert run([str(BIN / "pagefleet"), *arguments])


def test_a_script_needs_no_server(model: Path):
    (code,) = [code for code in blocks("python") if "LLM" in code]
    code = code.replace("str(folder())", repr(str(model)))
    run([sys.executable, "-c", code])


@pytest.mark.parametrize("command", STARTED)
def test_every_flag_of_serve_exists(command: str):
    help_text = run([str(BIN / "pagefleet"), "serve", "--help"])
    for flag in re.findall(r"--[a-z-]+", command):
        assert flag in help_text


def test_every_make_target_exists():
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in commands("make"):
        for target in command.split()[1:]:
            assert re.search(rf"^{target}:", targets, re.MULTILINE), target


def test_every_link_leads_somewhere():
    for path in re.findall(r"\]\(([^):#]+)\)", README):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("folder", ["cluster", "workers", "scheduler", "kernels", "protos"])
def test_a_folder_says_what_each_of_its_files_is_for(folder: str) -> None:
    text = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    files = {path.stem for path in (ROOT / folder).glob("[a-z]*.py") if "_pb2" not in path.stem}
    missing = [name for name in sorted(files) if not re.search(rf"\b{name}\b", text)]
    assert not missing, f"{folder}/README.md does not name {', '.join(missing)}"
