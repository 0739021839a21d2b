"""Paths that cannot be used are refused before the first step; those that can but should not warn."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from tiermem.errors import ConfigError, TierIOError

Mount = Callable[..., Path]


def config_of(*paths: Path | str, **changes: Any) -> dict[str, Any]:
    return {
        "params": "nvme",
        "optimizer": "nvme",
        "paths": [str(p) for p in paths],
        "device": "cpu",
        "host_memory": "8MiB",
        "persistence_threshold_numel": 100,
        "resident_memory": 0,
        **changes,
    }


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))


def train(config: dict[str, Any]) -> list[torch.Tensor]:
    with tiermem.Runtime(config) as runtime:
        model = tiermem.shard(make_model(), runtime)
        optimizer = tiermem.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [tiermem.full_param(p) for p in model.parameters()]


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing'? does not exist.*create"):
        tiermem.Runtime(config_of(tmp_path / "missing"))
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(ConfigError, match="not a directory"):
        tiermem.Runtime(config_of(file))
    assert file.read_text() == "precious"


def test_dev_null_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"/dev/null.*not a directory"):
        tiermem.Runtime(config_of("/dev/null"))


def test_a_dangling_link_and_an_empty_path_are_refused(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="link"):
        tiermem.Runtime(config_of(link))


def test_a_link_to_a_directory_works(tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "drive")
    train(config_of(tmp_path / "link"))
    assert list((tmp_path / "drive").iterdir()) == []


def test_a_filesystem_mounted_read_only_is_refused(mount: Mount) -> None:
    with pytest.raises(ConfigError, match="read-only"):
        tiermem.Runtime(config_of(mount(1 << 20, "ro")))


UNPRIVILEGED = """
import os, sys, tiermem
with tiermem.Runtime({'host_memory': '8MiB'}):
    pass  # everything is imported while it can be read
os.setgid(65534)
os.setuid(65534)
try:
    tiermem.Runtime({'params': 'nvme', 'paths': [sys.argv[1]], 'host_memory': '8MiB'})
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_directory_without_write_permission_is_refused(tmp_path: Path) -> None:
    """As an ordinary user: root may write anywhere."""
    if os.getuid() != 0:
        locked = tmp_path / "locked"
        locked.mkdir(mode=0o555)
        with pytest.raises(ConfigError, match="not writable"):
            tiermem.Runtime(config_of(locked))
        return
    with tempfile.TemporaryDirectory() as directory:  # pytest's own is closed to others
        os.chmod(directory, 0o555)
        result = subprocess.run(
            [sys.executable, "-c", UNPRIVILEGED, directory],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert result.stdout.startswith("ConfigError"), result.stdout + result.stderr
        assert "not writable" in result.stdout
        assert directory in result.stdout


def test_every_bad_path_is_in_one_message(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as caught:
        tiermem.Runtime(
            config_of(tmp_path / "good", tmp_path / "missing", tmp_path / "file", "/dev/null")
        )
    for name in ("missing", "file", "/dev/null"):
        assert name in str(caught.value)
    assert list((tmp_path / "good").iterdir()) == []


def test_bad_paths_that_nothing_uses_do_no_harm(tmp_path: Path) -> None:
    train(config_of(tmp_path / "missing", params="host", optimizer="host"))


def test_the_same_path_twice_works_or_is_refused(tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    try:
        train(config_of(tmp_path / "drive", tmp_path / "drive"))
    except ConfigError as error:
        assert "drive" in str(error)
    assert list((tmp_path / "drive").iterdir()) == []


def test_tmpfs_works_with_a_warning(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    expected = train(config_of(params="host", optimizer="host"))
    point = mount(64 << 20)
    with caplog.at_level(logging.WARNING, "tiermem"):
        got = train(config_of(point))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert any("tmpfs" in r.getMessage() and str(point) in r.getMessage() for r in caplog.records)
    assert list(point.iterdir()) == []


def test_an_ordinary_directory_does_not_warn_of_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tiermem"):
        train(config_of(tmp_path))
    assert not any("is memory" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("room", [128 << 10, 400 << 10, 900 << 10])
def test_a_full_filesystem_is_refused_before_the_first_step(mount: Mount, room: int) -> None:
    """131 k parameters take 2 + 12 bytes each and their gradients up to 4: 2.3 MB at most."""
    point = mount(room)
    steps = []
    with (
        tiermem.Runtime(config_of(point)) as runtime,
        pytest.raises((TierIOError, ConfigError), match=r"need(s|ed)") as caught,
    ):
        model = tiermem.shard(make_model(), runtime)
        optimizer = tiermem.optim.AdamW(model.parameters())
        steps.append(1)
        model(torch.ones(2, 256)).sum().backward()
        optimizer.step()
    assert steps == []
    numbers = [int(n) for n in re.findall(r"(\d+) bytes|and (\d+) ", str(caught.value)) for n in n if n]
    assert len(numbers) >= 2  # needed and free
    assert any(n > room // 2 for n in numbers) or any(n <= room for n in numbers)
    assert str(point) in str(caught.value)
    assert list(point.iterdir()) == []


def test_one_full_path_of_two_is_named(mount: Mount, tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    full = mount(64 << 10)
    config = config_of(tmp_path / "drive", full, stripe_bytes=4096)
    with tiermem.Runtime(config) as runtime, pytest.raises((TierIOError, ConfigError), match=str(full)):
        model = tiermem.shard(make_model(), runtime)
        tiermem.optim.AdamW(model.parameters())
    assert list((tmp_path / "drive").iterdir()) == []
    assert list(full.iterdir()) == []


def test_after_a_refusal_the_same_model_can_be_sharded_elsewhere(mount: Mount, tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    model = make_model()
    expected = [p.detach().clone() for p in model.parameters()]
    with tiermem.Runtime(config_of(mount(128 << 10))) as runtime, pytest.raises(TierIOError):
        tiermem.shard(model, runtime)
    with tiermem.Runtime(config_of(tmp_path / "drive")) as runtime:
        tiermem.shard(model, runtime)
        for param, value in zip(model.parameters(), expected, strict=True):
            assert torch.equal(tiermem.full_param(param), value)


def test_a_directory_given_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    config = {"params": "nvme", "paths": [tmp_path, tmp_path / "link"], "host_memory": "16MiB"}
    with pytest.raises(ConfigError, match="same directory as"):
        tiermem.Runtime(config)
