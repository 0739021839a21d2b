"""The benchmark says when a figure is not the device's."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tiermem.benchmark import Flow, Mode, Pages, Plan, Result, Run, Session, Setting
from tiermem.benchmark.cautions import (
    cache_cautions,
    huge_share,
    pages_cautions,
    result_cautions,
    shared_cautions,
    site_cautions,
    thread_cautions,
)
from tiermem.benchmark.device import Device, Link
from tiermem.benchmark.place import Site
from tiermem.cli.bench_tables import pages_lines
from tiermem.io import Op, aligned_buffer, files
from tiermem.io.latency import Latency
from tiermem.store.mounts import Mount

HERE = Path("/drive")
SSD = Device("nvme0n1", "SSD", 10**12, False, Link("0000:01:00.0", 8.0, 4, 8.0, 4))


def site(filesystem: str = "ext4", *devices: Device, path: Path = HERE, number: int = 1) -> Site:
    return Site(path, Mount("/", filesystem), devices or (SSD,), 10**12, number)


def test_a_local_drive_needs_no_warning() -> None:
    assert list(site_cautions(site())) == []
    assert list(cache_cautions(HERE, True, 1 << 20, 1 << 30)) == []
    assert list(shared_cautions([site()])) == []


@pytest.mark.parametrize(
    ("filesystem", "words"),
    [
        ("tmpfs", "memory, not a device"),
        ("ramfs", "memory, not a device"),
        ("overlay", "a container's own files"),
        ("nfs4", "network"),
        ("nfs", "network"),
        ("cifs", "network"),
        ("lustre", "network"),
        ("fuse.sshfs", "network"),
    ],
)
def test_filesystems(filesystem: str, words: str) -> None:
    (text,) = site_cautions(site(filesystem))
    assert f"/drive is on {filesystem}" in text
    assert words in text
    assert "give " in text


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (Device("zram0", "", 1, False, None), "memory, not a device"),
        (Device("loop3", "the file /a.img", 1, False, None), "a loop device over the file /a.img"),
        (Device("vda", "", 1, True, None), "virtual machine's disk"),
        (Device("sda", "QEMU HARDDISK", 1, True, None), "virtual machine's disk"),
        (
            Device("nvme0n1", "X", 1, False, Link("a", 8.0, 2, 16.0, 4)),
            "8 GT/s x2 of at most 16 GT/s x4",
        ),
    ],
)
def test_devices(device: Device, words: str) -> None:
    (text,) = site_cautions(site("ext4", device))
    assert words in text


def test_the_page_cache_and_a_file_that_fits_it() -> None:
    large = list(cache_cautions(HERE, False, 2 << 30, 1 << 30))
    assert len(large) == 1
    assert "through the page cache" in large[0]
    small = list(cache_cautions(HERE, False, 1 << 29, 1 << 30))
    assert "(512.0 MiB) is smaller than memory (1.0 GiB)" in small[1]


def test_two_paths_on_one_device() -> None:
    other = Device("nvme1n1", "SSD", 1, False, None)
    two = [site(), site("xfs", SSD, other, path=Path("/second"), number=2)]
    (text,) = shared_cautions(two)
    assert text.startswith("/drive, /second share one device (nvme0n1)")
    apart = [site(), site("xfs", other, path=Path("/second"), number=2)]
    assert list(shared_cautions(apart)) == []


def test_two_paths_on_one_unknown_filesystem() -> None:
    sites = [Site(Path(name), Mount("/", "nfs"), (), 1, 5) for name in ("/a", "/b")]
    (text,) = shared_cautions(sites)
    assert text.startswith("/a, /b share one device")


def measured(gb_per_s: float) -> Result:
    flow = Flow(int(gb_per_s * 1e9), 1, 1.0, Latency())
    return Result(Mode.READ, Setting(4096, 1, 1), Pages.HUGE, (Run(({Op.READ: flow},), 0.0),))


def test_more_than_the_link_carries() -> None:
    (text,) = result_cautions([measured(3.5), measured(4.5)], [site()])
    assert "4.50 GB/s, more than the 3.94 GB/s of its PCIe link" in text
    assert list(result_cautions([measured(3.5)], [site()])) == []
    without_link = site("ext4", Device("vda", "", 1, False, None))
    assert list(result_cautions([measured(4.5)], [without_link])) == []


@pytest.mark.parametrize("blocks", [0, 7, 8])
def test_a_run_of_too_few_blocks(blocks: int) -> None:
    """0.000 GB/s without a word would be taken for the drive's figure."""
    flow = Flow(blocks * 4096, blocks, 1.0, Latency())
    run = Run(({Op.READ: flow},), 0.0)
    said = list(result_cautions([Result(Mode.READ, Setting(4096, 8, 1), Pages.HUGE, (run,))], [site()]))
    assert len(said) == (blocks < 8)
    assert all(f"ended {blocks} blocks of 4.0 KiB (read)" in text for text in said)
    assert all("longer --runtime" in text for text in said)


