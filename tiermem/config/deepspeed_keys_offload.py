"""The keys of ``zero_optimization.offload_param`` and ``zero_optimization.offload_optimizer``."""

from __future__ import annotations

from tiermem.config.deepspeed_key import Key, Role, no_op, refused

_PARAM = "zero_optimization.offload_param"
_OPTIMIZER = "zero_optimization.offload_optimizer"
_DEVICES = ("none", "cpu", "nvme")
_PLANNED = "buffers are planned from the budget (host_memory)"

OFFLOAD_PARAM = (
    Key(
        _PARAM,
        "object",
        None,
        Role.ACTS,
        "where sharded parameters live",
        "below",
        example={"device": "cpu"},
        stage3=True,
    ),
    Key(
        f"{_PARAM}.device",
        "choice",
        "none",
        Role.ACTS,
        "their tier",
        "`params`: none is `device`, cpu is `host`, nvme is `nvme`",
        no_auto="give none, cpu or nvme",
        choices=_DEVICES,
        example="cpu",
        stage3=True,
    ),
    Key(
        f"{_PARAM}.nvme_path",
        "paths",
        None,
        Role.ACTS,
        "directory on a drive",
        "`paths`: a directory that exists, or a list of them, one per drive. Two blocks' paths are put "
        "together",
        no_auto="give a directory",
        example="/local_nvme",
        stage3=True,
    ),
    Key(
        f"{_PARAM}.pin_memory",
        "bool",
        True,
        Role.ACTS,
        "lock host memory",
        "`pin_memory`, for all host memory: true if either block says so",
        auto="true",
        stage3=True,
    ),
    Key(
        f"{_PARAM}.max_in_cpu",
        "int",
        1_000_000_000,
        Role.PART,
        "elements of parameters kept in host memory when they are on NVMe",
        "with device nvme: `resident_memory`, that many elements' bytes, for all records on NVMe; left "
        "out, all there is",
        auto="all there is",
        example=1_000_000_000,
        stage3=True,
    ),
    no_op(
        f"{_PARAM}.buffer_count",
        5,
        "buffers between drive and device",
        _PLANNED,
        fine=(),
        auto="as planned",
    ),
    no_op(
        f"{_PARAM}.buffer_size",
        100_000_000,
        "elements in each of them",
        _PLANNED,
        fine=(),
        auto="as planned",
    ),
)

OFFLOAD_OPTIMIZER = (
    Key(
        _OPTIMIZER,
        "object",
        None,
        Role.ACTS,
        "where optimizer states live",
        "below",
        example={"device": "cpu"},
    ),
    Key(
        f"{_OPTIMIZER}.device",
        "choice",
        "none",
        Role.ACTS,
        "their tier",
        "`optimizer`: none is `device`, cpu is `host`, nvme is `nvme` (at stages 1 and 2 too); with an "
        "accelerator states are updated on the host, so it must be cpu or nvme",
        no_auto="give none, cpu or nvme",
        choices=_DEVICES,
        example="cpu",
    ),
    Key(
        f"{_OPTIMIZER}.nvme_path",
        "paths",
        None,
        Role.ACTS,
        "directory on a drive",
        f"as {_PARAM}.nvme_path",
        no_auto="give a directory",
        example="/local_nvme",
    ),
    Key(
        f"{_OPTIMIZER}.pin_memory",
        "bool",
        True,
        Role.ACTS,
        "lock host memory",
        f"as {_PARAM}.pin_memory",
        auto="true",
    ),
    refused(
        f"{_OPTIMIZER}.ratio",
        1.0,
        "share of the update that is done on the host",
        "not built: all of an offloaded update is done on the host; write 1.0 or leave the key out",
        high=1,
    ),
    refused(
        f"{_OPTIMIZER}.super_offload",
        False,
        "offload for superchips",
        "not built; leave the key out",
    ),
    no_op(
        f"{_OPTIMIZER}.buffer_count",
        4,
        "buffers between drive and host",
        _PLANNED,
        fine=(),
        auto="as planned",
    ),
    no_op(
        f"{_OPTIMIZER}.pipeline_read",
        False,
        "read states while others are updated",
        "always on",
        fine=(True,),
    ),
    no_op(
        f"{_OPTIMIZER}.pipeline_write",
        False,
        "write states while others are updated",
        "always on",
        fine=(True,),
    ),
    no_op(
        f"{_OPTIMIZER}.fast_init",
        False,
        "create state files in a faster way",
        "files are preallocated, so that a full drive is found at the start",
    ),
    no_op(
        f"{_OPTIMIZER}.convert_grad_on_cpu",
        True,
        "widen gradients on the host, not on the device",
        "the update reads gradients in their own precision",
    ),
    no_op(
        f"{_OPTIMIZER}.cpuadam_cores_perc",
        0.8,
        "share of the cores for the update, with super_offload",
        "`num_threads` in tiermem's own configuration counts them",
        high=1,
    ),
)
