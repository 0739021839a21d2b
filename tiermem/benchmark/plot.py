"""A picture of bandwidth over block size and depth."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from tiermem.benchmark.figures import Result
from tiermem.benchmark.plan import Mode, Pages
from tiermem.errors import ConfigError
from tiermem.types import size_text


def check_plot(path: Path) -> None:
    """Raises ConfigError, before anything is measured, if no picture can be written there."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install '.[plot]' in the clone")
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot is {str(path)!r}; its name must end with .png")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot is {str(path)!r}, but {str(path.parent)!r} is not a directory")


def draw(results: Sequence[Result], title: str, path: Path) -> None:
    """One panel per mode; one line per depth (dashed: small pages); bars from lowest to highest run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    modes = [mode for mode in Mode if any(result.mode is mode for result in results)]
    figure = Figure(figsize=(5.0 * len(modes), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize="medium")
    for panel, mode in zip(figure.subplots(1, len(modes), squeeze=False)[0], modes, strict=True):
        of_mode = [result for result in results if result.mode is mode]
        lines = dict.fromkeys((result.setting.depth, result.pages) for result in of_mode)
        for number, (depth, pages) in enumerate(lines):
            points = sorted(
                (
                    result
                    for result in of_mode
                    if (result.setting.depth, result.pages) == (depth, pages)
                ),
                key=lambda result: result.setting.block_bytes,
            )
            spreads = [result.gb_per_s for result in points]
            below = [spread.median - spread.lowest for spread in spreads]
            above = [spread.highest - spread.median for spread in spreads]
            panel.errorbar(
                [result.setting.block_bytes / 1024 for result in points],
                [spread.median for spread in spreads],
                yerr=[below, above],
                label=f"depth {depth}{', small pages' if pages is Pages.SMALL else ''}",
                linestyle="--" if pages is Pages.SMALL else "-",
                color=f"C{number % 10}",
                marker="o",
                capsize=3,
            )
        panel.set_xscale("log", base=2)
        panel.set_title("duplex (read + write)" if mode is Mode.DUPLEX else mode.value)
        blocks = sorted({result.setting.block_bytes for result in of_mode})
        panel.set_xticks([block / 1024 for block in blocks], [size_text(block) for block in blocks])
        panel.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        panel.set_xlabel("block size")
        panel.set_ylabel("GB/s, median of runs")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    figure.savefig(path, dpi=120)
