"""Starts the ranks of a benchmark, as `torchrun` would: one process each, gloo between them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def launch(
    script: Path, spec: dict[str, Any], size: int, *, threads: int, prefix: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Runs ``script SPEC-FILE`` as ``size`` ranks with ``threads`` threads each; what they write to
    the file ``spec["result"]``, by rank. ``prefix``: a command to run them under. The first rank that
    fails ends the run: SystemExit."""
    with tempfile.TemporaryDirectory(prefix="tiermem-bench-") as folder:
        port = _free_port()
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(size):
                file, result = Path(folder) / f"spec{rank}.json", Path(folder) / f"result{rank}.json"
                file.write_text(json.dumps(spec | {"result": str(result)}), encoding="utf-8")
                where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
                environment = os.environ | {name: str(value) for name, value in where.items()}
                environment |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": str(threads)}
                command = [*prefix, sys.executable, str(script), str(file)]
                processes.append(subprocess.Popen(command, env=environment))
            _wait(processes)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        return [
            json.loads((Path(folder) / f"result{rank}.json").read_text(encoding="utf-8"))
            for rank in range(size)
        ]


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    while any(process.poll() is None for process in processes):
        for rank, process in enumerate(processes):
            if process.poll():
                raise SystemExit(f"rank {rank} failed with exit code {process.returncode}")
        time.sleep(0.05)
    for rank, process in enumerate(processes):
        if process.returncode:
            raise SystemExit(f"rank {rank} failed with exit code {process.returncode}")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
