"""What works on this machine, what does not, and what to do about it. Prints nothing.

`diagnose` looks at everything by trying it: a backend moves bytes, the arena is locked, a file is
opened with O_DIRECT. It needs no torch and says so where it is missing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from tiermem.doctor.finding import Finding, Level

__all__ = ["Finding", "Level", "diagnose", "works"]


def diagnose(paths: Sequence[Path], *, look_for_torch: bool = True) -> list[Finding]:
    """Findings about the machine and each directory of ``paths``. Raises nothing on purpose.

    Takes about a second, and with ``look_for_torch`` as long as importing torch. Leaves nothing behind.
    """
    from tiermem.doctor.accelerator import check_torch
    from tiermem.doctor.backends import check_backends, check_registration, check_requests
    from tiermem.doctor.directories import check_directory
    from tiermem.doctor.host import check_descriptors, check_host_memory, check_locking, check_pages
    from tiermem.doctor.system import check_core, check_system

    findings = [check_system(), check_core()]
    if look_for_torch:
        findings += check_torch()
    findings += _tried("host memory", check_host_memory)
    findings += _tried("locked memory", check_locking)
    findings += _tried("huge pages", check_pages)
    findings += _tried("open files", check_descriptors)
    usable: list[Path | None] = []
    for path in paths:
        found = check_directory(path)
        findings += found
        if len(found) > 1:  # else it can hold no file, and nothing more was looked at
            usable.append(path)
    for place in usable or [None]:
        findings += _tried("backends", functools.partial(check_backends, place))
    findings += _tried("io_uring memory", check_registration)
    return [*findings, check_requests()]


def _tried(topic: str, check: Callable[[], Finding | list[Finding]]) -> list[Finding]:
    """What ``check`` finds, or that the system does not even let it look (no descriptor is left)."""
    try:
        found = check()
    except OSError as error:
        text = f"cannot be looked at: {error}"
        return [Finding(topic, Level.PROBLEM, text, "mend this first, and run it again")]
    return found if isinstance(found, list) else [found]


def works(findings: Sequence[Finding]) -> bool:
    """Whether there is no problem among them."""
    return all(finding.level is not Level.PROBLEM for finding in findings)
