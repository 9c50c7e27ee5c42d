"""How soon it is there, and what memory it takes: ours beside vLLM's CPU build, each from `exec`.

    help      `pagefleet --help`, beside the half second that is allowed
    import    a new interpreter that imports the class for scripts, `LLM`
    script    a new interpreter that loads the model with it and has one token
    server    `pagefleet serve` until its first answer over HTTP has one token; vLLM's server alike

Each is the median of `--repeats`, ours and vLLM's in turn. Both have a KV pool of 2,048 tokens.
Memory is the private and the proportional share of shared pages (PSS) of all processes, after the
first answer; Ray's own daemons and its idle workers are counted apart. vLLM runs eager, the faster
start, with the interpreter that PEER_VLLM_PYTHON names; without it there is no reference.

    python tests/benchmarks/bench_startup.py [--model DIR] [--repeats 3] [--json FILE]
"""

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from benchmark_report import Row, print_rows, write_json
from peer_vllm import BLOCK_SIZE, MEMORY_SHARE, kv_bytes, peer_environment, peer_python
from rich.console import Console
from serving_process import PAGEFLEET, serving

from pagefleet.cluster.models_command import fetch_default

POOL_TOKENS = 2048
HELP_ALLOWED_S = 0.5
OUR_IMPORT = "from pagefleet.cluster.llm import LLM"
VLLM_IMPORT = "from vllm import LLM"
OUR_SCRIPT = """
import sys
import tempfile
from pagefleet.cluster.llm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", num_blocks={blocks}, max_context={tokens})
llm.generate(["The sea is"], SamplingParams(max_tokens=1, temperature=0.0))
"""
VLLM_SCRIPT = """
import sys
import tempfile
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len={tokens},
    block_size={block}, num_gpu_blocks_override={blocks}, kv_cache_memory_bytes={bytes},
    gpu_memory_utilization={share})
llm.generate(["The sea is"], SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
"""
# What a script prints when it has its token; this process then reads its memory.
DONE = "\nprint('ready', flush=True); sys.stdin.read()\n"
RAY_DAEMONS = (
    "raylet",
    "gcs_server",
    "ray::idle",
    "log_monitor",
    "dashboard",
    "monitor.py",
    "agent",
)
_READY_TIMEOUT_S = 300.0
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Start:
    """One start. memory, daemons: MiB."""

    seconds: float
    memory: float = 0.0
    daemons: float = 0.0


def help_s() -> float:
    return _run_s([PAGEFLEET, "--help"])


def import_s(python: str, statement: str) -> float:
    environment = os.environ if python == sys.executable else peer_environment()
    return _run_s([python, "-c", statement], environment)


def _run_s(
    command: list[str], environment: "os._Environ[str] | dict[str, str]" = os.environ
) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - began


