"""Optimizers as people write them themselves."""

from __future__ import annotations

from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: Any = (0.9, 0.99), decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.data.mul_(1 - group["lr"] * group["decay"])
                update = state["exp_avg"] * beta1 + p.grad * (1 - beta1)
                p.add_(update.sign(), alpha=-group["lr"])
                state["exp_avg"] = state["exp_avg"] * beta2 + p.grad * (1 - beta2)  # a new tensor


class Lamb(torch.optim.Optimizer):
    """A step as long as the parameter's norm says: couples elements."""

    def __init__(self, params: Any, lr: float = 1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * float(p.norm() / p.grad.norm()))


class Noisy(torch.optim.Optimizer):
    """Langevin dynamics: adds noise."""

    def __init__(self, params: Any, lr: float = 1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad + torch.randn_like(p), alpha=-group["lr"])


class Counting(torch.optim.Optimizer):
    """Keeps its step count in the parameter group, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float = 1e-3):
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / (1 + group["k"]))
            group["k"] += 1


class Base(torch.optim.Optimizer):
    """Calls ``change`` for each parameter; subclasses say how an optimizer misbehaves."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["n"] = state.get("n", 0) + 1
                    self.change(group, p, state)

    def change(self, group: Any, p: Any, state: Any) -> None:
        p.add_(p.grad, alpha=-group["lr"])


class CountsItself(Base):
    """Warms up by a count of its own."""

    def __init__(self, params: Any, lr: float = 1e-2):
        self.count = 0
        super().__init__(params, lr)

    def change(self, group: Any, p: Any, state: Any) -> None:
        self.count += 1
        p.add_(p.grad, alpha=-group["lr"] * min(1.0, self.count / 50))


class CountsLate(Base):
    """Puts a count into its group that it did not have."""

    def change(self, group: Any, p: Any, state: Any) -> None:
        group["k"] = group.get("k", 0) + 1
        p.add_(p.grad, alpha=-group["lr"])


class NoisyLater(Base):
    def change(self, group: Any, p: Any, state: Any) -> None:
        noise = torch.randn_like(p) if state["n"] > 3 else 0
        p.add_(p.grad + noise, alpha=-group["lr"])


class ClipsLarge(Base):
    """By each tensor's norm, but only where that is large."""

    def change(self, group: Any, p: Any, state: Any) -> None:
        p.sub_(group["lr"] * p.grad / max(1.0, float(p.grad.norm()) / 100))


class KeepsLargest(Base):
    """A number that depends on values, from the 20th step on: no trial is as long."""

    def change(self, group: Any, p: Any, state: Any) -> None:
        if state["n"] >= 20:
            state["amax"] = max(state.get("amax", 0.0), float(p.grad.abs().max()))
        p.add_(p.grad, alpha=-group["lr"])


class StartsLate(Base):
    """A state that comes with the fifth step (lookahead)."""

    def change(self, group: Any, p: Any, state: Any) -> None:
        p.add_(p.grad, alpha=-group["lr"])
        if state["n"] == 5:
            state["slow"] = p.clone()


class StartsVeryLate(Base):
    def change(self, group: Any, p: Any, state: Any) -> None:
        p.add_(p.grad, alpha=-group["lr"])
        if state["n"] == 20:
            state["slow"] = p.clone()


class FailsLater(Base):
    def change(self, group: Any, p: Any, state: Any) -> None:
        if state["n"] == 20:
            raise ZeroDivisionError("twenty")
        p.add_(p.grad, alpha=-group["lr"])


class Masked(Base):
    """States of other dtypes: whether an element's gradient was ever above zero, and how often."""

    def change(self, group: Any, p: Any, state: Any) -> None:
        if "mask" not in state:
            state["mask"] = torch.zeros_like(p, dtype=torch.bool)
            state["times"] = torch.zeros_like(p, dtype=torch.int32)
        state["mask"] |= p.grad > 0
        state["times"] += (p.grad > 0).int()
        p.add_(p.grad * state["mask"], alpha=-group["lr"])


class ManyOptions(torch.optim.SGD):
    """A constructor that passes everything on."""

    def __init__(self, params: Any, **options: Any):
        super().__init__(params, **options)


class Factor(torch.optim.Optimizer):
    """An argument that is no option of its groups."""

    def __init__(self, params: Any, lr: float = 1e-2, factor: float = 1.0):
        self.factor = factor
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * self.factor)
