"""The fp32 kernels are torch's fused AdamW, Adam and SGD: bit-equal to their vector paths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tiermem.kernels import AdamWStep, Kernels, SGDStep

needs_fma = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torch's own arithmetic differs where it runs without AVX2",
)


@dataclass(frozen=True)
class Case:
    """One setting of a torch optimizer, and the same update by the kernel."""

    optimizer: type[torch.optim.Optimizer]
    options: dict[str, Any]
    states: tuple[str, ...]
    update: Callable[[Kernels, int, list[Tensor], Tensor, float], None]  # step, states, grad, scale

    @property
    def sign(self) -> float:
        return -1.0 if self.options.get("maximize") else 1.0


# beta1 <= 0.5 takes the other form of torch's lerp.
ADAM = [
    (1e-3, 0.9, 0.999, 1e-8, 0.01, False),
    (3e-4, 0.9, 0.95, 1e-6, 0.0, False),
    (1e-2, 0.5, 0.9, 1e-10, 0.3, True),
    (0.1, 0.4, 0.5, 1e-3, 0.1, False),
]
# lr, momentum, dampening, weight decay, nesterov, maximize
SGD = [
    (0.1, 0.0, 0.0, 0.0, False, False),
    (0.1, 0.0, 0.0, 0.01, False, True),
    (0.03, 0.9, 0.0, 0.0, False, False),
    (0.03, 0.9, 0.3, 0.1, False, True),
    (0.01, 0.7, 0.0, 0.1, True, False),
]


def adam_case(
    lr: float, beta1: float, beta2: float, eps: float, decay: float, maximize: bool, decoupled: bool
) -> Case:
    options = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": decay}
    sign = -1.0 if maximize else 1.0

    def update(kernels: Kernels, step: int, state: list[Tensor], grad: Tensor, scale: float) -> None:
        hyper = AdamWStep(lr, beta1, beta2, eps, decay, step, sign * scale, decoupled)
        kernels.adamw_fp32(hyper, *state, grad)

    optimizer = torch.optim.AdamW if decoupled else torch.optim.Adam
    return Case(optimizer, options | {"maximize": maximize}, ("exp_avg", "exp_avg_sq"), update)


def sgd_case(
    lr: float, momentum: float, dampening: float, decay: float, nesterov: bool, maximize: bool
) -> Case:
    options = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": decay}
    sign = -1.0 if maximize else 1.0

    def update(kernels: Kernels, step: int, state: list[Tensor], grad: Tensor, scale: float) -> None:
        hyper = SGDStep(lr, momentum, dampening, decay, nesterov, step == 1, sign * scale)
        kernels.sgd(hyper, state[0], None, state[1] if momentum else None, grad)

    options |= {"nesterov": nesterov, "maximize": maximize}
    return Case(torch.optim.SGD, options, ("momentum_buffer",) if momentum else (), update)


CASES = [
    *(pytest.param(adam_case(*case, True), id=f"adamw{i}") for i, case in enumerate(ADAM)),
    *(pytest.param(adam_case(*case, False), id=f"adam{i}") for i, case in enumerate(ADAM)),
    *(pytest.param(sgd_case(*case), id=f"sgd{i}") for i, case in enumerate(SGD)),
]


def gradients(numel: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(numel, generator=generator) * 10 ** (torch.rand(numel, generator=generator) * 6 - 4)
        for _ in range(count)
    ]


def both(
    kernels: Kernels, numel: int, case: Case, steps: int, scale: float = 1.0, resync: bool = False
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """(ours, torch's) parameter and states after each step."""
    start = torch.randn(numel, generator=torch.Generator().manual_seed(2))
    param = torch.nn.Parameter(start.clone())
    optimizer = case.optimizer([param], fused=True, **case.options)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(0.0)
    ours = [start.clone(), *(torch.zeros(numel) for _ in case.states)]
    history = []
    for step, grad in enumerate(gradients(numel, steps), 1):
        param.grad = grad.clone()
        optimizer.step()
        case.update(kernels, step, ours, grad, 1 / scale)
        state = optimizer.state[param]
        theirs = [param.detach().clone(), *(state[name].clone() for name in case.states)]
        history.append(([t.clone() for t in ours], theirs))
        if resync:
            ours = [t.clone() for t in theirs]
    return history


@needs_fma
@pytest.mark.parametrize("scale", [1.0, 64.0])
@pytest.mark.parametrize("case", CASES)
def test_vector_path_is_bit_equal(best: Kernels, case: Case, scale: float) -> None:
    # A multiple of the vector length for whatever number of threads torch slices for.
    for step, (ours, theirs) in enumerate(both(best, 2**18, case, steps=4, scale=scale), 1):
        for name, mine, other in zip(("param", *case.states), ours, theirs, strict=True):
            assert torch.equal(mine, other), f"{name} after step {step}"


@needs_fma
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("numel", [1, 13, 30_003])
def test_tails_are_within_an_ulp(best: Kernels, numel: int, case: Case) -> None:
    """Per step: torch rounds differently at the end of each of its slices. An ulp of the terms that
    are summed: the value before, the value after, and the gradient with its decay (of which the
    update of the parameter is at most the learning rate, or shows in the difference)."""
    before = [torch.zeros(numel) for _ in ("param", *case.states)]
    before[0] = torch.randn(numel, generator=torch.Generator().manual_seed(2))
    history = both(best, numel, case, steps=4, resync=True)
    for (ours, theirs), grad in zip(history, gradients(numel, 4), strict=True):
        different = torch.zeros(numel, dtype=torch.bool)
        gradient = grad.abs() + case.options["weight_decay"] * before[0].abs()
        terms = {"param": case.options["lr"], "exp_avg_sq": gradient**2}
        for i, name in enumerate(("param", *case.states)):
            size = before[i].abs() + theirs[i].abs() + terms.get(name, gradient)
            difference = (ours[i] - theirs[i]).abs()
            assert (difference <= torch.finfo(torch.float32).eps * size).all(), name
            different |= difference > 0
        assert different.sum() <= 16 * (torch.get_num_threads() + 1)
        before = theirs


def test_without_weight_decay_the_factor_is_not_applied(opened: dict[str, Kernels]) -> None:
    """With gradient and moments zero nothing may change, -0.0 and denormals included."""
    param = torch.tensor([-0.0, 1e-45, 1.0, -3e38]).repeat(9)
    for kernels in opened.values():
        for decoupled in (True, False):
            result = param.clone()
            zeros = [torch.zeros(36) for _ in range(3)]
            step = AdamWStep(0.1, 0.9, 0.99, 1e-8, 0.0, 1, decoupled=decoupled)
            kernels.adamw_fp32(step, result, *zeros)
            # The update is -0.0 here, and -0.0 + -0.0 = -0.0.
            assert torch.equal(result.view(torch.int32), param.view(torch.int32)), kernels.name
