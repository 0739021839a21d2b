"""Devices and links as sysfs shows them, by made-up trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tiermem.benchmark.device import Device, Link, find_devices
from tiermem.store.mounts import Mount

MOUNT = Mount("/", "ext4", "none")


class Sys:
    """A tree like /sys whose device numbers point to ``path``'s."""

    def __init__(self, root: Path, path: Path) -> None:
        self.root = root
        number = os.stat(path).st_dev
        self.number = f"{os.major(number)}:{os.minor(number)}"

    def write(self, directory: str, **values: str) -> Path:
        made = self.root / directory
        made.mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            (made / name).write_text(value + "\n")
        return made

    def is_the_device(self, directory: str) -> None:
        link = self.root / "dev" / "block" / self.number
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(self.root / directory)

    def pci(self, directory: str, speed: str, width: str, max_speed: str, max_width: str) -> None:
        self.write(
            directory,
            current_link_speed=speed,
            current_link_width=width,
            max_link_speed=max_speed,
            max_link_width=max_width,
        )


@pytest.fixture
def sys_tree(tmp_path: Path) -> Sys:
    return Sys(tmp_path / "sys", tmp_path)


def nvme(tree: Sys, name: str, slot: str = "0000:01:00.0") -> str:
    """An NVMe drive below a PCI function; its block directory."""
    pci = f"devices/pci0000:00/0000:00:1d.0/{slot}"
    controller = f"{pci}/nvme/nvme0"
    block = f"{controller}/{name}"
    tree.write(controller, model="Samsung SSD 990 PRO 2TB        ")
    tree.write(block, size="3907029168")
    tree.write(f"{block}/queue", rotational="0")
    (tree.root / block / "device").symlink_to(tree.root / controller)
    return block


def test_a_partition_of_an_nvme_drive(tmp_path: Path, sys_tree: Sys) -> None:
    block = nvme(sys_tree, "nvme0n1")
    sys_tree.pci(
        "devices/pci0000:00/0000:00:1d.0/0000:01:00.0", "8.0 GT/s PCIe", "2", "16.0 GT/s PCIe", "4"
    )
    sys_tree.pci("devices/pci0000:00/0000:00:1d.0", "2.5 GT/s PCIe", "1", "2.5 GT/s PCIe", "1")
    sys_tree.write(f"{block}/nvme0n1p1", partition="1")
    sys_tree.is_the_device(f"{block}/nvme0n1p1")
    (device,) = find_devices(tmp_path, MOUNT, sys_tree.root)
    link = Link("0000:01:00.0", 8.0, 2, 16.0, 4)
    assert device == Device("nvme0n1", "Samsung SSD 990 PRO 2TB", 3907029168 * 512, False, link)
    assert link.gb_per_s == pytest.approx(1.969, abs=1e-3)
    assert link.max_gb_per_s == pytest.approx(7.877, abs=1e-3)
    assert link.is_reduced
    assert not any([device.is_virtual, device.is_loop, device.is_memory])


def test_a_mapped_device_stands_on_its_disks(tmp_path: Path, sys_tree: Sys) -> None:
    first = nvme(sys_tree, "nvme0n1")
    second = nvme(sys_tree, "nvme1n1", "0000:02:00.0")
    slaves = sys_tree.write("devices/virtual/block/dm-0/slaves")
    (slaves / "nvme0n1").symlink_to(sys_tree.root / first)
    (slaves / "nvme1n1").symlink_to(sys_tree.root / second)
    sys_tree.is_the_device("devices/virtual/block/dm-0")
    assert [d.name for d in find_devices(tmp_path, MOUNT, sys_tree.root)] == ["nvme0n1", "nvme1n1"]


def test_native_multipath_has_the_link_of_its_controller(tmp_path: Path, sys_tree: Sys) -> None:
    controller = sys_tree.write("devices/pci0000:00/0000:03:00.0/nvme/nvme3")
    sys_tree.pci("devices/pci0000:00/0000:03:00.0", "32.0 GT/s PCIe", "4", "32.0 GT/s PCIe", "4")
    subsystem = sys_tree.write("devices/virtual/nvme-subsystem/nvme-subsys3", model="PM1743")
    (subsystem / "nvme3").symlink_to(controller)
    sys_tree.write("devices/virtual/nvme-subsystem/nvme-subsys3/nvme3n1", size="8")
    (subsystem / "nvme3n1" / "device").symlink_to(subsystem)
    sys_tree.is_the_device("devices/virtual/nvme-subsystem/nvme-subsys3/nvme3n1")
    (device,) = find_devices(tmp_path, MOUNT, sys_tree.root)
    assert device.model == "PM1743"
    assert device.link == Link("0000:03:00.0", 32.0, 4, 32.0, 4)
    assert not device.link.is_reduced


def test_a_virtual_disk_has_neither_model_nor_link(tmp_path: Path, sys_tree: Sys) -> None:
    block = sys_tree.write("devices/pci0000:00/0000:00:02.0/virtio1/block/vda", size="16")
    virtio = sys_tree.write("devices/pci0000:00/0000:00:02.0/virtio1", vendor="0x1af4")
    (block / "device").symlink_to(virtio)
    sys_tree.is_the_device("devices/pci0000:00/0000:00:02.0/virtio1/block/vda")
    (device,) = find_devices(tmp_path, MOUNT, sys_tree.root)
    assert (device.model, device.link, device.is_virtual) == ("", None, True)


def test_an_unknown_link_is_none(tmp_path: Path, sys_tree: Sys) -> None:
    block = nvme(sys_tree, "nvme0n1")
    sys_tree.pci("devices/pci0000:00/0000:00:1d.0/0000:01:00.0", "Unknown", "63", "Unknown", "255")
    sys_tree.is_the_device(block)
    assert find_devices(tmp_path, MOUNT, sys_tree.root)[0].link is None


def test_a_filesystem_without_device(tmp_path: Path, sys_tree: Sys) -> None:
    assert find_devices(tmp_path, Mount("/", "tmpfs", "tmpfs"), sys_tree.root) == ()


def test_a_loop_device_names_its_file(tmp_path: Path, sys_tree: Sys) -> None:
    sys_tree.write("devices/virtual/block/loop0/loop", backing_file="/var/disk.img")
    sys_tree.is_the_device("devices/virtual/block/loop0")
    (device,) = find_devices(tmp_path, MOUNT, sys_tree.root)
    assert device.is_loop
    assert device.model == "the file /var/disk.img"