def start_script(python: str, script: str, model: Path) -> Start:
    """Until it has one token; what else it prints is passed over."""
    environment = dict(os.environ)
    if python != sys.executable:
        environment = peer_environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    began = time.perf_counter()
    with subprocess.Popen(
        [python, "-c", script + DONE, str(model)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
        cwd="/",
    ) as process:
        assert process.stdout is not None
        if not any(line.strip() == "ready" for line in process.stdout):
            raise SystemExit(f"{python} did not get ready")
        seconds = time.perf_counter() - began
        memory, daemons = memory_of(process.pid)
        process.kill()
    return Start(seconds, memory, daemons)


def start_our_server(model: Path) -> Start:
    began = time.perf_counter()
    flags = ("--dtype", "float32", "--num-blocks", str(POOL_TOKENS // 16))
    with serving(model, *flags, "--max-model-len", str(POOL_TOKENS)) as server:
        wait_for_token(f"http://{server.http}", model.name)
        seconds = time.perf_counter() - began
        return Start(seconds, *memory_of(server.pid))


def start_vllm_server(python: str, model: Path) -> Start:
    began = time.perf_counter()
    with _vllm_server(python, model) as (pid, address):
        wait_for_token(address, "peer")
        seconds = time.perf_counter() - began
        return Start(seconds, *memory_of(pid))


@contextmanager
def _vllm_server(python: str, model: Path) -> Generator[tuple[int, str]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "peer", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", str(POOL_TOKENS), "--block-size", str(BLOCK_SIZE)]
    command += ["--num-gpu-blocks-override", str(POOL_TOKENS // BLOCK_SIZE + 1)]
    command += ["--gpu-memory-utilization", str(MEMORY_SHARE)]
    command += ["--kv-cache-memory-bytes", str(kv_bytes(model, POOL_TOKENS))]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=peer_environment(),
        cwd="/",
    ) as process:
        try:
            yield process.pid, f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_for_token(address: str, model: str) -> None:
    """Ask for one token until there is an answer."""
    body = {"model": model, "prompt": "The sea is", "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(
        f"{address}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                json.load(answer)
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.02)
    raise SystemExit(f"{address} did not answer within {_READY_TIMEOUT_S:g} s")


def memory_of(pid: int) -> tuple[float, float]:
    """MiB of a process and all below it, and of Ray's daemons among them, which are left out."""
    own = daemons = 0.0
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        try:
            name = " ".join(process.cmdline())
            held = process.memory_full_info().pss / _MIB
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        if process.pid != pid and any(word in name.lower() for word in RAY_DAEMONS):
            daemons += held
        else:
            own += held
    return own, daemons


def median(starts: list[Start]) -> Start:
    return Start(
        statistics.median(start.seconds for start in starts),
        statistics.median(start.memory for start in starts),
        statistics.median(start.daemons for start in starts),
    )


def in_turn(
    repeats: int, ours: Callable[[], Start], theirs: Callable[[], Start] | None
) -> tuple[Start, Start | None]:
    own: list[Start] = []
    other: list[Start] = []
    for _ in range(repeats):
        own.append(ours())
        if theirs is not None:
            other.append(theirs())
    return median(own), median(other) if other else None


def rows_of(case: str, ours: Start, theirs: Start | None) -> list[Row]:
    reference = "vLLM"
    rows = [Row(case, "s", ours.seconds, theirs and theirs.seconds, reference)]
    if ours.memory:
        rows.append(Row(case, "memory_mib", ours.memory, theirs and theirs.memory, reference))
    if ours.daemons:
        rows.append(Row(f"{case}: Ray's daemons", "memory_mib", ours.daemons, None, reference))
    return rows


def stored_as(dtype: str, model: Path, folder: Path) -> Path:
    """A copy of a checkpoint of one file, its weights in `dtype`, as published ones are."""
    import torch
    from safetensors.torch import load_file, save_file

    target = folder / model.name
    shutil.copytree(model, target)
    weights = load_file(target / "model.safetensors")
    narrow = {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights.items()}
    save_file(narrow, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps(config | {"dtype": dtype}), encoding="utf-8")
    return target


def measure(model: Path, repeats: int) -> list[Row]:
    peer = peer_python()
    sizes = {"tokens": POOL_TOKENS, "block": BLOCK_SIZE, "share": MEMORY_SHARE}
    our_script = OUR_SCRIPT.format(blocks=POOL_TOKENS // 16, **sizes)
    num_bytes = kv_bytes(model, POOL_TOKENS)
    vllm_script = VLLM_SCRIPT.format(blocks=POOL_TOKENS // BLOCK_SIZE + 1, bytes=num_bytes, **sizes)
    least_help = statistics.median(help_s() for _ in range(max(5, repeats)))
    rows = [Row("help", "s", least_help, HELP_ALLOWED_S, "allowed")]
    cases: dict[str, tuple[Callable[[], Start], Callable[[str], Start]]] = {
        "import": (
            lambda: Start(import_s(sys.executable, OUR_IMPORT)),
            lambda python: Start(import_s(python, VLLM_IMPORT)),
        ),
        "script": (
            lambda: start_script(sys.executable, our_script, model),
            lambda python: start_script(python, vllm_script, model),
        ),
        "server": (
            lambda: start_our_server(model),
            lambda python: start_vllm_server(python, model),
        ),
    }
    for case, (ours, theirs) in cases.items():
        start, reference = in_turn(repeats, ours, (lambda t=theirs: t(peer)) if peer else None)
        rows += rows_of(case, start, reference)
        print_rows(case, rows[-3:])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a checkpoint folder; the default model")
    parser.add_argument("--stored", choices=("bfloat16",), help="its numbers rounded")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = (options.model or fetch_default(Console(stderr=True))).resolve()
    name = f"start-up, {model.name}"
    with tempfile.TemporaryDirectory() as scratch:
        if options.stored is not None:
            model = stored_as(options.stored, model, Path(scratch))
            name += f", stored as {options.stored}"
        rows = measure(model, options.repeats)
    print_rows(name, rows)
    if options.json:
        write_json(options.json, name, rows)


if __name__ == "__main__":
    main()
