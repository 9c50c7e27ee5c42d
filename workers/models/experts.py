"""A mixture of experts: each token goes to the best few, and only what is chosen is computed."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.backend import KernelBackend, LinearWeight
from .config import ExpertsConfig
from .weights import ExpertsWeights, MlpWeights


def mix_experts(
    x: Tensor,
    weights: ExpertsWeights,
    config: ExpertsConfig,
    backend: KernelBackend,
    run_expert: Callable[[Tensor, MlpWeights], Tensor],
) -> Tensor:
    """x [T, hidden] → the weighted sum of what this rank's experts say, [T, hidden].

    Expert by expert in ascending order, so a token's sum does not depend on its neighbours.
    """
    scores, chosen = route(x, weights.router, config, backend)
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=config.num_experts).tolist()
    shares = scores.flatten().unsqueeze(1)
    out = torch.zeros_like(x)
    for expert, picks in enumerate(order.split(counts)):
        if len(picks) == 0 or not config.begin <= expert < config.end:
            continue
        rows = picks // config.num_active
        said = run_expert(x[rows], weights.experts[expert - config.begin])
        out.index_add_(0, rows, said * shares[picks])
    return out


def route(
    x: Tensor, router: LinearWeight, config: ExpertsConfig, backend: KernelBackend
) -> tuple[Tensor, Tensor]:
    """Weights [T, num_active] of x's dtype, and int64 [T, num_active]: of which experts."""
    probabilities = backend.linear(x, router).float().softmax(-1)
    scores, chosen = probabilities.topk(config.num_active, dim=-1)
    if config.normalise:
        scores = scores / scores.sum(-1, keepdim=True)
    return scores.to(x.dtype), chosen
