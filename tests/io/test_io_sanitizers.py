"""The C engine alone, under the address, undefined-behaviour and thread sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "native" / "src"


BACKENDS = {"libaio": 0, "io_uring": 1, "native_threads": 2}  # the numbers of tiermem.h


@pytest.fixture(scope="module", params=["address,undefined", "thread"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sanitizer = request.param
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    program = tmp_path_factory.mktemp("sanitizer") / "stress"
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
    build += ["-Wno-unused-parameter"]
    patterns = ("engine*.c", "aio.c", "uring*.c", "threads.c")
    build += [str(source) for pattern in patterns for source in sorted(SOURCES.glob(pattern))]
    result = subprocess.run(
        [*build, "-o", str(program), "-lpthread"], capture_output=True, text=True, check=False
    )
    if "cannot find" in result.stderr:
        pytest.skip(f"the compiler has no runtime for -fsanitize={sanitizer}")
    assert result.returncode == 0, result.stderr
    return program


@pytest.mark.slow
@pytest.mark.parametrize("backend", list(BACKENDS))
def test_stress(program: Path, tmp_path: Path, backend: str) -> None:
    command = [str(program), str(BACKENDS[backend]), str(tmp_path / "file")]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    if run.stdout == "skip\n":
        pytest.skip(f"{backend} does not work here")
    assert run.stdout == "ok\n"
    assert not run.stderr
