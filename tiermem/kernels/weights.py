"""The three forms in which a kernel finds an fp32 parameter, and the dtypes of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class WeightForm:
    """``master`` is the dtype of what is kept beside the parameter, None where nothing is."""

    name: str
    master: torch.dtype | None
    params: tuple[torch.dtype, ...]
    grads: tuple[torch.dtype, ...]


PLAIN = WeightForm("plain", None, (torch.float32,), (torch.float32,))
SPLIT = WeightForm("split", torch.int16, (torch.bfloat16,), (torch.float32, torch.bfloat16))
WHOLE = WeightForm("whole", torch.float32, (torch.bfloat16, torch.float16), FLOATS)


def form_of(master: torch.Tensor | None) -> WeightForm:
    """The form that has such a master; ``ValueError`` if none has."""
    dtype = None if master is None else master.dtype
    for form in (PLAIN, SPLIT, WHOLE):
        if form.master == dtype:
            return form
    raise ValueError(f"master is {dtype}, must be {SPLIT.master}, {WHOLE.master} or None")
