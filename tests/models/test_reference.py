"""The in-memory trainer trains, and rounds as the split master does."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from tiermem.models.gpt import GPTConfig
from tiermem.models.reference import (
    ReferenceTrainer,
    TrainOptions,
    round_ties_away,
    train_reference,
    warmup_cosine,
)
from tiermem.models.text import ByteText

CONFIG = GPTConfig(num_layers=2, hidden_size=64, num_heads=2, context=32)


def _text(tmp_path: Path) -> ByteText:
    (tmp_path / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 40)
    return ByteText([tmp_path / "text"])


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_loss_falls_and_repeats(tmp_path: Path, precision: str) -> None:
    options = TrainOptions(precision=precision, learning_rate=3e-3, clip=1.0)  # type: ignore[arg-type]
    text = _text(tmp_path)
    one, two = (train_reference(CONFIG, 12, text.batches(4, 32), options) for _ in range(2))
    assert one == two
    assert one[-1] < one[0] - 0.5


def test_master_and_copy_stay_together(tmp_path: Path) -> None:
    trainer = ReferenceTrainer(CONFIG, TrainOptions())
    for batch in islice(_text(tmp_path).batches(2, 16), 2):
        trainer.step(batch)
    for master, parameter in zip(trainer.masters, trainer.model.parameters(), strict=True):
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter.detach(), round_ties_away(master))


def test_rounding_inverts_with_a_signed_remainder() -> None:
    low = torch.arange(65536, dtype=torch.int64)
    for high in (0x0000, 0x3F80, 0x4049, 0xBF80, 0xC2FE):
        bits = (low + (high << 16)).to(torch.int32)
        rounded = round_ties_away(bits.view(torch.float32))
        back = rounded.view(torch.int16).to(torch.int32) << 16
        remainder = bits - back
        assert int(remainder.min()) >= -32768
        assert int(remainder.max()) <= 32767
        tie = bits[0x8000] - back[0x8000]
        assert int(tie) == -32768  # away from zero


def test_schedule_warms_up_and_comes_down() -> None:
    factor = warmup_cosine(steps=100, warmup=10)
    assert factor(0) == pytest.approx(0.1)
    assert factor(9) == factor(10) == pytest.approx(1.0)
    assert factor(100) == pytest.approx(0.1)
    assert all(factor(step) >= factor(step + 1) for step in range(10, 100))
