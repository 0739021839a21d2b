"""One update of an fp32 parameter by torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from tiermem.kernels.base import AdamWStep, SGDStep


def adamw(hyper: AdamWStep, param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor) -> Tensor:
    """The updated fp32 parameter; the moments are updated in place.

    The sequence of operations is that of the native kernel (``native/src/kernels_adamw.c``). A
    scalar is rounded to fp32 before it meets a tensor, as a tensor: torch is free to use a Python
    number in double.
    """

    def fp32(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float32, device=param.device)

    grad = grad * fp32(hyper.grad_scale)
    if hyper.weight_decay != 0.0 and hyper.decoupled:
        param = param * fp32(hyper.decay)
    elif hyper.weight_decay != 0.0:
        grad = fma(param, fp32(hyper.weight_decay), grad)
    weight = fp32(1 - hyper.beta1)
    from_grad = not bool(weight.abs() < 0.5)
    coefficient = weight - 1 if from_grad else weight
    exp_avg.copy_(fma(coefficient, grad - exp_avg, grad if from_grad else exp_avg))
    exp_avg_sq.copy_(fma(fp32(1 - hyper.beta2) * grad, grad, exp_avg_sq * fp32(hyper.beta2)))
    # A square root in double, rounded again, is the correctly rounded one (53 >= 2 * 24 + 2 bits);
    # torch's own for fp32 may come from a vector library that promises less.
    root = exp_avg_sq.double().sqrt().float()
    denominator = root / fp32(hyper.bias_correction2_sqrt) + fp32(hyper.eps)
    return param + exp_avg * fp32(-hyper.step_size) / denominator


def sgd(hyper: SGDStep, param: Tensor, momentum: Tensor | None, grad: Tensor) -> Tensor:
    """The updated fp32 parameter; the momentum buffer is updated in place. See :func:`adamw`."""

    def fp32(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float32, device=param.device)

    grad = grad * fp32(hyper.grad_scale)
    if hyper.weight_decay != 0.0:
        grad = fma(param, fp32(hyper.weight_decay), grad)
    if momentum is not None:
        if hyper.first:
            momentum.copy_(grad)
        else:
            damped = momentum * fp32(hyper.momentum)
            momentum.copy_(fma(fp32(1 - hyper.dampening), grad, damped))
        grad = fma(momentum, fp32(hyper.momentum), grad) if hyper.nesterov else momentum
    return fma(grad, fp32(-hyper.lr), param)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` of fp32 tensors rounded once.

    The product is exact in fp64. Their sum is rounded to odd there, and a value rounded to odd with
    at least two bits to spare rounds to fp32 as the exact one does (Boldo and Melquiond, "Emulation
    of a FMA and correctly rounded sums: proved algorithms using rounding to odd").
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    # Knuth's two-sum: total + error is the exact sum. The error is NaN where the total is not finite.
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    bits = total.view(torch.int64)
    inexact_even = ((error > 0) | (error < 0)) & (bits & 1 == 0)
    outward = (error > 0) == (total > 0)
    bits += inexact_even * torch.where(outward, 1, -1)
    return total.float()
