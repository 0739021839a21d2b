"""When a figure is not the device's: the warnings, each with what would give a better figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tiermem.benchmark.device import Device
from tiermem.benchmark.figures import Result
from tiermem.benchmark.place import Site
from tiermem.benchmark.plan import Pages, Plan
from tiermem.io import AlignedBuffer, Op
from tiermem.types import format_bytes

_OVERLAYS = frozenset({"overlay", "overlayfs", "aufs", "unionfs"})
_WORKERS = {"native_threads": 8, "threads": 4}  # per queue; of "threads" per direction
_TOLERANCE = 1.02


def site_cautions(site: Site) -> Iterator[str]:
    """About where a path lies."""
    path, mount = site.path, site.mount
    if mount.in_memory:
        yield (
            f"{path} is on {mount.filesystem}: this measures memory, not a device; give a directory on "
            "a drive"
        )
    elif mount.filesystem in _OVERLAYS:
        yield (
            f"{path} is on {mount.filesystem} (a container's own files): this measures whatever lies "
            "below; mount a directory of the drive into the container and give that"
        )
    elif mount.is_network:
        yield (
            f"{path} is on {mount.filesystem}, a network or user-space filesystem: this measures the "
            "network, servers and their caches; give a directory on a local drive"
        )
    for device in site.devices:
        yield from _device_cautions(path, device)


def _device_cautions(path: Path, device: Device) -> Iterator[str]:
    if device.is_memory:
        yield f"{path} is on {device.name}: this measures memory, not a device; give another directory"
    elif device.is_loop:
        yield (
            f"{path} is on {device.name}, a loop device over {device.model or 'a file'}: the page "
            "cache of that file may answer; give a directory on the drive itself"
        )
    elif device.is_virtual:
        yield (
            f"{device.name} is a virtual machine's disk: its host's page cache may answer, and limits "
            "of the host may apply; a drive passed through to the machine shows its own figures"
        )
    link = device.link
    if link is not None and link.is_reduced:
        yield (
            f"{device.name}'s PCIe link runs at {link.speed:g} GT/s x{link.width} of at most "
            f"{link.max_speed:g} GT/s x{link.max_width}: power saving when idle is harmless, a wrong "
            "slot or a bad contact is not"
        )


def shared_cautions(sites: Sequence[Site]) -> Iterator[str]:
    """About paths that lie on one device: their sum is that of one."""
    by_name: dict[str, list[Path]] = {}
    for site in sites:
        names = [device.name for device in site.devices] or [f"file system {site.st_dev}"]
        for name in names:
            by_name.setdefault(name, []).append(site.path)
    for name, paths in by_name.items():
        if len(paths) > 1:
            shown = ", ".join(str(path) for path in paths)
            yield (
                f"{shown} share one device ({name}): together they give what it gives; give one "
                "directory per drive"
            )


def cache_cautions(path: Path, direct: bool, nbytes: int, ram_bytes: int) -> Iterator[str]:
    """About the page cache, where a file is buffered."""
    if direct:
        return
    yield (
        f"{path} is read and written through the page cache (no O_DIRECT): reads may be answered and "
        "writes gathered there, and copying costs processor time; a run of writes includes the time to "
        "flush them at its end"
    )
    if nbytes < ram_bytes:
        yield (
            f"{path}: the file ({format_bytes(nbytes)}) is smaller than memory "
            f"({format_bytes(ram_bytes)}), so that the page cache holds all of it; use O_DIRECT, or a "
            f"--size above {format_bytes(ram_bytes)}"
        )


def sparse_caution(path: Path) -> str:
    return (
        f"{path}: the file is sparse (fewer blocks are allocated than it is long: no preallocation, or "
        "a compressing file system): reads may come from no device; give a directory on another file "
        "system"
    )


def thread_cautions(plan: Plan, backend: str) -> Iterator[str]:
    """About backends whose threads are fewer than the depth."""
    workers = _WORKERS.get(backend)
    if workers is not None and max(plan.depths) > workers:
        yield (
            f"{backend} has {workers} threads per queue{' and direction' * (backend == 'threads')}: at "
            f"a depth above {workers} blocks wait for a thread"
            f"{', which their latency includes' * (backend == 'native_threads')}"
        )


def pages_cautions(pages: Pages, buffer: AlignedBuffer) -> Iterator[str]:
    """About buffers that do not lie on the pages that were asked for."""
    share = huge_share(buffer)
    if share is None:
        return
    if pages is Pages.HUGE and share < 0.9:
        yield (
            f"{share:.0%} of the buffers lie on huge pages: reads into small ones are split and "
            "slower; set /sys/kernel/mm/transparent_hugepage/enabled to madvise, or free memory"
        )
    elif pages is Pages.SMALL and share > 0.1:
        yield f"{share:.0%} of the buffers lie on huge pages in spite of --pages small"


def huge_share(buffer: AlignedBuffer, smaps: Path = Path("/proc/self/smaps")) -> float | None:
    """The part of a buffer (pages all touched) that is on huge pages; None where unknown."""
    begin, end = buffer.address, buffer.address + buffer.nbytes
    huge, inside = 0, False
    try:
        lines = smaps.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):
            low, _, high = first.partition("-")
            inside = int(low, 16) < end and int(high, 16) > begin
        elif inside and first == "AnonHugePages:":
            huge += int(line.split()[1]) << 10
    return min(1.0, huge / buffer.nbytes)


def result_cautions(results: Sequence[Result], sites: Sequence[Site]) -> Iterator[str]:
    """About figures of too few blocks, and those that no device behind this link could give."""
    yield from _few_cautions(results, sites)
    for number, site in enumerate(sites):
        limit = sum(link.gb_per_s for link in site.links)
        if not limit or len(site.links) < len(site.devices):
            continue
        highest = max(
            (
                run.paths[number][op].gb_per_s
                for result in results
                for run in result.runs
                for op in Op
                if op in run.paths[number]
            ),
            default=0.0,
        )
        if highest > limit * _TOLERANCE:
            yield (
                f"{site.path} moved {highest:.2f} GB/s, more than the {limit:.2f} GB/s of its PCIe "
                "link: a cache answered"
            )


def _few_cautions(results: Sequence[Result], sites: Sequence[Site]) -> Iterator[str]:
    """Where a run is over before each place in the queue was used once, its figure is chance."""
    for result in results:
        setting = result.setting
        for number, site in enumerate(sites):
            for op in result.mode.ops:
                fewest = min(run.paths[number][op].blocks for run in result.runs)
                if fewest < setting.depth_of(op) * setting.threads:
                    yield (
                        f"{site.path}: a {result.mode.value} run ended {fewest} blocks of "
                        f"{format_bytes(setting.block_bytes)} ({op.name.lower()}) at depth "
                        f"{setting.depth_of(op)}, too few for a figure: give a longer --runtime, or a "
                        "smaller --block-size or --depth"
                    )
