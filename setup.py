"""Builds the optional C++ kernels beside the pure-Python package.

The kernels are compiled once per instruction set and the library chooses one when it loads. Without
a compiler the install succeeds and plain torch is used. PAGEFLEET_REQUIRE_NATIVE=1 makes a failure
fatal, PAGEFLEET_SKIP_NATIVE=1 builds nothing.
"""

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCES = Path("kernels/csrc")
FLAGS = ["-O3", "-g0", "-std=c++17", "-fopenmp", "-fvisibility=hidden"]
AVX2 = ["-mavx2", "-mfma", "-mprfchw"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
AVX512_BF16 = [*AVX512, "-mavx512bf16"]
X86_SETS = {
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512_bf16": AVX512_BF16,
    "amx": [*AVX512_BF16, "-mamx-tile", "-mamx-bf16"],
}


def instruction_sets() -> dict[str, list[str]]:
    """The sets to try besides the portable one, with their compiler flags."""
    return X86_SETS if platform.machine() in ("x86_64", "AMD64") else {}


class BuildKernels(build_ext):
    """Compiles isa.cpp for each instruction set and library.cpp for those that compiled."""

    def get_ext_filename(self, fullname: str) -> str:
        # A plain library that ctypes loads: no Python ABI in its name.
        return os.path.join(*fullname.split(".")) + ".so"

    def get_export_symbols(self, ext: object) -> list[str]:
        return []

    def build_extension(self, ext: Extension) -> None:
        if ext is not kernels:
            super().build_extension(ext)
            return
        sets = {"portable": list[str](), **instruction_sets()}
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # each takes a compiler 20 s
            found = pool.map(self._compile_set, sets, sets.values())
            compiled = dict(zip(sets, found, strict=True))
        if compiled["portable"] is None:
            raise CompileError("kernels/csrc does not compile")
        present = [name for name, objects in compiled.items() if objects is not None]
        objects = [path for some in compiled.values() for path in some or ()]
        macros = [(f"PF_HAVE_{name}", "1") for name in present if name != "portable"]
        objects += self._compile("library", "library", [], macros)
        target = self.get_ext_fullpath(ext.name)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(
            objects, target, extra_postargs=["-fopenmp", "-static-libstdc++"], target_lang="c++"
        )

    def _compile_set(self, name: str, flags: list[str]) -> list[str] | None:
        """The objects for one instruction set; None where the compiler does not know it."""
        try:
            return self._compile("isa", name, flags, [("PF_ISA", name)])
        except CompileError:
            self.warn(f"this compiler cannot build for {name}: left out")
            return None

    def _compile(
        self, source: str, folder: str, flags: list[str], macros: list[tuple[str, str | None]]
    ) -> list[str]:
        return self.compiler.compile(
            [str(SOURCES / f"{source}.cpp")],
            output_dir=os.path.join(self.build_temp, folder),
            macros=macros,
            extra_postargs=FLAGS + flags,
        )


kernels = Extension(
    name="pagefleet.kernels._cpu",
    sources=[str(SOURCES / "isa.cpp"), str(SOURCES / "library.cpp")],
    depends=[str(path) for path in sorted(SOURCES.iterdir())],
    language="c++",
    optional=os.environ.get("PAGEFLEET_REQUIRE_NATIVE") != "1",
)

# Collectives through shared memory: one source, no OpenMP.
all_reduce = Extension(
    name="pagefleet.kernels._all_reduce",
    sources=[str(SOURCES / "all_reduce.cpp")],
    depends=[str(SOURCES / "rank_group.h")],
    language="c++",
    extra_compile_args=[flag for flag in FLAGS if flag != "-fopenmp"],
    extra_link_args=["-static-libstdc++"],
    optional=os.environ.get("PAGEFLEET_REQUIRE_NATIVE") != "1",
)

setup(
    ext_modules=[] if os.environ.get("PAGEFLEET_SKIP_NATIVE") == "1" else [kernels, all_reduce],
    cmdclass={"build_ext": BuildKernels},
)
