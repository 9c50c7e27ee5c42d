"""How near a compiled kernel has to come to its plain-torch twin."""

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCES = {torch.float32: (1e-5, 2e-5), torch.bfloat16: (2e-2, 2e-2)}


def assert_near(actual: Tensor, expected: Tensor) -> None:
    rtol, atol = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
