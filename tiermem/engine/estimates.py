"""What model states take before anything is built: DeepSpeed's estimates, and those of tiermem.

[Note: formulas] Psi is the number of parameters, N the number of ranks, n that of ranks per node, L the
parameters of the largest layer; all results are bytes, of one GPU or of one node's host memory.
DeepSpeed's rows are the formulas of its documentation ("Memory Requirements"): 4 bytes of an fp32 model
while it is built on each rank; 16 for fp32 parameters, gradients and two moments of Adam, 2 more for
16-bit parameters; 4 L while the largest layer is gathered in 16 bits and has gradients.

tiermem's rows use the accounting of the ZeRO paper (Rajbhandari et al., SC '20, section 3.1), 2 bytes
for parameters, 2 for gradients and K for the optimizer, so ``2 Psi + (2 + K) Psi / N`` at stage 2 and
``(4 + K) Psi / N`` at stage 3. K is 10 and not 12, for bf16 with ``master: "split"``: 8 for two fp32
moments, and 2 for what the 16-bit parameter lacks of its fp32 master. Gradients are kept in host memory
whatever is offloaded. The arena is reserved whole before it is filled, so a model that is built in fp32
takes its 4 bytes on each rank *beside* it (DeepSpeed: the larger of the two); `tiermem.zero.Init` or
the meta device leave the largest layer of that. There is no buffer factor: ``host_memory`` is a limit,
and what it leaves serves as buffers. A further micro-step makes gradients fp32, 2 bytes more. tiermem
gathers whole blocks, so its L is the largest unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from tiermem.errors import ConfigError
from tiermem.zero.param import ShardedParam
from tiermem.zero.placeholder import Placeholder
from tiermem.zero.wrap import plan_units

_K = 10
"""Bytes per parameter of Adam's states; see [Note: formulas]."""


@dataclass(frozen=True, slots=True)
class Zero2Needs:
    """Bytes of host memory of each node and of each GPU. Unpacks in DeepSpeed's order."""

    cpu_bytes: int
    gpu_bytes: int

    def __iter__(self) -> Iterator[int]:
        return iter((self.cpu_bytes, self.gpu_bytes))


@dataclass(frozen=True, slots=True)
class Zero3Needs:
    """As `Zero2Needs`; ``largest_layer_bytes`` are part of those of a GPU."""

    cpu_bytes: int
    gpu_bytes: int
    largest_layer_bytes: int

    def __iter__(self) -> Iterator[int]:
        return iter((self.cpu_bytes, self.gpu_bytes, self.largest_layer_bytes))


@dataclass(frozen=True, slots=True)
class EstimateRow:
    """One row of a table. ``tiermem``: what tiermem needs for the same choice, not DeepSpeed."""

    options: str
    cpu_bytes: int
    gpu_bytes: int
    tiermem: bool


@dataclass(frozen=True, slots=True)
class Estimate:
    """A table: the model, the hardware, and a row for each choice. ``str()`` is what is printed."""

    total_params: int
    largest_layer_params: int | None
    num_gpus_per_node: int
    num_nodes: int
    rows: tuple[EstimateRow, ...]

    def __str__(self) -> str:
        layer = ""
        if self.largest_layer_params is not None:
            layer = f", {self.largest_layer_params // 10**6}M largest layer params"
        nodes = "nodes" if self.num_nodes > 1 else "node"
        gpus = "GPUs" if self.num_gpus_per_node > 1 else "GPU"
        lines = [
            "Estimated memory needed for params, optim states and gradients for a:",
            f"HW: Setup with {self.num_nodes} {nodes}, {self.num_gpus_per_node} {gpus} per node.",
            f"SW: Model with {self.total_params // 10**6}M total params{layer}.",
            "  per CPU  |  per GPU |   Options",
        ]
        for row in self.rows:
            cpu, gpu = row.cpu_bytes / 2**30, row.gpu_bytes / 2**30
            note = "  (tiermem)" if row.tiermem else ""
            lines.append(f" {cpu:7.2f}GB | {gpu:6.2f}GB | {row.options}{note}")
        return "\n".join(lines)


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> Zero2Needs:
    """What DeepSpeed needs at stage 2 for ``total_params`` parameters; see [Note: formulas]."""
    ranks = _num_ranks(num_gpus_per_node, num_nodes)
    if cpu_offload:
        gpu = 2 * total_params
        cpu = total_params * max(4 * ranks, 16) * additional_buffer_factor
    else:
        gpu = 4 * total_params + int(16 * total_params / ranks)
        cpu = total_params * 4 * num_gpus_per_node * additional_buffer_factor
    return Zero2Needs(int(cpu), int(gpu))


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> Zero3Needs:
    """What DeepSpeed needs at stage 3; see [Note: formulas]. ``cpu_offload`` is for optimizer states,
    ``cpu_offload_params`` (which counts beside it only) for parameters; ``zero_init``: the model is
    built under ``zero.Init``."""
    ranks = _num_ranks(num_gpus_per_node, num_nodes)
    layer = 4 * int(largest_layer_params)
    building = 4.0 * num_gpus_per_node * total_params
    if cpu_offload:
        on_gpu = 0 if cpu_offload_params else 2
        offloaded = (18 - on_gpu) * total_params / num_nodes
        cpu = offloaded if zero_init else max(building, offloaded)
    else:
        on_gpu = 18
        cpu = 4.0 * num_gpus_per_node * largest_layer_params if zero_init else building
    gpu = layer + int(on_gpu * total_params / ranks)
    return Zero3Needs(int(cpu * additional_buffer_factor), gpu, layer)


