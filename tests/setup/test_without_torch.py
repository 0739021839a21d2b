"""The tool installs and runs without torch: in an environment of exactly what it declares."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

_NAME = re.compile(r"[A-Za-z0-9._-]+")


def declared(distribution: str) -> Iterator[str]:
    """What a distribution requires here, without its extras. tiermem: from pyproject.toml."""
    for requirement in metadata.requires(distribution) or ():
        wanted, _, marker = requirement.partition(";")
        outside = ('sys_platform == "win32"', 'platform_system == "Windows"', "emscripten", "wasm")
        if "extra" in marker or any(word in marker.replace("'", '"') for word in outside):
            continue
        match = _NAME.match(wanted.strip())
        assert match is not None
        yield match[0]


def closure(distribution: str) -> set[str]:
    found: set[str] = set()
    waiting = list(declared(distribution))
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            waiting += declared(name)
        except metadata.PackageNotFoundError:  # for another Python version or system
            continue
        found.add(name)
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """A directory with links to tiermem and to its declared dependencies, and nothing else."""
    site = tmp_path_factory.mktemp("site")
    (site / "tiermem").symlink_to(repository / "tiermem")
    for name in (*closure("tiermem"), "tiermem"):
        distribution = metadata.distribution(name)
        for file in distribution.files or ():
            top = file.parts[0]
            source = Path(str(distribution.locate_file(top)))
            wanted = top not in ("..", "__pycache__") and not top.startswith("__editable__")
            if wanted and source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    assert not (site / "torch").exists()
    return site


def run_there(site: Path, code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    start = f"import sys; sys.path.insert(0, {str(site)!r}); {code}"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", start, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_there_is_no_torch(site: Path) -> None:
    assert "ModuleNotFoundError" in run_there(site, "import torch").stderr


def test_the_engine_and_the_tool_run(site: Path, tmp_path: Path) -> None:
    command = "from tiermem.cli import main; main()"
    small = (
        "--size",
        "2MiB",
        "--block-size",
        "16KiB",
        "--depth",
        "4",
        "--runtime",
        "0",
        "--loops",
        "1",
    )
    done = run_there(site, command, "bench", tmp_path, *small, "--verify", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["results"]) == 3
    assert run_there(site, command, "--help").returncode == 0
    short = ("--size", "128MiB", "--budget", "1s", "--no-save", "--emit", "tiermem")
    tuned = run_there(site, command, "tune", tmp_path, *short)
    assert tuned.returncode == 0, tuned.stderr
    assert json.loads(tuned.stdout)["paths"] == [str(tmp_path)]


def test_training_says_what_to_install(site: Path) -> None:
    done = run_there(site, "from tiermem.cli import main; main()", "train", "--steps", "1")
    assert done.returncode == 1
    assert "pip install '.[train]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_torch_is_an_extra_of_training_only() -> None:
    names = [re.split(r"[ >=<;\[]", text)[0] for text in metadata.requires("tiermem") or ()]
    assert "torch" in names
    assert "torch" not in set(declared("tiermem"))
    assert "matplotlib" not in set(declared("tiermem"))
