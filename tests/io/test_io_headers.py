"""The native core compiles, without warnings, whatever linux/io_uring.h the machine has."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SYSTEM_HEADER = Path("/usr/include/linux/io_uring.h")
LATER = r"IORING_SETUP_(COOP_TASKRUN|SUBMIT_ALL)|IORING_RSRC_REGISTER_SPARSE"


def compile_with(header: str, folder: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (folder / "linux").mkdir()
    (folder / "linux" / "io_uring.h").write_text(header)
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-c"]
    for source in ("uring.c", "uring_memory.c"):
        command = [compiler, *flags, f"-I{folder}", f"-I{ROOT / 'native' / 'include'}"]
        command += [str(ROOT / "native" / "src" / source), "-o", str(folder / "object")]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr


def test_none(tmp_path: Path) -> None:
    """As of a machine without it: nothing that the code asks for is defined."""
    compile_with("", tmp_path)


def test_old(tmp_path: Path) -> None:
    if not SYSTEM_HEADER.exists():
        pytest.skip("no header to make an old one of")
    header = SYSTEM_HEADER.read_text()
    compile_with(re.sub(rf"#define\s+({LATER})\b.*", "", header), tmp_path)


def test_of_this_machine(tmp_path: Path) -> None:
    if not SYSTEM_HEADER.exists():
        pytest.skip("no header")
    compile_with(SYSTEM_HEADER.read_text(), tmp_path)
