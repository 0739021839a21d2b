"""The fp32 kernel is torch.optim.AdamW(fused=True): bit-equal to its vector path."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tiermem.kernels import AdamWStep, Kernels

# lr, beta1, beta2, eps, weight decay; beta1 <= 0.5 takes the other form of torch's lerp.
SETTINGS = [
    (1e-3, 0.9, 0.999, 1e-8, 0.01),
    (3e-4, 0.9, 0.95, 1e-6, 0.0),
    (1e-2, 0.5, 0.9, 1e-10, 0.3),
    (0.1, 0.4, 0.5, 1e-3, 0.1),
]

needs_fma = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torch's own arithmetic differs where it runs without AVX2",
)


def gradients(numel: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(numel, generator=generator) * 10 ** (torch.rand(numel, generator=generator) * 6 - 4)
        for _ in range(count)
    ]


def both(
    kernels: Kernels, numel: int, setting: tuple[float, ...], steps: int, resync: bool = False
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """(ours, torch's) parameter and moments after each step."""
    lr, beta1, beta2, eps, weight_decay = setting
    start = torch.randn(numel, generator=torch.Generator().manual_seed(2))
    param = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW(
        [param], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay, fused=True
    )
    ours = [start.clone(), torch.zeros(numel), torch.zeros(numel)]
    history = []
    for step, grad in enumerate(gradients(numel, steps), 1):
        param.grad = grad.clone()
        optimizer.step()
        kernels.adamw_fp32(AdamWStep(lr, beta1, beta2, eps, weight_decay, step), *ours, grad)
        state = optimizer.state[param]
        theirs = [param.detach().clone(), state["exp_avg"].clone(), state["exp_avg_sq"].clone()]
        history.append(([t.clone() for t in ours], theirs))
        if resync:
            ours = [t.clone() for t in theirs]
    return history


@needs_fma
@pytest.mark.parametrize("setting", SETTINGS)
def test_vector_path_is_bit_equal(best: Kernels, setting: tuple[float, ...]) -> None:
    # A multiple of the vector length for whatever number of threads torch slices for.
    for step, (ours, theirs) in enumerate(both(best, 2**18, setting, steps=6), 1):
        for name, mine, other in zip(("param", "exp_avg", "exp_avg_sq"), ours, theirs, strict=True):
            assert torch.equal(mine, other), f"{name} after step {step}"


@needs_fma
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("numel", [1, 13, 100_003])
def test_tails_are_within_an_ulp(best: Kernels, numel: int, setting: tuple[float, ...]) -> None:
    """Per step: torch rounds differently at the end of each of its slices. An ulp of what is summed:
    of the moment, and of the larger of parameter and update."""
    for ours, theirs in both(best, numel, setting, steps=4, resync=True):
        different = torch.zeros(numel, dtype=torch.bool)
        for mine, other in zip(ours[1:], theirs[1:], strict=True):
            ulps = (mine.view(torch.int32) - other.view(torch.int32)).abs()
            assert ulps.max() <= 1
            different |= ulps > 0
        ulp = torch.finfo(torch.float32).eps * torch.maximum(theirs[0].abs(), torch.tensor(setting[0]))
        difference = (ours[0] - theirs[0]).abs()
        assert (difference <= ulp).all()
        different |= difference > 0
        assert different.sum() <= 16 * (torch.get_num_threads() + 1)


def test_without_weight_decay_the_factor_is_not_applied(opened: dict[str, Kernels]) -> None:
    """With gradient and moments zero nothing may change, -0.0 and denormals included."""
    param = torch.tensor([-0.0, 1e-45, 1.0, -3e38]).repeat(9)
    for kernels in opened.values():
        result = param.clone()
        zeros = [torch.zeros(36) for _ in range(3)]
        kernels.adamw_fp32(AdamWStep(0.1, 0.9, 0.99, 1e-8, 0.0, 1), result, *zeros)
        # The update is -0.0 here, and -0.0 + -0.0 = -0.0.
        assert torch.equal(result.view(torch.int32), param.view(torch.int32)), kernels.name
