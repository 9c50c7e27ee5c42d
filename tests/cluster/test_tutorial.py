"""The tutorial runs, in order, against one cluster; and its links lead somewhere."""

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes_checks import ROOT
from tiny_model import make_tiny_model

PAGE = ROOT / "cluster" / "TUTORIAL.md"
BIN = Path(sys.executable).parent
GRPC, HTTP = "127.0.0.1:50051", "127.0.0.1:8000"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
SERVED = ("generate", "status")


def commands() -> list[list[str]]:
    lines = [line for kind, text in BLOCKS if kind == "console" for line in text.splitlines()]
    return [shlex.split(line) for line in lines]


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The page's own `serve`, with a tiny model, on free ports; the page's stand for these."""
    model = make_tiny_model(tmp_path_factory.mktemp("tutorial") / "tiny")
    (serve,) = [command for command in commands() if command[1] == "serve"]
    command = [str(BIN / "pagefleet"), *serve[1:], "--model", str(model), "--json"]
    command += ["--grpc-port", "0", "--http-port", "0"]
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


@pytest.mark.ray
@pytest.mark.slow
def test_the_page_is_true(addresses: dict[str, str], capsys: pytest.CaptureFixture[str]):
    names: dict[str, object] = {"__name__": "tutorial"}
    for kind, text in BLOCKS:
        for written, real in addresses.items():
            text = text.replace(written, real)
        if kind == "python":
            exec(compile(text, f"{PAGE.name}: {text.splitlines()[0]}", "exec"), names)
            continue
        for command in map(shlex.split, text.splitlines()):
            if command[1] in SERVED:
                run([*command, "--server", addresses[GRPC]])
    assert "the last came from" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["plan", "simulate"])
def test_a_command_needs_no_cluster(name: str):
    (command,) = [command for command in commands() if command[1] == name]
    assert run(command)


def run(command: list[str]) -> str:
    program, *arguments = command
    assert program == "pagefleet"
    result = subprocess.run(
        [str(BIN / program), *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_no_command_is_left_out():
    assert {command[1] for command in commands()} == {*SERVED, "serve", "plan", "simulate"}


def test_every_link_leads_somewhere():
    for path in re.findall(r"\]\(([^):#]+)\)", PAGE.read_text("utf-8")):
        assert (PAGE.parent / path).exists(), path
