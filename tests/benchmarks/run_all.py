"""Runs the benchmarks, one after the other, and writes their tables into RESULTS.md.

Each section is one command. What it measured is kept beside RESULTS.md as JSON, with the command,
the machine and its load, and stands there between `<!-- table: NAME -->` and `<!-- end -->`; what
is written around the tables stays. A section that has no such place is only run.

    python tests/benchmarks/run_all.py [SECTION ...] [--quick] [--render-only]

`--quick` runs each section once at its smallest size, in minutes, and writes nothing. Sections
beside vLLM have it as their reference where PEER_VLLM_PYTHON names its interpreter.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmark_report import markdown_table

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "RESULTS.md"
KEPT = FOLDER / "results"


@dataclass(frozen=True, slots=True)
class Section:
    """One run of one benchmark. quick: other arguments for a short one; None = it has none."""

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] | None = None

    @property
    def command(self) -> str:
        """As it is typed."""
        return " ".join((self.script, *self.arguments))


def _engine(
    shape: str, *arguments: str, part: str = "", quick: tuple[str, ...] | None = None
) -> Section:
    name = f"engine-{shape}-{part}" if part else f"engine-{shape}"
    return Section(name, "bench_engine.py", ("--shape", shape, *arguments), quick)


_LARGE = ("--pool-tokens", "20480")  # of a model whose KV cache takes 229 KB a token
_PUBLISHED = ("--stored", "bfloat16")
_NARROW = ("--weight-dtype", "bfloat16", "--workload", "single", "batch32")
_LOOSE = ("--workload", "single", "batch32", "batch8long", "prefix32", "nsample", "loose")
# Apart by workload, so that each is done within minutes.
SECTIONS = (
    Section("startup", "bench_startup.py", (), ("--repeats", "1")),
    Section("startup-published", "bench_startup.py", _PUBLISHED),
    _engine("4x256", *_LOOSE, quick=("--workload", "single", "batch32", "--repeats", "1")),
    _engine("4x256", "--workload", "prefix32", "prefix32-off", "loose", "tight", part="pool"),
    _engine(
        "4x256", "--continuous", "--workload", "batch32", "prefix32", "nsample", part="continuous"
    ),
    _engine("smollm2", "--workload", "single", "batch32", "nsample"),
    _engine("smollm2", "--workload", "batch8long", "--repeats", "3", part="long"),
    _engine("smollm2", "--workload", "prefix32", "prefix32-off", "--repeats", "1", part="prefix"),
    _engine("smollm2", "--workload", "loose", "tight", "--repeats", "1", part="pool"),
    _engine("qwen3-0.6b", "--workload", "single", "batch32", "--repeats", "2", *_LARGE),
    _engine("qwen3-0.6b", "--workload", "prefix32", "--repeats", "1", *_LARGE, part="prefix"),
    _engine("smollm2", *_LOOSE, *_PUBLISHED, "--repeats", "2", part="published"),
    _engine(
        "qwen3-0.6b",
        *("--workload", "single", "batch32", "prefix32", "--repeats", "1"),
        *(*_LARGE, *_PUBLISHED),
        part="published",
    ),
    _engine("4x256", *_NARROW, part="bfloat16"),
    _engine("smollm2", *_NARROW, part="bfloat16"),
    _engine(
        "smollm2",
        *("--dtype", "bfloat16", "--workload", "single", "batch32"),
        part="all-bfloat16",
    ),
    _engine("qwen3-0.6b", *_NARROW, "--repeats", "1", *_LARGE, part="bfloat16"),
    Section("stream", "bench_stream.py", (), ("--shape", "4x256", "--repeats", "1")),
    Section("step", "bench_step.py", (), ("--repeats", "1", "--running", "1", "32")),
    Section(
        "prompts", "bench_prompts.py", (), ("--repeats", "1", "--contexts", "256", "512", "1024")
    ),
    Section("step-sampled", "bench_step.py", ("--sampled",)),
    Section("speculation", "bench_speculation.py"),
    Section("swap", "bench_swap.py", (), ("--megabytes", "64", "--repeats", "3")),
    Section("block-pool", "bench_block_pool.py", ("--rounds", "8"), ("--rounds", "1")),
    Section("kernels", "bench_kernels.py", ("--threads", "2"), ("--repeats", "2")),
    Section("decode", "bench_decode.py", (), ("--shape", "4x256", "--steps", "4")),
    Section("all-reduce", "bench_all_reduce.py", (), ("--repeats", "50")),
    Section("tensor-parallel", "bench_tensor_parallel.py", (), ("--rounds", "1")),
    Section("router", "bench_router.py", ("--unique", "100000"), ("--quick",)),
    Section("routing", "bench_routing.py"),
    Section("overload", "bench_overload.py"),
)


def run(section: Section, is_quick: bool) -> bool:
    """Whether it ended well."""
    arguments = section.quick if is_quick else section.arguments
    assert arguments is not None, f"{section.name} has no short run"
    command = [sys.executable, str(FOLDER / section.script), *arguments]
    print(f"\n== {section.name}: {section.script} {' '.join(arguments)}", flush=True)
    path = KEPT / f"{section.name}.json"
    if not is_quick:
        KEPT.mkdir(exist_ok=True)
        command += ["--json", str(path)]
    load_before = os.getloadavg()[0]
    if subprocess.run(command, check=False).returncode != 0:
        return False
    if not is_quick:
        report = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(report, dict):  # routing writes a list of its own kind
            report["command"] = section.command
            report["load_before"] = round(load_before, 1)
            path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return True


def render(text: str, name: str, table: str) -> str:
    """`text` with this table in its place, or as it is where it has no place."""
    begin, end = f"<!-- table: {name} -->\n", "<!-- end -->\n"
    if begin not in text:
        return text
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{RESULTS.name}: the table of {name} has no end")
    return f"{before}{begin}{table}{end}{after}"


def render_all() -> None:
    """Every table of which there is JSON."""
    text = RESULTS.read_text(encoding="utf-8")
    for section in SECTIONS:
        path = KEPT / f"{section.name}.json"
        if path.exists():
            report = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(report, dict):
                text = render(text, section.name, markdown_table(report))
    RESULTS.write_text(text, encoding="utf-8")


def choose(names: Sequence[str], is_quick: bool) -> list[Section]:
    known = {section.name: section for section in SECTIONS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no section {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [known[name] for name in names] or list(SECTIONS)
    return [section for section in chosen if not is_quick or section.quick is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="all where absent")
    parser.add_argument("--quick", action="store_true", help="minutes; writes nothing")
    parser.add_argument("--render-only", action="store_true", help="tables from the kept JSON")
    options = parser.parse_args()
    failed: list[str] = []
    if not options.render_only:
        for section in choose(options.sections, options.quick):
            if not run(section, options.quick):
                failed.append(section.name)
    if not options.quick:
        render_all()
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
