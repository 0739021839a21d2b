"""The machine and the native core."""

from __future__ import annotations

import os
import platform
import shutil
import sysconfig
from pathlib import Path
from typing import Any

from tiermem.doctor.finding import Finding, Level

_SLOWER = "I/O runs on Python threads and updates on torch operations, several times slower"


def check_system() -> Finding:
    """Facts that every other finding depends on."""
    cpus = len(os.sched_getaffinity(0))
    text = (
        f"{platform.system()} {platform.release()}, {platform.machine()}, "
        f"Python {platform.python_version()}, {cpus} of {os.cpu_count()} CPUs"
    )
    if platform.system() != "Linux":
        return Finding("system", Level.PROBLEM, text, "tiermem is made for Linux only")
    return Finding("system", Level.OK, text)


def check_core() -> Finding:
    """Whether the native core is there, and which instructions its kernels use."""
    try:
        import tiermem._native as native
    except ImportError as error:
        return _missing_core(error)
    lib: Any = native.lib
    isas = {lib.TM_ISA_PLAIN: "plain", lib.TM_ISA_AVX2: "avx2", lib.TM_ISA_AVX512: "avx512"}
    used = isas[lib.tm_isa_best()]
    text = f"built; kernels use {used}"
    if used == "plain":
        return Finding(
            "native core",
            Level.NOTE,
            f"{text} C: this processor, or what runs it, has no AVX2 with FMA, and updates take longer",
            "if this is a virtual machine, pass the host's CPU features through to it",
        )
    return Finding("native core", Level.OK, text)


def _missing_core(error: ImportError) -> Finding:
    """Says what is missing to build it."""
    compiler = os.environ.get("CC", "gcc").split()[0]
    header = Path(sysconfig.get_path("include")) / "Python.h"
    missing = []
    if shutil.which(compiler) is None:
        missing.append(f"a C compiler ({compiler} is not found)")
    if not header.exists():
        missing.append(f"the Python headers ({header} is not there)")
    remedy = f"install {' and '.join(missing)}, then reinstall tiermem" if missing else (
        f"a compiler ({compiler}) and the Python headers are there: reinstall tiermem and read what "
        "the build says (pip install -v)"
    )  # fmt: skip
    return Finding("native core", Level.PROBLEM, f"missing ({error}): {_SLOWER}", remedy)
