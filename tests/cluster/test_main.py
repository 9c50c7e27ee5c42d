"""The command line: quick help, JSON, and errors in one line."""

import gzip
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fresh_process import loaded_with
from typer.testing import CliRunner

from pagefleet.cluster import default_model
from pagefleet.cluster.main import app

PLAN_8B = ["plan", "--layers", "32", "--kv-heads", "8", "--head-dim", "128"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_help_imports_nothing_heavy():
    heavy = {"torch", "ray", "grpc", "transformers", "numpy"}
    assert heavy & loaded_with("cluster.main") == set()


@pytest.mark.slow
def test_help_takes_under_half_a_second():
    command = [str(Path(sys.executable).parent / "pagefleet"), "--help"]
    times: list[float] = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run(command, capture_output=True, check=True)
        times.append(time.perf_counter() - began)
    assert min(times) < 0.5


def test_every_command_has_a_help():
    for command in app.registered_commands:
        name = command.name or command.callback.__name__
        assert "--help" in run(name, "--help")


def test_plan_prints_json():
    plan = json.loads(run(*PLAN_8B, "--kv-memory", "1GiB", "--lengths", "4096x2", "--json"))
    assert plan["bytes_per_token"] == 131072
    assert plan["longest_sequence"]["num_tokens"] == 4096
    assert {size["block_size"] for size in plan["sizes"]} == {4, 8, 16, 32, 64, 128}


def test_plan_prints_a_table():
    output = run(*PLAN_8B, "--block-size", "16", "--lengths", "4096")
    assert "128 KiB per token" in output
    assert "1/524,288" in output


def test_models_list_names_the_default_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PAGEFLEET_CACHE", str(tmp_path))
    default_model.folder().mkdir(parents=True)
    for name in default_model._FILES:
        (default_model.folder() / name).write_text("x")
    (first, *_) = json.loads(run("models", "list", "--json"))
    assert first["name"] == default_model.NAME
    assert first["num_bytes"] == len(default_model._FILES)
    assert run("models", "fetch").strip() == str(default_model.folder())


def test_allocators_write_a_table_and_a_plot(tmp_path: Path):
    trace = tmp_path / "lengths.jsonl.gz"
    rows = (json.dumps({"in": 50 + 31 * (i % 5), "out": 20 + 9 * (i % 7)}) for i in range(80))
    trace.write_bytes(gzip.compress("\n".join(rows).encode()))
    png, results = tmp_path / "split.png", tmp_path / "split.json"
    arguments = ["--trace", str(trace), "--blocks", "64", "--max-model-len", "512"]
    run("simulate", "--allocators", *arguments, "--png", str(png), "--json", str(results))
    assert png.read_bytes().startswith(b"\x89PNG")
    assert {row["allocator"] for row in json.loads(results.read_text())} == {
        "paged",
        "reserve-to-max",
        "power-of-two",
        "exact",
    }


def test_simulate_takes_several_policies(tmp_path: Path):
    results = tmp_path / "rows.json"
    names = ("default", "round-robin", "least-requests")
    run("simulate", "--policy", *names, "--requests", "40", "--json", str(results))
    rows = json.loads(results.read_text())
    assert [row["policy"] for row in rows] == list(names)
    assert {"hit_rate", "ttft_p99_s", "goodput", "decision_us_mean"} <= set(rows[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*PLAN_8B, "--kv-memory", "much"], "is not a size"),
        (["plan"], "--model DIR"),
        ([*PLAN_8B, "--lengths", "few"], "--lengths"),
        (["serve", "--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["serve", "--model", ""], "--model is empty"),
        (["serve", "--replicas", "0"], "--replicas"),
        (["serve", "--fault", "hash-bits=many"], "hash-bits=8"),
        (["simulate", "--policy", "best"], "best"),
        (["simulate", "--allocators", "--trace", "/nowhere"], "/nowhere"),
        (["status", "--server", "127.0.0.1:1"], "127.0.0.1:1"),
    ],
)
def test_a_mistake_is_one_line_without_a_traceback(arguments: list[str], message: str):
    command = [str(Path(sys.executable).parent / "pagefleet"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr
