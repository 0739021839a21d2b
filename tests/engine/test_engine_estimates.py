"""Memory estimates: DeepSpeed's documented tables to the digit, and tiermem's own from its formulas."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiermem
from tiermem.engine import estimates
from tiermem.errors import ConfigError

T5_3B = """\
SW: Model with 2851M total params, 32M largest layer params.
  per CPU  |  per GPU |   Options
   71.69GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1
  127.45GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0
   63.72GB |   0.78GB | offload_param=none, offload_optimizer=cpu , zero_init=1
  127.45GB |   0.78GB | offload_param=none, offload_optimizer=cpu , zero_init=0
    1.43GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=1
  127.45GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=0"""
"""DeepSpeed's documentation, "Memory Requirements": 8 GPUs on one node."""


def theirs(printed: str) -> list[str]:
    return [line for line in printed.splitlines()[2:] if "(tiermem)" not in line]


def test_stage_3_table_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    table = estimates.estimate_zero3_model_states_mem_needs_all_cold(
        int(2851e6), int(32e6), num_gpus_per_node=8, num_nodes=1
    )
    printed = capsys.readouterr().out
    assert printed == f"{table}\n"
    assert theirs(printed) == T5_3B.splitlines()
    assert "HW: Setup with 1 node, 8 GPUs per node." in printed


def test_stage_2_table_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    estimates.estimate_zero2_model_states_mem_needs_all_cold(
        int(2851e6), num_gpus_per_node=8, num_nodes=1
    )
    assert theirs(capsys.readouterr().out) == [
        "SW: Model with 2851M total params.",
        "  per CPU  |  per GPU |   Options",
        "  127.45GB |   5.31GB | offload_optimizer=cpu",
        "  127.45GB |  15.93GB | offload_optimizer=none",
    ]


def test_numbers_unpack_in_deepspeeds_order() -> None:
    cpu, gpu = estimates.estimate_zero2_model_states_mem_needs(1000, 4, 2, cpu_offload=True)
    assert (cpu, gpu) == (1000 * 4 * 8 * 1.5, 2000)
    cpu, gpu, layer = estimates.estimate_zero3_model_states_mem_needs(
        1000, 10, 4, 2, cpu_offload=True, cpu_offload_params=False, zero_init=False
    )
    assert (cpu, gpu, layer) == (1000 * 4 * 4 * 1.5, 40 + 2 * 1000 / 8, 40)


@pytest.mark.parametrize("nodes", [1, 2])
def test_tiermems_rows_add_up_to_14_bytes_and_what_is_built(nodes: int) -> None:
    """Whatever is offloaded: 2 for parameters, 2 for gradients, 10 for the optimizer."""
    psi, unit, gpus = 8000, 10, 4
    for offload, params in ((True, True), (True, False), (False, False)):
        needs = estimates.tiermem_zero3_needs(psi, unit, gpus, nodes, offload, params)
        building, gathered = 4 * unit * gpus * nodes, 4 * unit * gpus * nodes
        total = needs.cpu_bytes * nodes + needs.gpu_bytes * gpus * nodes
        assert total == 14 * psi + building + gathered
        assert (needs.gpu_bytes == 4 * unit) == params
    for offload in (True, False):
        two = estimates.tiermem_zero2_needs(psi, gpus, nodes, offload)
        total = two.cpu_bytes * nodes + two.gpu_bytes * gpus * nodes
        assert total == (2 * gpus * nodes + 12) * psi + 4 * psi * gpus * nodes


def test_tiermems_states_are_what_a_runtime_takes() -> None:
    """Parameters and states of a real model are 12 bytes each in the store, its gradients 2."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256, bias=False)) for _ in range(3)])
    psi = 3 * 256 * 256
    config = {"device": "cpu", "compute_dtype": "bf16", "persistence_threshold_numel": 0}
    with tiermem.Runtime({**config, "host_memory": "8MiB"}) as runtime:
        tiermem.shard(model, runtime)
        optimizer = tiermem.optim.AdamW(model.parameters())
        model(torch.ones(1, 256, dtype=torch.bfloat16)).sum().backward()
        gradients = sum(g.gradient.nbytes for g in runtime.groups if g.gradient is not None)
        optimizer.step()
        runtime.drain()
        states = sum(
            state.record.nbytes
            for group in runtime.groups
            for region in group.regions
            for state in region.states.values()
        )
        params = sum(g.record.nbytes for g in runtime.groups if g.record is not None)
    needs = estimates.tiermem_zero3_needs(psi, 0)
    assert params + states + gradients == needs.cpu_bytes == 14 * psi


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 20)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 20)) for _ in "ab")
        self.head = nn.Linear(20, 100, bias=False)
        self.head.weight = self.embedding.weight


def test_live_models_on_meta_or_sharded_count_tied_weights_once() -> None:
    block = 20 * 30 + 30 + 30 * 20 + 20
    with torch.device("meta"):
        bare = Tied()
    model = Tied()
    with tiermem.Runtime({"device": "cpu", "host_memory": "8MiB"}) as runtime:
        tables = [
            estimates.estimate_zero3_model_states_mem_needs_all_live(each, num_gpus_per_node=2)
            for each in (bare, model, tiermem.shard(model, runtime))
        ]
    for table in tables:
        assert table.total_params == 100 * 20 + 2 * block
        assert table.largest_layer_params == 100 * 20
        assert table == tables[0]
    two = estimates.estimate_zero2_model_states_mem_needs_all_live(bare)
    assert two.total_params == tables[0].total_params


def test_blocks_count_as_what_is_gathered() -> None:
    with torch.device("meta"):
        model = nn.ModuleList(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)) for _ in range(3))
    table = estimates.estimate_zero3_model_states_mem_needs_all_live(model)
    first = {row.tiermem: row.gpu_bytes for row in reversed(table.rows) if "param=cpu" in row.options}
    assert first == {False: 4 * 110, True: 4 * 220}


def test_impossible_hardware_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_nodes 0; both must be at least 1"):
        estimates.estimate_zero2_model_states_mem_needs(1000, 1, 0)
