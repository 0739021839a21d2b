"""The device under a directory and its PCIe link, from /sys. Never needs root.

[Note: underlying devices] A partition stands for its disk; device mapper and md stand on the devices
in ``slaves``. The link is that of the nearest PCI function above the disk that has one; an NVMe
namespace with native multipath has no PCI parent itself, its controllers have.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tiermem.store.mounts import Mount

SYS = Path("/sys")

# GT/s: bits of data per bit on the wire.
_ENCODING = {2.5: 8 / 10, 5.0: 8 / 10, 8.0: 128 / 130, 16.0: 128 / 130, 32.0: 128 / 130}
_ENCODING_GEN6 = 242 / 256  # flits


@dataclass(frozen=True, slots=True)
class Link:
    """A PCIe link: transfers per second and lane (GT/s) and lanes, now and at most."""

    address: str
    speed: float
    width: int
    max_speed: float
    max_width: int

    @property
    def gb_per_s(self) -> float:
        """What it carries in one direction in GB/s, before the protocol's own overhead."""
        return _link_gb_per_s(self.speed, self.width)

    @property
    def max_gb_per_s(self) -> float:
        return _link_gb_per_s(self.max_speed, self.max_width)

    @property
    def is_reduced(self) -> bool:
        return self.gb_per_s < self.max_gb_per_s


@dataclass(frozen=True, slots=True)
class Device:
    """A disk: its name in /sys/block, model (empty where the kernel knows none) and link."""

    name: str
    model: str
    size_bytes: int
    rotational: bool
    link: Link | None

    @property
    def is_memory(self) -> bool:
        return self.name.startswith(("zram", "ram"))

    @property
    def is_loop(self) -> bool:
        return self.name.startswith("loop")

    @property
    def is_virtual(self) -> bool:
        """A virtual machine's disk, which the host may cache."""
        names = ("qemu", "virtual", "vmware", "vbox", "msft")
        return self.name.startswith(("vd", "xvd")) or self.model.lower().startswith(names)


def find_devices(path: Path, mount: Mount, sysfs: Path = SYS) -> tuple[Device, ...]:
    """The disks that an existing ``path`` lies on; none for memory, networks and unknown ones."""
    number = _number(path, mount, sysfs)
    if number is None:
        return ()
    block = sysfs / "dev" / "block" / number
    return tuple(_describe(disk) for disk in _disks(Path(os.path.realpath(block))))


def _number(path: Path, mount: Mount, sysfs: Path) -> str | None:
    """``major:minor``; of the mount's source where the file system has a number of its own (btrfs)."""
    candidates = [os.stat(path).st_dev]
    try:
        source = os.stat(mount.source)
        if stat.S_ISBLK(source.st_mode):
            candidates.append(source.st_rdev)
    except OSError:
        pass
    for device in candidates:
        number = f"{os.major(device)}:{os.minor(device)}"
        if (sysfs / "dev" / "block" / number).exists():
            return number
    return None


def _disks(block: Path) -> Iterator[Path]:
    if (block / "partition").exists():
        block = block.parent
    slaves = block / "slaves"
    below = sorted(slaves.iterdir()) if slaves.is_dir() else []
    if not below:
        yield block
    seen = set()
    for slave in below:
        for disk in _disks(Path(os.path.realpath(slave))):
            if disk not in seen:
                seen.add(disk)
                yield disk


def _describe(disk: Path) -> Device:
    sectors = _read(disk / "size")
    return Device(
        name=disk.name,
        model=_model(disk),
        size_bytes=int(sectors) * 512 if sectors.isdigit() else 0,
        rotational=_read(disk / "queue" / "rotational") == "1",
        link=_link(disk),
    )


def _model(disk: Path) -> str:
    if disk.name.startswith("loop"):
        backing = _read(disk / "loop" / "backing_file")
        return f"the file {backing}" if backing else ""
    parts = [_read(disk / "device" / name) for name in ("vendor", "model")]
    # PCI and virtio give numbers for vendors; SCSI says "ATA" for every SATA disk.
    return " ".join(part for part in parts if part and part != "ATA" and not part.startswith("0x"))


def _link(disk: Path) -> Link | None:
    starts = [disk, disk / "device"]
    if (disk / "device").is_dir():
        starts += sorted(
            entry for entry in (disk / "device").iterdir() if re.fullmatch(r"nvme\d+", entry.name)
        )
    for start in starts:
        real = Path(os.path.realpath(start))
        for directory in (real, *real.parents):
            link = _link_of(directory)
            if link is not None:
                return link
    return None


def _link_of(pci: Path) -> Link | None:
    names = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
    if not (pci / names[0]).exists():
        return None
    values = []
    for name in names:
        number = re.match(r"\d+(\.\d+)?", _read(pci / name))
        values.append(float(number[0]) if number else 0.0)
    speed, width, max_speed, max_width = values
    if not speed or not 0 < width <= 32:  # "Unknown", 0 or 255: no link
        return None
    return Link(pci.name, speed, int(width), max(speed, max_speed), int(max(width, max_width % 255)))


def _link_gb_per_s(speed: float, width: int) -> float:
    return speed * width * _ENCODING.get(speed, _ENCODING_GEN6) / 8


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
