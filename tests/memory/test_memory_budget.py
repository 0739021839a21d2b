"""Budgets follow the machine and every control group above the process."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tiermem.errors import BudgetError
from tiermem.memory.budget import (
    HostMemory,
    available_host_memory,
    check_host_budget,
    default_host_budget,
    local_rank_count,
)

GIB = 1 << 30
MIB = 1 << 20


def group(directory: Path, files: dict[str, object]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (directory / name).write_text(f"{value}\n")


def look(tmp_path: Path, proc: str) -> HostMemory:
    (tmp_path / "self_cgroup").write_text(proc)
    return available_host_memory(proc_cgroup=tmp_path / "self_cgroup", cgroup_root=tmp_path / "fs")


def v2(limit: object, used: int, cache: int = 0) -> dict[str, object]:
    stat = f"anon 5\ninactive_file {cache}\nactive_file 7"
    return {"memory.max": limit, "memory.current": used, "memory.stat": stat}


def test_the_tightest_ancestor_of_v2_binds(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    group(root, {"cgroup.controllers": "cpu memory"})
    group(root / "a", v2(300 * MIB, 250 * MIB))
    group(root / "a/b", v2(200 * MIB, 100 * MIB))
    group(root / "a/b/c", v2("max", 90 * MIB))
    memory = look(tmp_path, "0::/a/b/c\n")
    assert memory.available == 50 * MIB
    assert (memory.cgroup_limit, memory.cgroup_used) == (300 * MIB, 250 * MIB)
    assert memory.source == str(root / "a/memory.max")
    assert memory.total == 200 * MIB


def test_reclaimable_page_cache_is_available(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    group(root, {"cgroup.controllers": "memory"})
    group(root / "job", v2(100 * MIB, 90 * MIB, cache=60 * MIB))
    assert look(tmp_path, "0::/job\n").available == 70 * MIB


def test_v1_and_its_way_to_say_no_limit(tmp_path: Path) -> None:
    root = tmp_path / "fs/memory"
    unlimited = {"memory.limit_in_bytes": 2**63 - 4096, "memory.usage_in_bytes": 12345}
    limited = {"memory.limit_in_bytes": 64 * MIB, "memory.usage_in_bytes": 24 * MIB}
    group(root, unlimited)
    group(root / "docker", limited)
    group(root / "docker/id", unlimited)
    memory = look(tmp_path, "7:cpu,cpuacct:/x\n4:memory:/docker/id\n0::/\n")
    assert memory.available == 40 * MIB
    (root / "docker/memory.limit_in_bytes").write_text(str(2**63 - 4096))
    memory = look(tmp_path, "4:memory:/docker/id\n")
    assert (memory.cgroup_limit, memory.source) == (None, "machine")


def test_v1_memory_beside_an_empty_v2(tmp_path: Path) -> None:
    group(tmp_path / "fs/unified", {"cgroup.controllers": ""})
    group(
        tmp_path / "fs/memory/job", {"memory.limit_in_bytes": 8 * MIB, "memory.usage_in_bytes": 2 * MIB}
    )
    assert look(tmp_path, "0::/job\n3:hugetlb,memory:/job\n").available == 6 * MIB


def test_a_container_that_sees_the_path_of_the_host(tmp_path: Path) -> None:
    group(tmp_path / "fs", {"cgroup.controllers": "memory", **v2(32 * MIB, 12 * MIB)})
    assert look(tmp_path, "0::/system.slice/docker-123.scope\n").available == 20 * MIB
    assert look(tmp_path, "0::/../../elsewhere\n").available == 20 * MIB


def test_used_above_the_limit_leaves_nothing_and_not_less(tmp_path: Path) -> None:
    group(tmp_path / "fs", {"cgroup.controllers": "memory", **v2(32 * MIB, 33 * MIB)})
    assert look(tmp_path, "0::/\n").available == 0


@pytest.mark.parametrize("proc", ["", "garbage\n", "0::/none\n"])
def test_without_limits_the_machine_decides(tmp_path: Path, proc: str) -> None:
    memory = look(tmp_path, proc)
    assert memory.source == "machine"
    assert memory.total == psutil.virtual_memory().total
    missing = available_host_memory(proc_cgroup=tmp_path / "none", cgroup_root=tmp_path / "none")
    assert missing.source == "machine"


def test_this_machine_can_be_asked() -> None:
    memory = available_host_memory()
    assert 0 < memory.available <= memory.total


def machine(available: int) -> HostMemory:
    return HostMemory(2 * available, available, None, None, "machine")


def test_default_budget_is_shared_by_the_local_ranks() -> None:
    one = default_host_budget(1, memory=machine(100 * GIB))
    four = default_host_budget(4, memory=machine(100 * GIB))
    assert one == 79 * GIB
    assert four == 19 * GIB
    assert default_host_budget(1, reserve=0, memory=machine(10 * GIB)) == 8 * GIB


def test_no_default_budget_without_memory() -> None:
    with pytest.raises(BudgetError, match=r"machine.*8 local ranks.*host_memory"):
        default_host_budget(8, memory=machine(8 * GIB))


def test_a_budget_that_would_swap_is_refused() -> None:
    check_host_budget(25 * GIB, 4, memory=machine(100 * GIB))
    with pytest.raises(BudgetError, match=r"needs 107374182404 bytes.*107374182400 bytes.*at most"):
        check_host_budget(25 * GIB + 1, 4, memory=machine(100 * GIB))
    with pytest.raises(BudgetError):
        check_host_budget(1 << 50, 1)


@pytest.mark.parametrize(("text", "ranks"), [("8", 8), ("", 1), ("0", 1), ("x", 1)])
def test_local_ranks_come_from_the_launcher(text: str, ranks: int) -> None:
    assert local_rank_count({"LOCAL_WORLD_SIZE": text}) == ranks
    assert local_rank_count({}) == 1
