"""The C engine alone, under the address, undefined-behaviour and thread sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "native" / "src"


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_stress(tmp_path: Path, sanitizer: str) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    program = tmp_path / "stress"
    build = [
        compiler,
        "-std=gnu11",
        "-g",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-fsanitize={sanitizer}",
    ]
    build += ["-fno-sanitize-recover=all", f"-I{ROOT / 'native' / 'include'}", f"-I{SOURCES}"]
    build += [str(Path(__file__).with_name("engine_stress.c"))]
    build += [
        str(source) for pattern in ("engine*.c", "aio*.c") for source in sorted(SOURCES.glob(pattern))
    ]
    result = subprocess.run(
        [*build, "-o", str(program), "-lpthread"], capture_output=True, text=True, check=False
    )
    if "cannot find" in result.stderr:
        pytest.skip(f"the compiler has no runtime for -fsanitize={sanitizer}")
    assert result.returncode == 0, result.stderr
    run = subprocess.run(
        [str(program), str(tmp_path / "file")], capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "ok\n"
    assert not run.stderr
