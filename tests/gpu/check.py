"""Proves the GPU half on a machine with one GPU, in under 8 minutes, without Ray.

    python tests/gpu/check.py [--json FILE] [--budget SECONDS] [--carried FOLDER] [--jit]
                              [--only kernels,models,swaps,speed] [--rehearse]

(a) every kernel against its plain-torch twin, (b) random-weight models of 1B and 8B against
transformers, (c) answers and bytes under swapping, (d) how fast it is, as shares of what the same
machine was measured to do. Needs no installation: the checkout is imported as it lies. --carried:
a folder of packages that the machine lacks, as `carry.sh` makes it. --jit: also what FlashInfer
compiles first (other head sizes, windows, soft caps, fp8), which takes minutes.

Where there is no GPU it does what can be done without one and says what it could not do;
--rehearse then runs every part on the CPU at toy sizes, kernels interpreted: the figures mean
nothing, the script is tried.

Exit code: 0 all passed; 1 something is wrong or too slow; 2 bad arguments; 3 no GPU, so nothing
was proved.
"""

import argparse
import json
import os
import sys
import tarfile
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PARTS = ("kernels", "models", "swaps", "speed")
NO_GPU = 3


def main() -> int:
    arguments = parse_arguments()
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        make_importable(Path(scratch))
        if arguments.carried is not None:
            unpack(arguments.carried, Path(scratch) / "carried")
        import torch

        has_gpu = torch.cuda.is_available()
        if not has_gpu:
            print(f"torch {torch.__version__} finds no CUDA device.")
            os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
        check = Check(arguments, Path(scratch), torch.device("cuda" if has_gpu else "cpu"))
        check.run()
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(check.as_json(), indent=2) + "\n")
        return check.conclude()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write all findings here")
    parser.add_argument("--budget", type=float, default=450.0, help="seconds; then parts are left")
    parser.add_argument("--carried", type=Path, help="a folder of packages, see carry.sh")
    parser.add_argument("--jit", action="store_true", help="also what FlashInfer compiles first")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--rehearse", action="store_true", help="toy sizes, on a CPU")
    arguments = parser.parse_args()
    unknown = set(arguments.only.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"--only {','.join(sorted(unknown))}: parts are {', '.join(PARTS)}")
    return arguments


def make_importable(scratch: Path) -> None:
    """The checkout as the package `pagefleet`, installed or not, and the tests' helpers."""
    (scratch / "site").mkdir()
    (scratch / "site" / "pagefleet").symlink_to(TESTS.parent)
    sys.path[:0] = [str(TESTS), str(scratch / "site")]


