"""Every variant of a kernel gives the same bits, for any length, start and slicing."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tiermem.kernels import AdamWStep, Kernels, SGDStep

LENGTHS = [0, 1, 7, 8, 15, 16, 17, 127, 129, 4095, 2**16, 2**17 + 1]
STEPS = [
    AdamWStep(1e-3, 0.9, 0.95, 1e-8, 0.1, 3, grad_scale=0.37),
    AdamWStep(1e-2, 0.4, 0.999, 1e-6, 0.0, 1, grad_scale=-1.0),
    AdamWStep(1e-2, 0.9, 0.99, 1e-8, 0.3, 2, grad_scale=-0.5, decoupled=False),
]
SGD_STEPS = [
    SGDStep(1e-2, 0.0, 0.0, 0.1, nesterov=False, first=True, grad_scale=0.37),
    SGDStep(1e-2, 0.9, 0.3, 0.0, nesterov=False, first=True, grad_scale=-1.0),
    SGDStep(1e-2, 0.9, 0.3, 0.1, nesterov=False, first=False),
    SGDStep(1e-2, 0.7, 0.0, 0.1, nesterov=True, first=False, grad_scale=0.37),
]

State = list[Tensor]
Update = Callable[[Kernels, State], None]


def random_state(numel: int, form: str, grad_dtype: torch.dtype, seed: int = 0) -> State:
    """Parameter, (hi, lo) or (copy, master), moments, gradient; magnitudes down to denormals."""
    generator = torch.Generator().manual_seed(seed)

    def wide() -> Tensor:
        exponent = torch.rand(numel, generator=generator) * 50 - 40
        return torch.randn(numel, generator=generator) * 10**exponent

    if form == "fp32":
        weights = [wide()]
    elif form == "split":
        lo = torch.randint(-(2**15), 2**15, (numel,), generator=generator, dtype=torch.int16)
        weights = [torch.randn(numel, generator=generator).bfloat16(), lo]
    else:
        dtype = torch.bfloat16 if form == "bf16" else torch.float16
        weights = [torch.zeros(numel, dtype=dtype), wide()]
    return [*weights, wide(), wide().abs(), wide().to(grad_dtype)]


def adamw_update(step: AdamWStep, form: str) -> Update:
    def update(kernels: Kernels, state: State) -> None:
        if form == "fp32":
            kernels.adamw_fp32(step, *state)
        elif form == "split":
            kernels.adamw_split(step, *state)
        else:
            kernels.adamw_master(step, *state)

    return update


def sgd_update(step: SGDStep, form: str) -> Update:
    """The first moment is the momentum buffer; the second has to stay as it is."""

    def update(kernels: Kernels, state: State) -> None:
        *weights, first, _, grad = state
        master = None if form == "fp32" else weights[1]
        kernels.sgd(step, weights[0], master, None if step.momentum == 0.0 else first, grad)

    return update


FORMS = [
    ("fp32", torch.float32),
    *(("split", grad) for grad in (torch.float32, torch.bfloat16)),
    *(("bf16", grad) for grad in (torch.float32, torch.bfloat16, torch.float16)),
    *(("fp16", grad) for grad in (torch.float32, torch.bfloat16, torch.float16)),
]
ALL = [
    *(("adamw", adamw_update, i, step) for i, step in enumerate(STEPS)),
    *(("sgd", sgd_update, i, step) for i, step in enumerate(SGD_STEPS)),
]
UPDATES = [
    pytest.param(
        make(step, form), form, grad, id=f"{name}{i}-{form}-{str(grad).removeprefix('torch.')}"
    )
    for name, make, i, step in ALL
    for form, grad in FORMS
]


def bits(state: State) -> list[Tensor]:
    return [t.view(torch.int32 if t.dtype == torch.float32 else torch.int16) for t in state]


def same(left: State, right: State) -> bool:
    return all(torch.equal(a, b) for a, b in zip(bits(left), bits(right), strict=True))


@pytest.mark.parametrize(("update", "form", "grad_dtype"), UPDATES)
@pytest.mark.parametrize("numel", LENGTHS)
def test_lengths(
    native: dict[str, Kernels], numel: int, update: Update, form: str, grad_dtype: torch.dtype
) -> None:
    start = random_state(numel, form, grad_dtype)
    results = []
    for kernels in native.values():
        results.append([t.clone() for t in start])
        update(kernels, results[-1])
    assert all(same(result, results[-1]) for result in results)
    assert numel == 0 or not same(results[0], start)


@pytest.mark.parametrize(("update", "form", "grad_dtype"), UPDATES)
def test_slices_and_starts(
    native: dict[str, Kernels], update: Update, form: str, grad_dtype: torch.dtype
) -> None:
    """Cut at odd places, so that every part starts unaligned and ends in a tail of its own."""
    numel = 3 * 2**16 + 77
    start = random_state(numel, form, grad_dtype)
    expected = [t.clone() for t in start]
    update(native["plain"], expected)
    cuts = [0, 1, 4, 11, 26, 43, 2**16 - 3, 2**16 + 14, 150_001, numel]
    for kernels in native.values():
        result = [t.clone() for t in start]
        for begin, end in itertools.pairwise(cuts):
            update(kernels, [t[begin:end] for t in result])
        assert same(result, expected), kernels.name


@pytest.mark.parametrize(("update", "form", "grad_dtype"), UPDATES)
def test_nothing_outside_is_touched(
    native: dict[str, Kernels], update: Update, form: str, grad_dtype: torch.dtype
) -> None:
    start = random_state(200, form, grad_dtype)
    for kernels in native.values():
        for begin, end in ((1, 18), (3, 130), (9, 10)):
            result = [t.clone() for t in start]
            update(kernels, [t[begin:end] for t in result])
            outside = torch.ones(200, dtype=torch.bool)
            outside[begin:end] = False
            assert same([t[outside] for t in result], [t[outside] for t in start])
            assert same(result[-1:], start[-1:])


def test_denormals_do_not_depend_on_the_caller(native: dict[str, Kernels]) -> None:
    """torch.set_flush_denormal concerns one thread; the kernels' threads and the caller agree."""
    start = [
        torch.full((2**18,), 1e-39),
        torch.full((2**18,), 1e-40),
        torch.zeros(2**18),
        torch.zeros(2**18),
    ]
    for kernels in native.values():
        usual = [t.clone() for t in start]
        kernels.adamw_fp32(STEPS[0], *usual)
        flushed = [t.clone() for t in start]
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot flush denormals")
        try:
            kernels.adamw_fp32(STEPS[0], *flushed)
            still_flushing = (torch.tensor(1e-39) * 1.0 == 0).item()
        finally:
            torch.set_flush_denormal(False)
        assert same(usual, flushed)
        assert bits(usual)[1].min() > 0  # they are there at all
        assert still_flushing  # the caller's setting was put back
