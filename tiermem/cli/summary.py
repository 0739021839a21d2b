"""What a person sees when training has ended."""

from __future__ import annotations

import json
import statistics
import struct
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from tiermem.config import TierConfig
from tiermem.models.gpt import GPTConfig
from tiermem.types import format_bytes

TOLERANCE = 1e-2
"""Losses further apart than this, relative to the reference, are not the same training."""


def float_bits(value: float) -> int:
    """The bit pattern of ``value`` as fp32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


class Agreement:
    """How the losses of tiermem compare with those of plain PyTorch."""

    def __init__(self, losses: list[float], reference: list[float]) -> None:
        self.pairs = list(zip(losses, reference, strict=False))
        self.num_equal = sum(float_bits(ours) == float_bits(theirs) for ours, theirs in self.pairs)
        self.largest_difference = max(
            (_relative(ours, theirs) for ours, theirs in self.pairs), default=0.0
        )

    @property
    def bit_equal(self) -> bool:
        """Whether every loss has the same bits."""
        return self.num_equal == len(self.pairs)

    @property
    def acceptable(self) -> bool:
        """Whether this is the same training; False for a NaN on one side."""
        return self.bit_equal or self.largest_difference <= TOLERANCE

    def __str__(self) -> str:
        if self.bit_equal:
            return f"all {len(self.pairs)} losses are bit-equal to plain PyTorch in memory"
        agreed = (
            f"{self.num_equal} of {len(self.pairs)} losses are bit-equal to plain PyTorch in memory"
        )
        verdict = "" if self.acceptable else f", more than {TOLERANCE:g}: THEY DO NOT AGREE"
        return f"{agreed}; the largest relative difference is {self.largest_difference:.3g}{verdict}"


def _relative(ours: float, theirs: float) -> float:
    if float_bits(ours) == float_bits(theirs):
        return 0.0
    difference = abs(ours - theirs) / max(abs(theirs), 1e-12)
    return difference if difference == difference else float("inf")


@dataclass(frozen=True, slots=True)
class Summary:
    """One finished (or stopped) training run."""

    model: GPTConfig
    config: TierConfig
    losses: list[float]
    tokens_per_step: int
    stats: Any
    steady: tuple[int, int, int] | None  # steps, bytes read, bytes written once the pipeline is full
    step_seconds: list[float]
    peak_rss_bytes: int
    stopped: bool

    @property
    def median_step_seconds(self) -> float | None:
        """The median over the steps after the first, which also fills the tiers."""
        timed = self.step_seconds[1:] or self.step_seconds
        return statistics.median(timed) if timed else None

    def bytes_per_parameter(self, index: int) -> float | None:
        """Bytes read (1) or written (2) per parameter and step."""
        if self.steady is None:
            return None
        return self.steady[index] / self.steady[0] / self.model.num_parameters


def summary_fields(summary: Summary, agreement: Agreement | None) -> dict[str, Any]:
    """The result as plain values. Units are in the names."""
    stats = summary.stats
    fields: dict[str, Any] = {
        "parameters": summary.model.num_parameters,
        "layers": summary.model.num_layers,
        "hidden_size": summary.model.hidden_size,
        "steps": len(summary.losses),
        "tokens_per_step": summary.tokens_per_step,
        "compute_dtype": summary.config.compute_dtype,
        "update": summary.config.effective_update,
        "state_bytes": {name: dict(tiers) for name, tiers in stats.placement.items()},
        "host_budget_bytes": stats.host.budget,
        "host_peak_bytes": stats.host.peak,
        "device_budget_bytes": stats.device.budget,
        "device_peak_bytes": stats.device.peak,
        "locked_bytes": stats.host.locked + stats.device.locked,
        "peak_rss_bytes": summary.peak_rss_bytes,
        "read_bytes_per_param": summary.bytes_per_parameter(1),
        "written_bytes_per_param": summary.bytes_per_parameter(2),
        "read_bytes": stats.read_bytes,
        "written_bytes": stats.written_bytes,
        "stall_seconds": stats.stall_seconds,
        "step_seconds": summary.median_step_seconds,
        "losses": summary.losses,
        "stopped": summary.stopped,
    }
    if agreement is not None:
        fields["losses_bit_equal"] = agreement.bit_equal
        fields["losses_largest_difference"] = agreement.largest_difference
        fields["reference_losses"] = [theirs for _, theirs in agreement.pairs]
    return fields


def print_json(summary: Summary, agreement: Agreement | None) -> None:
    """One JSON object on one line of standard output."""
    print(json.dumps(summary_fields(summary, agreement)))


def print_summary(console: Console, summary: Summary, agreement: Agreement | None) -> None:
    """The closing table, and the comparison if one was made."""
    table = Table(
        title="stopped" if summary.stopped else "done", show_header=False, title_justify="left"
    )
    table.add_column(style="bold")
    table.add_column()
    for name, value in _rows(summary):
        table.add_row(name, value)
    console.print(table)
    if agreement is not None:
        if agreement.pairs:
            console.print(_loss_table(agreement))
        console.print(str(agreement), style="green" if agreement.acceptable else "red", highlight=False)


def _rows(summary: Summary) -> list[tuple[str, str]]:
    fields = summary_fields(summary, None)
    rows = [("parameters", f"{fields['parameters']:,}")]
    total = sum(sum(tiers.values()) for tiers in fields["state_bytes"].values())
    rows.append(("states", format_bytes(total)))
    for name, tiers in fields["state_bytes"].items():
        where = ", ".join(f"{format_bytes(count)} on {tier}" for tier, count in tiers.items() if count)
        rows.append((f"  {name}", where or "none"))
    for kind in ("host", "device"):
        peak, budget = fields[f"{kind}_peak_bytes"], fields[f"{kind}_budget_bytes"]
        rows.append((f"{kind} memory", f"peak {format_bytes(peak)} of {format_bytes(budget)}"))
    rows.append(("locked, as touched", format_bytes(fields["locked_bytes"])))
    rows.append(("peak RSS", f"{format_bytes(fields['peak_rss_bytes'])} (torch and all)"))
    for name, key in (("read", "read_bytes_per_param"), ("written", "written_bytes_per_param")):
        value = fields[key]
        shown = "too few steps to say" if value is None else f"{value:.2f} bytes per parameter and step"
        rows.append((name, shown))
    seconds = fields["step_seconds"]
    if seconds is not None:
        rate = fields["tokens_per_step"] / seconds
        rows.append(("step", f"{seconds:.3f} s (median), {rate:,.0f} tokens/s"))
    if summary.losses:
        rows.append(("loss", f"{summary.losses[0]:.4f} first, {summary.losses[-1]:.4f} last"))
    return rows


def _loss_table(agreement: Agreement, num_rows: int = 8) -> Table:
    table = Table("step", "tiermem", "plain PyTorch", "bits", title="losses", title_justify="left")
    count = len(agreement.pairs)
    shown = (
        sorted({round(i * (count - 1) / max(1, num_rows - 1)) for i in range(num_rows)})
        if count
        else []
    )
    for step in shown:
        ours, theirs = agreement.pairs[step]
        same = "equal" if float_bits(ours) == float_bits(theirs) else "differ"
        table.add_row(str(step + 1), f"{ours:.7f}", f"{theirs:.7f}", same)
    return table
