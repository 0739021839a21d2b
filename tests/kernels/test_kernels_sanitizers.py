"""The C kernels alone, under the address, undefined-behaviour and thread sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "native" / "src"


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_stress(sanitizer: str, tmp_path: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    program = tmp_path / "stress"
    flags = ["-std=gnu11", "-g", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    flags += ["-Wno-unused-parameter", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    flags += [f"-I{ROOT / 'native' / 'include'}", f"-I{SOURCES}"]
    sources = [Path(__file__).with_name("kernels_stress.c"), *sorted(SOURCES.glob("kernels*.c"))]
    files = [str(source) for source in (*sources, SOURCES / "pool.c")]
    command = [compiler, *flags, *files, "-o", str(program), "-lm", "-lpthread"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot find" in built.stderr:
        pytest.skip(f"the compiler has no runtime for -fsanitize={sanitizer}")
    assert built.returncode == 0, built.stderr
    run = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=200)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "ok\n"
    assert not run.stderr