def test_pages_are_compared_where_something_was_moved() -> None:
    """A slow drive may end nothing in a short run."""
    setting, runs = Setting(4096, 1, 1), {}
    for pages, speed in ((Pages.HUGE, 0), (Pages.SMALL, 4096)):
        run = Run(({Op.READ: Flow(speed, speed // 4096, 1.0, Latency())},), 0.0)
        runs[pages] = Result(Mode.READ, setting, pages, (run,))
    assert "nothing was moved" in next(pages_lines(list(runs.values())))


def test_a_depth_above_the_threads() -> None:
    plan = Plan(paths=(HERE,), depths=(8, 16))
    assert "native_threads has 8 threads" in next(thread_cautions(plan, "native_threads"))
    assert list(thread_cautions(plan, "io_uring")) == []


def test_pages_are_looked_at() -> None:
    with aligned_buffer(8 << 20, huge_pages=False) as buffer:
        buffer.fill(1)
        assert huge_share(buffer) == 0
        assert list(pages_cautions(Pages.SMALL, buffer)) == []
        (text,) = pages_cautions(Pages.HUGE, buffer)
        assert text.startswith("0% of the buffers lie on huge pages")


class Silent:
    def phase(self, text: str) -> None: ...

    def progress(self, runs: float) -> None: ...


def small_plan(*paths: Path) -> Plan:
    return Plan(paths=paths, block_bytes=(4096,), depths=(1,), size_bytes=1 << 20, runtime=0, loops=1)


def warnings_of(plan: Plan) -> str:
    with Session(plan, Silent(), threading.Event()) as session:
        list(session.results())
        return "\n".join(session.warnings)


def test_a_session_says_it_of_memory_and_of_shared_devices(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir():
        pytest.skip("needs /dev/shm")
    said = warnings_of(small_plan(memory, tmp_path, tmp_path))
    assert "/dev/shm is on tmpfs" in said
    assert f"{tmp_path}, {tmp_path} share one device" in said


def test_a_session_says_it_of_a_sparse_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fstat

    class Holes:
        """As a compressing file system answers."""

        def __init__(self, fd: int) -> None:
            self._real = real(fd)
            self.st_blocks = 8

        def __getattr__(self, name: str) -> object:
            return getattr(self._real, name)

    monkeypatch.setattr("tiermem.benchmark.place.os.fstat", Holes)
    assert "the file is sparse" in warnings_of(small_plan(tmp_path))


def test_a_session_passes_on_why_a_file_is_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_direct(fd: int, path: str, *, write: bool) -> bool:
        files._say_buffered(path, "first O_DIRECT transfer: Invalid argument")
        return False

    monkeypatch.setattr("tiermem.io.files._settle_direct", without_direct)
    plan = small_plan(tmp_path)
    with Session(plan, Silent(), threading.Event()) as session:
        assert not session.places[0].file.direct
        said = "\n".join(session.warnings)
    assert "first O_DIRECT transfer: Invalid argument" in said
    assert "no O_DIRECT" in said


def test_a_failed_transfer_ends_it_with_the_place(tmp_path: Path) -> None:
    """The file ends early: the read says where, and everything is removed."""
    with (
        pytest.raises(OSError, match=r"read of .* bytes at offset .*gen0\.bin.*the file ends there"),
        Session(small_plan(tmp_path), Silent(), threading.Event()) as session,
    ):
        file = session.places[0].file
        with open(file.path, "r+b") as other:
            other.truncate(512 << 10)
        list(session.results())
    assert list(tmp_path.iterdir()) == []
