"""The head and the tables of `tiermem bench`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table

from tiermem.benchmark import Flow, Pages, Result, Session, Spread
from tiermem.benchmark.device import Device
from tiermem.benchmark.figures import PERCENTILES, latency_of
from tiermem.benchmark.place import Place
from tiermem.io import Op
from tiermem.types import format_bytes, size_text

_COLUMNS = ("block", "depth", "GB/s", "mean ± stdev", "runs", "IOPS", "p50", "p99", "p99.9")
_LEGEND = (
    "GB/s (10^9 bytes) and IOPS are medians of the runs, and runs the slowest and the fastest; p50 to "
    "p99.9 are latencies of single blocks, from submission to completion, over all runs"
)
_FEW = "few"


def head_lines(session: Session) -> Iterator[str]:
    """What is measured, where, and by what."""
    plan = session.plan
    for place in session.places:
        yield from place_lines(place)
    yield f"backend      {session.backend} ({session.reason.removeprefix(f'{session.backend}: ')})"
    length = f"{plan.runtime:g} s" if plan.runtime else "one pass"
    threads = "1 thread" if plan.threads == 1 else f"{plan.threads} threads"
    yield (
        f"runs         {plan.loops} of {length} each, sequential, {threads} per path, a file of "
        f"{size_text(plan.size_bytes)} in each path, written once before"
    )
    for name in session.reclaimed:
        yield f"reclaimed    {name} of a run that was killed"


def place_lines(place: Place) -> Iterator[str]:
    """What a path lies on."""
    site = place.site
    yield f"path         {site.path}"
    for device in site.devices:
        yield f"  device     {_device_line(device)}"
        yield f"  PCIe link  {_link_line(device)}"
    if not site.devices:
        yield "  device     none that the kernel shows"
    mount = site.mount
    source = f", {mount.source}" if mount.source else ""
    yield (
        f"  filesystem {mount.filesystem} at {mount.mount_point}{source}, "
        f"{format_bytes(site.free_bytes)} free"
    )
    yield f"  O_DIRECT   {'yes' if place.file.direct else 'no: through the page cache'}"


def _device_line(device: Device) -> str:
    size = f", {device.size_bytes / 1e9:.0f} GB" if device.size_bytes else ""
    kind = ", rotating" if device.rotational and not device.is_virtual else ""
    return f"{device.name}, {device.model or 'no model known'}{size}{kind}"


def _link_line(device: Device) -> str:
    link = device.link
    if link is None:
        return "not shown by sysfs"
    return (
        f"{link.speed:g} GT/s x{link.width} ({link.gb_per_s:.1f} GB/s) of at most "
        f"{link.max_speed:g} GT/s x{link.max_width} ({link.max_gb_per_s:.1f} GB/s)"
    )


def result_table(results: Sequence[Result], paths: Sequence[str]) -> Table:
    """A row for each operation; with several paths the aggregate, then each path."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    with_pages = len({result.pages for result in results}) > 1
    left = ["mode", *(["path"] if len(paths) > 1 else []), *(["pages"] if with_pages else [])]
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        for op in result.mode.ops:
            mode = result.mode.value if len(result.mode.ops) == 1 else f"duplex {op.name.lower()}"
            rows = [("all", [run.total(op) for run in result.runs])]
            if len(paths) > 1:
                rows += [(path, [r.paths[i][op] for r in result.runs]) for i, path in enumerate(paths)]
            for where, flows in rows:
                first = [mode, *([where] if len(paths) > 1 else [])]
                first += [result.pages.value] if with_pages else []
                setting = [size_text(result.setting.block_bytes), str(result.setting.depth)]
                table.add_row(*first, *setting, *_cells(flows))
    return table


def legend(table: Table) -> str:
    """What the columns of a `result_table` mean, and ``few`` where it stands in one."""
    cells = (cell for column in table.columns[-len(PERCENTILES) :] for cell in column.cells)
    return _LEGEND + (f"; {_FEW}: too few blocks for this percentile" if _FEW in cells else "")


def _cells(flows: Sequence[Flow]) -> list[str]:
    spread = Spread.of(flow.gb_per_s for flow in flows)
    latency = latency_of(flows)
    return [
        f"{spread.median:.3f}",
        f"{spread.mean:.3f} ± {spread.stdev:.3f}",
        f"{spread.lowest:.3f}..{spread.highest:.3f}",
        f"{statistics.median(flow.iops for flow in flows):,.0f}",
        *(_duration(latency.percentile_ns(percent)) for percent in PERCENTILES.values()),
    ]


def _duration(ns: float | None) -> str:
    if ns is None:
        return _FEW
    if ns < 1e5:
        return f"{ns / 1e3:.1f} us"
    return f"{ns / 1e6:.2f} ms" if ns < 1e9 else f"{ns / 1e9:.2f} s"


def pages_lines(results: Sequence[Result]) -> Iterator[str]:
    """Small pages against huge ones: medians of ratios inside one loop, and their spread."""
    by_pages = {(r.mode, r.setting, r.pages): r for r in results}
    for result in results:
        other = by_pages.get((result.mode, result.setting, Pages.SMALL))
        if result.pages is not Pages.HUGE or other is None:
            continue
        for op in result.mode.ops:
            yield _pages_line(result, other, op)


def _pages_line(huge: Result, small: Result, op: Op) -> str:
    pairs = [
        (one.total(op).gb_per_s, two.total(op).gb_per_s)
        for one, two in zip(small.runs, huge.runs, strict=False)
    ]
    mode = "" if len(huge.mode.ops) == 1 else "duplex "
    text = (
        f"4 KiB pages  {mode}{op.name.lower()} of {size_text(huge.setting.block_bytes)} at depth "
        f"{huge.setting.depth}: "
    )
    found = [one / two for one, two in pairs if two]
    if not found:  # a slow drive, and short runs
        return f"{text}nothing was moved on huge pages"
    ratios = Spread.of(found)
    return (
        f"{text}{ratios.median:.2f} [{ratios.lowest:.2f}, {ratios.highest:.2f}] times the bandwidth on "
        "huge pages"
    )
