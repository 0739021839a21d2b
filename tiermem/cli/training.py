"""The training loop of `tiermem train`."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
from rich.console import Console

import tiermem
from tiermem.cli.directory import in_memory
from tiermem.cli.job import DEFAULT_PARAMETERS, ModelSize, TrainJob
from tiermem.cli.progress import StepReport, open_progress
from tiermem.cli.ranks import Ranks, find_ranks, process_group
from tiermem.cli.room import check_room
from tiermem.cli.stopping import Stopping
from tiermem.cli.summary import Agreement, Summary, print_json, print_summary
from tiermem.config import TierConfig
from tiermem.errors import ConfigError
from tiermem.models.gpt import GPT, GPTConfig, make_initializer
from tiermem.models.reference import Batch, TrainOptions, train_reference, warmup_cosine
from tiermem.models.text import ByteText
from tiermem.types import format_bytes

STEADY_FROM_STEP = 2
"""Steps before this one also write initial values and record the use trace; they count in no mean."""

REFERENCE_BYTES_PER_PARAMETER = {"bf16": 20, "fp32": 16}


def train_job(job: TrainJob, stopping: Stopping) -> int:
    """Train, show the result, compare if asked; the exit code. Of several ranks the first shows and
    compares."""
    ranks = find_ranks()
    console = Console(stderr=job.as_json, quiet=not ranks.first)
    config = job.tier_config(ranks)
    model_config = resolve_size(job.size)
    text = ByteText(job.files)
    text.batches(job.batch_size, job.sequence_length)  # too short a text is refused here
    check_room(job, config, model_config, ranks.size)
    if job.check:
        _refuse_check_without_memory(model_config, config)
    _say_what_runs(console, job, config, model_config, text, ranks)

    with process_group(ranks):
        summary = _train(job, config, model_config, text, console, stopping, ranks)
    if not ranks.first:
        return stopping.code
    agreement = None
    if job.check and not summary.stopped:
        agreement = _check(job, config, model_config, text, summary, console, stopping)
    print_summary(console, summary, agreement)
    if job.as_json:
        print_json(summary, agreement)
    if stopping.requested or summary.stopped:
        return stopping.code
    return 0 if agreement is None or agreement.acceptable else 1


def resolve_size(size: ModelSize) -> GPTConfig:
    """The model's configuration; bad sizes are a `ConfigError`."""
    try:
        if size.layers is not None and size.hidden is not None:
            heads = size.heads or max(1, size.hidden // 64)
            return GPTConfig(size.layers, size.hidden, heads, size.context)
        return GPTConfig.for_parameters(size.parameters or DEFAULT_PARAMETERS, context=size.context)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def train_options(job: TrainJob, config: TierConfig) -> TrainOptions:
    """What both tiermem and the reference train by."""
    schedule: Callable[[int], float] | None = None
    if config.compute_dtype == "fp16":
        raise ConfigError(
            "compute_dtype 'fp16' needs loss scaling, which this command does not do. Remedy: 'bf16' "
            "or 'fp32', or a loop of your own with optimizer.scale(loss).backward()"
        )
    if job.cosine or job.warmup:
        schedule = warmup_cosine(job.steps, job.warmup, floor=0.1 if job.cosine else 1.0)
    return TrainOptions(
        precision=config.compute_dtype or "fp32",
        ties_away=config.master == "split",
        learning_rate=job.learning_rate,
        weight_decay=job.weight_decay,
        clip=config.gradient_clipping or None,
        schedule=schedule,
        seed=job.seed,
    )


def _say_what_runs(
    console: Console,
    job: TrainJob,
    config: TierConfig,
    model: GPTConfig,
    text: ByteText,
    ranks: Ranks,
) -> None:
    many = f" on each of {ranks.size} ranks at stage {config.stage}" if ranks.size > 1 else ""
    console.print(
        f"GPT with {model.num_parameters:,} parameters ({model.num_layers} layers of "
        f"{model.hidden_size}), {config.compute_dtype}, update {config.effective_update}; "
        f"{len(text):,} bytes of text in {text.num_files:,} files; "
        f"{job.steps} steps of {job.batch_size} x {job.sequence_length} bytes{many}",
        highlight=False,
        soft_wrap=True,
    )
    if config.uses_nvme:
        console.print(f"states on {', '.join(map(str, config.paths))}", highlight=False, soft_wrap=True)
    for path in config.paths:
        if path.is_dir() and in_memory(path):
            console.print(
                f"warning: {path} lies in memory (tmpfs): its files use memory that no budget counts",
                style="yellow",
                soft_wrap=True,
            )


def _train(
    job: TrainJob,
    config: TierConfig,
    model_config: GPTConfig,
    text: ByteText,
    console: Console,
    stopping: Stopping,
    ranks: Ranks,
) -> Summary:
    options = train_options(job, config)
    initialize = make_initializer(job.seed)

    def init(module: torch.nn.Module, name: str) -> None:
        stopping.check()
        initialize(module, name)

    with tiermem.Runtime(config) as rt:
        with torch.device("meta"):
            model = GPT(model_config)
        tiermem.shard(model, rt, init=init)
        optimizer = tiermem.optim.AdamW(
            model.parameters(),
            lr=options.learning_rate,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
        )
        loop = _Loop(rt, model, optimizer, options, stopping)
        batches = text.batches(job.batch_size * ranks.size, job.sequence_length, job.seed)
        mine = slice(ranks.rank * job.batch_size, (ranks.rank + 1) * job.batch_size)
        with open_progress(console, job.steps) as progress:
            for step, (tokens, targets) in zip(range(job.steps), batches, strict=False):
                if loop.stopped:
                    break
                progress.update(loop.step(step, (tokens[mine], targets[mine])))
        steady = loop.steady()
        rt.drain()
        return Summary(
            model=model_config,
            config=config,
            losses=loop.losses,
            tokens_per_step=job.batch_size * ranks.size * job.sequence_length,
            stats=rt.stats(),
            steady=steady,
            step_seconds=loop.seconds,
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            stopped=loop.stopped,
        )


class _Loop:
    """One step after another, with what each did. Owned by the training thread."""

    def __init__(
        self,
        rt: tiermem.Runtime,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        options: TrainOptions,
        stopping: Stopping,
    ) -> None:
        self._comm = rt.communicator(None)
        self._stopping = stopping
        self._others_stop = False  # of several ranks some have been told to
        self._rt = rt
        self._model = model
        self._optimizer = optimizer
        self._clip = options.clip
        self._scheduler = (
            torch.optim.lr_scheduler.LambdaLR(optimizer, options.schedule) if options.schedule else None
        )
        self._before = rt.stats()
        self._steady_from: Any = None
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, step: int, batch: Batch) -> StepReport:
        started = time.perf_counter()
        tokens, targets = (tensor.to(self._rt.device) for tensor in batch)
        loss = self._model(tokens, targets)
        loss.backward()
        if self._clip is not None:
            self._optimizer.clip_grad_norm_(self._clip)  # type: ignore[attr-defined]
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._scheduler is not None:
            self._scheduler.step()
        self.losses.append(self._agree(float(loss.detach())))
        self.seconds.append(time.perf_counter() - started)
        before, self._before = self._before, self._rt.stats()
        if step + 1 == STEADY_FROM_STEP:
            self._steady_from = self._before
        return StepReport(
            step=step + 1,
            loss=self.losses[-1],
            seconds=self.seconds[-1],
            tokens=tokens.numel() * self._comm.size,
            before=before,
            after=self._before,
        )

    def _agree(self, loss: float) -> float:
        """The mean of the losses of all ranks, which also agree to stop after the same step."""
        if self._comm.size == 1:
            return loss
        rows = self._comm.gather_values("loss", [loss, float(self._stopping.requested)])
        self._others_stop = any(stop for _, stop in rows)
        return sum(each for each, _ in rows) / len(rows)

    @property
    def stopped(self) -> bool:
        """Whether training ends here. Several ranks stop together."""
        return self._stopping.requested if self._comm.size == 1 else self._others_stop

    def steady(self) -> tuple[int, int, int] | None:
        """(steps, bytes read, bytes written) since the pipeline is full; None in too short a run."""
        steps = len(self.losses) - STEADY_FROM_STEP
        if self._steady_from is None or steps < 1:
            return None
        read = self._before.read_bytes - self._steady_from.read_bytes
        written = self._before.written_bytes - self._steady_from.written_bytes
        return steps, read, written


def _refuse_check_without_memory(model: GPTConfig, config: TierConfig) -> None:
    needed = model.num_parameters * REFERENCE_BYTES_PER_PARAMETER[config.compute_dtype or "fp32"]
    available = psutil.virtual_memory().available
    if needed > available:
        raise ConfigError(
            f"--check trains the model in memory too, which takes {format_bytes(needed)}; "
            f"{format_bytes(available)} are available: leave out --check or take a smaller model"
        )


def _check(
    job: TrainJob,
    config: TierConfig,
    model_config: GPTConfig,
    text: ByteText,
    summary: Summary,
    console: Console,
    stopping: Stopping,
) -> Agreement:
    console.print("checking: the same training wholly in memory, with plain PyTorch", highlight=False)
    losses = summary.losses
    batch_size = summary.tokens_per_step // job.sequence_length  # of all ranks
    batches = text.batches(batch_size, job.sequence_length, job.seed)
    options = train_options(job, config)
    reference: list[float] = []

    def on_step(step: int, loss: float) -> None:
        reference.append(loss)
        stopping.check()

    with contextlib.suppress(KeyboardInterrupt):  # the caller looks at ``stopping``
        train_reference(model_config, len(losses), batches, options, on_step=on_step)
    return Agreement(losses, reference)