def tiermem_zero2_needs(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, cpu_offload: bool = True
) -> Zero2Needs:
    """What tiermem needs at stage 2; see [Note: formulas]."""
    ranks = _num_ranks(num_gpus_per_node, num_nodes)
    on_host = 2 + (_K if cpu_offload else 0)
    cpu = 4 * num_gpus_per_node * total_params + on_host * total_params / num_nodes
    gpu = 2 * total_params + (0 if cpu_offload else _K) * total_params / ranks
    return Zero2Needs(int(cpu), int(gpu))


def tiermem_zero3_needs(
    total_params: int,
    largest_unit_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
) -> Zero3Needs:
    """What tiermem needs at stage 3; see [Note: formulas]."""
    ranks = _num_ranks(num_gpus_per_node, num_nodes)
    states, params = (_K if cpu_offload else 0), (2 if cpu_offload and cpu_offload_params else 0)
    built = largest_unit_params if zero_init else total_params
    cpu = 4 * num_gpus_per_node * built + (2 + states + params) * total_params / num_nodes
    unit = 4 * int(largest_unit_params)
    gpu = unit + int((2 + _K - states - params) * total_params / ranks)
    return Zero3Needs(int(cpu), gpu, unit)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> Estimate:
    """Prints the table of every choice at stage 2 for a model of ``total_params`` parameters, and
    returns its numbers."""
    hardware = (num_gpus_per_node, num_nodes)
    rows = []
    for offload in (True, False):
        options = f"offload_optimizer={'cpu' if offload else 'none'}"
        cpu, gpu = estimate_zero2_model_states_mem_needs(
            total_params, *hardware, offload, additional_buffer_factor
        )
        rows.append(EstimateRow(options, cpu, gpu, tiermem=False))
        cpu, gpu = tiermem_zero2_needs(total_params, *hardware, offload)
        rows.append(EstimateRow(options, cpu, gpu, tiermem=True))
    return _printed(Estimate(int(total_params), None, *hardware, tuple(rows)))


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    largest_unit_params: int | None = None,
) -> Estimate:
    """Prints the table of every choice at stage 3, and returns its numbers. ``largest_unit_params`` is
    the size of what tiermem gathers at once, a block of the model (default: the largest layer)."""
    hardware = (num_gpus_per_node, num_nodes)
    unit = largest_layer_params if largest_unit_params is None else largest_unit_params
    rows = []
    for offload, offload_params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            options = (
                f"offload_param={'cpu' if offload_params else 'none':4}, "
                f"offload_optimizer={'cpu' if offload else 'none':4}, zero_init={int(zero_init)}"
            )
            choice = (*hardware, offload, offload_params, zero_init)
            cpu, gpu, _ = estimate_zero3_model_states_mem_needs(
                total_params, largest_layer_params, *choice, additional_buffer_factor
            )
            rows.append(EstimateRow(options, cpu, gpu, tiermem=False))
            cpu, gpu, _ = tiermem_zero3_needs(total_params, unit, *choice)
            rows.append(EstimateRow(options, cpu, gpu, tiermem=True))
    return _printed(Estimate(int(total_params), int(largest_layer_params), *hardware, tuple(rows)))


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> Estimate:
    """`estimate_zero2_model_states_mem_needs_all_cold` for ``model``, which may be on the meta device
    or sharded. Parameters that several modules share count once."""
    return estimate_zero2_model_states_mem_needs_all_cold(
        _total_params(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> Estimate:
    """`estimate_zero3_model_states_mem_needs_all_cold` for ``model``, which may be on the meta device
    or sharded. The largest layer is the module that itself owns most parameters."""
    layers = (sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
    return estimate_zero3_model_states_mem_needs_all_cold(
        _total_params(model),
        max(layers),
        num_gpus_per_node,
        num_nodes,
        additional_buffer_factor,
        largest_unit_params=_largest_unit_params(model),
    )


def _printed(estimate: Estimate) -> Estimate:
    print(estimate)
    return estimate


def _total_params(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def _largest_unit_params(model: nn.Module) -> int:
    params = list(model.parameters())
    handles = [p._handle for p in params if isinstance(p, Placeholder)]
    if not handles:
        units = plan_units(model, None)
        return max((sum(p.param.numel() for p in unit.params) for unit in units), default=0)
    groups = {handle.group: None for handle in handles if isinstance(handle, ShardedParam)}
    return max(group.numel for group in groups)


def _num_ranks(num_gpus_per_node: int, num_nodes: int) -> int:
    if num_gpus_per_node < 1 or num_nodes < 1:
        raise ConfigError(
            f"num_gpus_per_node is {num_gpus_per_node} and num_nodes {num_nodes}; both must be at "
            f"least 1"
        )
    return num_gpus_per_node * num_nodes