def unpack(carried: Path, site: Path) -> None:
    """What `carry.sh` has packed, where imports find it after what the machine has itself."""
    sys.path.append(str(site))
    for wheel in sorted(carried.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    for packed in sorted(carried.glob("*.txz")):
        # Modules compiled beforehand lie where FlashInfer looks for them first.
        is_compiled = packed.name.startswith("flashinfer_ops")
        with tarfile.open(packed) as archive:
            archive.extractall(site / "flashinfer/data/aot" if is_compiled else site, filter="data")


class Check:
    """The parts, in an order in which each leaves time for the next."""

    def __init__(self, arguments: argparse.Namespace, scratch: Path, device) -> None:
        from gpu.clock import Clock, Report

        self.arguments = arguments
        self.scratch = scratch
        self.device = device
        self.clock = Clock(device)
        self.report = Report()
        self.began = time.monotonic()
        self.is_small = device.type != "cuda"

    def run(self) -> None:
        if self.is_small and not self.arguments.rehearse:
            for part in PARTS:
                self.report.skipped[part] = "needs a GPU"
            return
        parts: dict[str, Callable[[], None]] = {
            "kernels": self.check_kernels,
            "speed": self.measure,
            "swaps": self.check_swaps,
            "models": self.check_models,
        }
        for name, part in parts.items():
            if name not in self.arguments.only.split(","):
                continue
            left = self.arguments.budget - (time.monotonic() - self.began)
            if left < 20:
                self.report.skipped[name] = f"{left:.0f} s were left of the budget"
                continue
            self.guarded(name, part)

    def guarded(self, name: str, part: Callable[[], object]) -> None:
        """One part that breaks does not take the others' answers with it."""
        began = time.monotonic()
        print(f"== {name}, after {began - self.began:.0f} s", flush=True)
        try:
            part()
        except Exception as error:
            traceback.print_exc()
            self.report.skipped[name] = f"broke: {type(error).__name__}: {error}"

    def add_all(self, findings: Iterable[object]) -> None:
        for finding in findings:
            # The figures of a rehearsal mean nothing.
            judged = not (self.is_small and finding.part == "speed")
            self.report.add(finding if judged else replace(finding, target=None))

    # (a)
    def check_kernels(self) -> None:
        from gpu.clock import Finding
        from gpu.kernel_checks import check_determinism

        for suite in self.suites():
            self.guarded(f"kernels of {suite.backend.name}", partial(self.compare, suite))
        found = check_determinism(str(self.device), self.is_small)
        self.report.add(
            Finding("kernels", found.case, found.error, "tolerances", 1.0, at_most=True)
        )

    def compare(self, suite) -> None:
        from gpu.clock import Finding

        for found in suite.run():
            self.report.add(
                Finding("kernels", found.case, found.error, "tolerances", 1.0, at_most=True)
            )

    def suites(self):
        import torch
        from attention_factories import Heads
        from gpu.kernel_checks import Suite

        from pagefleet.kernels.triton_backend import TritonBackend

        name = str(self.device)
        odd = (Heads(4, 2, 16),) if self.is_small else (
            Heads(32, 8, 128), Heads(9, 3, 64), Heads(3, 3, 80), Heads(8, 1, 256), Heads(2, 1, 8)
        )  # fmt: skip
        yield Suite(TritonBackend(), torch.float32, odd, name, is_small=self.is_small)
        if not self.is_small:  # the interpreter cannot multiply such
            yield Suite(TritonBackend(), torch.bfloat16, odd, name)
        flashinfer = self.flashinfer()
        if flashinfer is None:
            return
        sizes = (Heads(32, 8, 128), Heads(16, 8, 128))
        if self.arguments.jit:
            sizes += (Heads(8, 2, 64), Heads(8, 1, 256))
        more = self.arguments.jit
        yield Suite(flashinfer, torch.bfloat16, sizes, name, with_windows=more, with_fp8=more)

    def flashinfer(self):
        """The backend, or None with the reason noted."""
        if self.is_small:
            return None
        try:
            from pagefleet.kernels.flashinfer_backend import FlashInferBackend

            return FlashInferBackend(self.device)
        except ImportError as error:
            self.report.skipped["flashinfer"] = str(error)
            return None

    def model(self, name: str, shape) -> Path:
        import torch
        from gpu.random_models import write_model

        folder = self.scratch / name
        if not folder.exists():
            began = time.monotonic()
            dtype = torch.float32 if self.is_small else torch.bfloat16
            write_model(folder, shape, dtype, self.device)
            print(f"wrote {name} in {time.monotonic() - began:.0f} s", flush=True)
        return folder

    def shapes(self):
        from gpu.random_models import SHAPE_1B, SHAPE_8B, TINY

        if self.is_small:
            return {"tiny": TINY}
        return {"1B": SHAPE_1B, "8B": SHAPE_8B}

    # (b)
    def check_models(self) -> None:
        from gpu.model_checks import compare_with_transformers

        num_tokens = 8 if self.is_small else 64
        for name, shape in self.shapes().items():
            folder = self.model(name, shape)
            self.add_all(
                compare_with_transformers(folder, self.device, shape.vocab_size, name, num_tokens)
            )

    # (c)
    def check_swaps(self) -> None:
        from gpu.model_checks import check_swapping, free

        name, shape = next(iter(self.shapes().items()))
        self.add_all(check_swapping(self.model(name, shape), self.device, shape.vocab_size))
        free(self.device)

    # (d)
    def measure(self) -> None:
        import torch
        from gpu.measurements import (
            REHEARSAL,
            Sizes,
            measure_copies,
            measure_decode_attention,
            measure_peaks,
            measure_steps,
        )
        from gpu.model_checks import free

        from pagefleet.kernels.triton_backend import TritonBackend
        from pagefleet.workers.block_storage import BlockLayout

        sizes = REHEARSAL if self.is_small else Sizes()
        dtype = torch.float32 if self.is_small else torch.bfloat16
        peaks = measure_peaks(self.clock, sizes)
        self.add_all(peaks.findings())
        backends = [TritonBackend()]
        flashinfer = self.flashinfer()
        if flashinfer is not None:
            backends.append(flashinfer)
        arguments = (self.clock, sizes, peaks)
        for backend in backends:
            kv_dtypes = [dtype]
            if backend is backends[0] or self.arguments.jit:
                kv_dtypes.append(torch.float8_e4m3fn)
            self.add_all(measure_decode_attention(backend, *arguments, kv) for kv in kv_dtypes)
        heads = sizes.heads
        num_layers = 2 if self.is_small else 32
        layout = BlockLayout(num_layers, 16, heads.num_kv_heads, heads.head_dim, dtype)
        self.add_all(measure_copies(layout, backends[0], *arguments))
        free(self.device)
        name, shape = list(self.shapes().items())[-1]
        self.add_all(measure_steps(self.model(name, shape), shape, *arguments))
        free(self.device)

    def as_json(self) -> dict[str, object]:
        return {
            "benchmark": "gpu_check",
            "machine": self.machine(),
            "seconds": round(time.monotonic() - self.began, 1),
            "findings": [asdict(f) | {"passed": f.passed} for f in self.report.findings],
            "skipped": self.report.skipped,
        }

    def machine(self) -> str:
        import torch

        if self.device.type != "cuda":
            return f"no GPU, torch {torch.__version__}"
        return f"{torch.cuda.get_device_name(self.device)}, torch {torch.__version__}"

    def conclude(self) -> int:
        report = self.report
        print(f"== {self.machine()}, {time.monotonic() - self.began:.0f} s")
        for part, reason in report.skipped.items():
            print(f"not done: {part}: {reason}")
        broken = [part for part, why in report.skipped.items() if why.startswith("broke")]
        if self.is_small:
            print("no GPU: nothing was proved" + (f"; {broken} broke" if broken else ""))
            return 1 if broken or report.num_missed else NO_GPU
        missed = report.num_missed
        print(f"{len(report.findings)} findings, {missed} missed, {len(report.skipped)} not done")
        return 1 if missed or report.skipped else 0


if __name__ == "__main__":
    sys.exit(main())
