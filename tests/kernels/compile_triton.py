"""Compiles every Triton kernel to machine code for an H100 or H200, on a machine without a GPU.

Our backend is called as always, on tensors in host memory; each launch is compiled instead of
run. Run as a script, since a process either interprets kernels or compiles them.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from attention_factories import Heads, make_cos_sin, make_step
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 * 1024  # that one program may have there
FP8 = torch.float8_e4m3fn


class PretendedDriver:
    """As much of a GPU as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def main() -> None:
    from pagefleet.kernels.triton_backend import TritonBackend

    driver.set_active(PretendedDriver())
    compiled: list[str] = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        assert kernel.asm["cubin"], f"{self.fn.__name__} has no machine code"
        assert kernel.metadata.shared <= SHARED_BYTES, f"{self.fn.__name__} would not start"
        compiled.append(self.fn.__name__)
        return kernel

    JITFunction.run = compile_only
    lens = ([1, 700, 9], [1, 1, 7])
    cases = [
        (torch.bfloat16, torch.bfloat16, Heads(8, 2, 128)),
        (torch.bfloat16, FP8, Heads(8, 2, 128)),
        (torch.float32, torch.float32, Heads(3, 3, 80)),
    ]
    for dtype, kv_dtype, heads in cases:
        step = make_step(heads, 16, *lens, dtype=dtype, kv_dtype=kv_dtype)
        cos_sin = make_cos_sin(1024, heads.head_dim)
        arguments = (cos_sin, step.layer, step.metadata)
        TritonBackend().rope_and_cache(step.q, step.k, step.v, *arguments)
        TritonBackend().attention(step.q, step.layer, step.metadata, 0.1)
        deterministic = TritonBackend(deterministic=True)
        deterministic.attention(step.q, step.layer, step.metadata, 0.1, 40, 30.0)
        backend, x, weight = TritonBackend(), torch.zeros(5, 576, dtype=dtype), torch.ones(576)
        backend.rms_norm(x, weight.to(dtype), 1e-5)
        backend.add_rms_norm(x, x.clone(), weight.to(dtype), 1e-5)
        backend.silu_and_mul(x)
        backend.gelu_tanh_and_mul(x)
        ids = torch.arange(2)
        backend.copy_slots(torch.zeros(4, 2, 2, 16, 3, 5, dtype=dtype), ids, ids + 2, ids)
    print(" ".join(sorted(set(compiled))))


if __name__ == "__main__":
    main()
