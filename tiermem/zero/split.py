"""Parameters that torch has split over a dimension of the mesh by itself: `DTensor`.

[Note: split parameters] ``torch.distributed.tensor.parallel.parallelize_module`` makes parameters
DTensors: wrappers with the shape of the whole around this rank's part. The part is what a group holds,
shards over its own dimension of the mesh, and updates, like any other parameter; the wrapper stays the
real parameter, whose part gets and loses its memory. What goes to the user (gradients, masters,
states) is wrapped again, so that it has the parameter's shape and ``full_tensor()``; what comes from
the user is brought to the parameter's placements. For the gradient of a parameter that is the same on
all ranks of the mesh that may be an all-reduce over it, as in FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from tiermem.errors import StateError
from tiermem.zero import compat

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True, slots=True)
class Split:
    """How a tensor of ``shape`` and ``stride`` lies over the ranks of ``mesh``."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Split | None:
        """That of a DTensor; None for any other tensor."""
        if not compat.is_distributed(tensor):
            return None
        wrapper: DTensor = tensor  # type: ignore[assignment]
        return cls(wrapper.device_mesh, wrapper.placements, wrapper.shape, wrapper.stride())

    @property
    def replicated(self) -> bool:
        """Whether every rank has all of it."""
        return all(placement.is_replicate() for placement in self.placements)

    def wrap(self, part: torch.Tensor) -> DTensor:
        """The DTensor of which ``part``, of any dtype, is this rank's part; no copy."""
        from torch.distributed.tensor import DTensor

        with torch.no_grad():
            return DTensor.from_local(
                part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
            )

    def part_of(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``value``: a DTensor of any placements (all ranks of the mesh call it
        then), or a whole tensor. Raises `StateError` for another shape or mesh."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        if value.shape != self.shape:
            raise StateError(
                f"a tensor of shape {tuple(value.shape)} does not fit a DTensor of {tuple(self.shape)}"
            )
        with torch.no_grad():
            value = value.detach()
            if not isinstance(value, DTensor):
                made = distribute_tensor(value, self.mesh, self.placements, src_data_rank=None)
            elif value.device_mesh != self.mesh:
                raise StateError(
                    f"a DTensor over {value.device_mesh} does not fit one over {self.mesh}. Remedy: "
                    f"value.redistribute(param.device_mesh, param.placements)"
                )
            elif value.placements != self.placements:
                made = value.redistribute(placements=self.placements)
            else:
                made = value
            return compat.finished(compat.local_tensor(made))

    def empty(self, param: nn.Parameter, stand_in: torch.Tensor) -> None:
        """Takes the memory of ``param``: its part becomes ``stand_in``, of another dtype if need be."""
        wrapped = self.wrap(stand_in)
        param.data = wrapped
        compat.adopt_local_tensor(param, wrapped)


def check_split(param: torch.Tensor, name: str) -> None:
    """Raises `StateError` for a DTensor that is not simply cut or repeated over one dimension."""
    split = Split.of(param)
    if split is None:
        return
    if split.mesh.ndim != 1:
        raise StateError(
            f"{name!r} is a DTensor over a mesh of {split.mesh.ndim} dimensions "
            f"{split.mesh.mesh_dim_names or ''}; tensor parallelism over one is supported. Remedy: "
            f"parallelize_module(model, mesh['tp'], ...), and no fully_shard before tiermem.shard"
        )
    (placement,) = split.placements
    if not (placement.is_replicate() or type(placement).__name__ == "Shard"):
        raise StateError(
            f"{name!r} is a DTensor placed {placement}; parameters are Shard(dim) or Replicate(). "
            f"Remedy: param.redistribute(placements=[Replicate()]) before tiermem.shard"
        )


def mesh_of(params: Iterable[tuple[str, torch.Tensor]]) -> DeviceMesh | None:
    """The mesh of one dimension that all DTensors among ``params`` are split over; None without any.
    Raises `StateError` if there are several."""
    first: tuple[str, DeviceMesh] | None = None
    for name, param in params:
        split = Split.of(param)
        if split is None:
            continue
        if first is None:
            first = name, split.mesh
        elif split.mesh != first[1]:
            raise StateError(
                f"{first[0]!r} and {name!r} are DTensors over different meshes, {first[1]} and "
                f"{split.mesh}. Remedy: parallelize all of the model over one dimension, mesh['tp']"
            )
    return None if first is None else first[1]


def check_apart(split_over: DeviceMesh | None, group: ProcessGroup | None) -> None:
    """Raises `StateError` if some rank of ``group`` (None: all), which would share out states with this
    one, has another part of the model."""
    if split_over is None:
        return
    parts = split_over.mesh.flatten().tolist()
    sharing = dist.get_process_group_ranks(group)
    common = sorted(set(parts) & set(sharing))
    if common != [dist.get_rank()]:
        raise StateError(
            f"the model's DTensors are split over the ranks {parts}, and states would be sharded over "
            f"the ranks {sharing}; {common} are in both. Remedy: mesh = init_device_mesh('cpu', (dp, "
            f"tp), mesh_dim_names=('dp', 'tp')), parallelize_module(model, mesh['tp'], ...), "
            f"tiermem.shard(..., mesh=mesh['dp'])"
        )
