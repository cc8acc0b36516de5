"""Train a model on a data set in time order and test it on later rows."""

from __future__ import annotations

import dataclasses
import math
import shutil
import threading
import warnings
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from tqdm import tqdm

from rec_kernels.dlrm import checkpoint, devices, report, runs
from rec_kernels.dlrm.config import TrainConfig
from rec_kernels.dlrm.data import Batch, DataError, DataSet, prefetch
from rec_kernels.dlrm.model import flops_per_example
from rec_kernels.dlrm.model_factory import build_model, restored_model
from rec_kernels.dlrm.ranks import Ranks, process_group
from rec_kernels.dlrm.reader import Reader
from rec_kernels.dlrm.runs import NotFiniteError, RunInterruptedError, TrainingError, stop_at_signal
from rec_kernels.dlrm.scores import Clock, Window, predict, score
from rec_kernels.threads import ShortWaits

WINDOWS = 20  # points of the training curves; the AUC of each needs a sort
POSITION = ("step", "seconds", "best", "worse", "stopped_early", "machines")  # attributes of Run in its checkpoint


def train(
    config: TrainConfig, data: DataSet | None = None, *, resume: Path | None = None, progress: bool = True
) -> dict:
    """Trains, tests and writes the run's folder, on one process or on those started by torchrun.

    A report that cannot be written is a warning, so that it hides neither the result nor an error.

    Args:
        config: on resume, options that affect the outcome must be equal to the run's.
        data: the data set; by default the one that ``config.data`` names.
        resume: folder of a run to resume, to the bits of an uninterrupted run.
        progress: show a progress bar.

    Returns:
        The test record, and "directory", the folder of the run.

    Raises:
        DataError: the data or the checkpoint is missing, invalid, or of another config.
        RunExistsError: a run named ``config.run`` exists, or another process trains the one to resume.
        TrainingError: the loss is not finite (NotFiniteError), a batch is too large for ``config.memory_budget``, or
            the options define no valid model.
        DeviceError: ``config.device`` cannot be used.
        IndexError: an id is out of range.
        RunInterruptedError: Ctrl-C or SIGTERM; the run can be resumed.
    """
    with process_group(config.device) as ranks, ExitStack() as stack:
        run = _open_run(config, data, resume, ranks, stack)
        run.progress = progress and run.writes
        try:
            # Signals stay deferred while a failure is recorded: torchrun stops all processes after the first failure.
            with stop_at_signal() as stop, ShortWaits(), _record_failure(run):
                run.fit(stop)
            with _record_failure(run):
                test = run.test()
        finally:
            run.model.local_tables.close()
        _report(run)
        return test | {"directory": str(run.directory)}


@contextmanager
def _record_failure(run: Run) -> Iterator[None]:
    """Writes a failure or an interruption in the block to the run's folder, and adds context to some errors."""
    config = run.config
    try:
        yield
    except RunInterruptedError:
        _report(run)
        raise
    except Exception as error:
        cause = getattr(error, "cause", type(error).__name__)  # "cause" is set on errors received from another rank
        with suppress(OSError, DataError):  # a full disk or a link must not hide the error
            run.records.append({"kind": "failed", "step": run.step + 1, "cause": cause, "error": str(error) or cause})
            if run.writes:
                report.write(run.directory)
        if isinstance(error, MemoryError) and config.backing == "disk":
            now = f"memory_budget is {config.memory_budget!r}, batch_size {config.batch_size}"
            raise TrainingError(f"{error} ({now})") from error
        where = f"data set {run.data.name!r}, after step {run.step} of {run.steps}: {error}"
        if isinstance(error, IndexError):  # a GPU reports it a step later
            raise IndexError(where) from error
        if hasattr(error, "cause"):
            raise TrainingError(where) from error
        raise


#: Values that sharded tables support, of options that do not support all.
SHARDED_VALUES: dict[str, tuple] = {
    "backing": ("device", "host"),
    "embedding": ("full", "hash", "qr", "qr_add", "qr_concat"),
    "dedup": ("auto", "off"),
}


def _open_run(config: TrainConfig, data: DataSet | None, resume: Path | None, ranks: Ranks, stack: ExitStack) -> Run:
    """Creates or resumes a run; its folder is locked until ``stack`` closes."""
    single = ranks.world_size == 1
    for name, allowed in SHARDED_VALUES.items():
        if not single and (value := getattr(config, name)) not in allowed:
            raise TrainingError(
                f"{name} is {value!r}, which tables sharded over several processes do not support: allowed is "
                f"{' or '.join(map(repr, allowed))}, or one process"
            )
    device = devices.find(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if resume is None and config.run is not None:
        ranks.on_rank_0(lambda: runs.refuse_existing(config.runs_dir, str(config.run)))
    reader = ranks.local_rank_0_first(lambda: Reader(config, data, resume, ranks))
    ranks.require_equal({"options": str(config), "data": str(checkpoint.identity(reader)), "resume": str(resume)})
    name = config.run_name(reader.name)
    directory = resume or ranks.on_rank_0(lambda: runs.create_run(config.runs_dir, config.run, name))
    try:
        ranks.on_rank_0(lambda: stack.enter_context(runs.locked(directory)))
        if resume is None and ranks.rank == 0:
            runs.write_config(directory, dataclasses.asdict(config), reader.dedup._asdict(), devices.gpu_name(device))
        if single:
            return Run(config, reader, directory, resume=resume is not None)
        from rec_kernels.dlrm.sharded import ShardedRun  # imports TorchRec

        return ShardedRun(config, reader, directory, resume=resume is not None)
    except BaseException:
        if resume is None and ranks.rank == 0:
            shutil.rmtree(directory)  # nothing was trained: free the name
        raise


def _report(run: Run) -> None:
    if not run.writes:
        return
    try:
        report.write(run.directory)
    except (OSError, DataError) as error:
        warnings.warn(f"the report of {run.directory} could not be written: {error}", stacklevel=3)


def evaluate(directory: Path, data: DataSet | None = None, *, split: str = "test", device: str | None = None) -> dict:
    """Scores a run's last checkpoint on the split "test" or "valid", the held-out rows.

    Args:
        directory: folder of the run. data: as in ``train``. device: "cpu" or "cuda"; by default the run's.

    Raises:
        DataError: the run, its checkpoint or its data is missing or invalid. Others: as in ``train``.
    """
    config = TrainConfig.read(directory)
    try:
        config = config if device is None else dataclasses.replace(config, device=device)
    except ValueError as error:
        raise DataError(f"{directory}: {error}") from error
    if data is None:
        refuse_to_run_code(config, directory)
    with process_group(config.device) as ranks:
        reader = ranks.local_rank_0_first(lambda: Reader(config, data, directory, ranks))
        if reader.num_rows(split) == 0:
            raise DataError(f"{directory} has no rows in split {split!r}")
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        model = restored_model(config, reader, directory, checkpoint.read(directory, config, reader))
        try:
            return score(*predict(model, reader, split))
        finally:
            model.local_tables.close()


def refuse_to_run_code(config: TrainConfig, directory: Path) -> None:
    """Raises DataError if the data of a run's config is a function: a file must not decide which code is executed."""
    if ":" in config.data:
        raise DataError(
            f"{directory} has data {config.data!r}, a function to call: confirm it with --data {config.data}"
        )


class Run:
    """A training run in progress: model, optimizers, position and records."""

    def __init__(self, config: TrainConfig, data: Reader, directory: Path, *, resume: bool = False):
        self.config, self.data, self.directory = config, data, directory
        self.writes = data.ranks.rank == 0
        state = checkpoint.read(directory, config, data) if resume else None
        self.model = (
            build_model(config, data, directory) if state is None else restored_model(config, data, directory, state)
        )
        self.dense_optimizer = torch.optim.Adam(self.model.dense_parameters(), lr=config.dense_lr, fused=True)
        self.batches_per_epoch = -(-data.num_rows("train") // config.batch_size)
        self.steps_per_epoch = -(-self.batches_per_epoch // config.accumulate)
        self.steps = self.steps_per_epoch * config.epochs
        self.records = runs.Records(directory, writes=self.writes)
        self.step, self.seconds, self.best, self.worse, self.stopped_early = 0, 0.0, math.inf, 0, False
        self.machines: list[dict] = []
        self.counted_from = 0  # the tables' counters start after this step
        self.window = Window(ranks=data.ranks)
        self.progress = True
        if state is not None:
            self._restore(state)

    def fit(self, stop: threading.Event | None = None) -> None:
        """Trains until the last step, an early stop, or ``stop``; raises RunInterruptedError for ``stop``."""
        window, machine = -(-self.steps // WINDOWS), devices.machine(self.model.device, self.data.ranks.world_size)
        if self.step < self.steps and not self.stopped_early and machine not in self.machines:
            self.machines.append(machine)
        total = self.data.num_rows("train") * self.config.epochs
        shown = {"desc": "training", "unit": "ex", "unit_scale": True, "disable": not self.progress}
        with tqdm(total=total, **shown) as bar, closing(self._batches()) as batches:
            bar.update(self._rows_done())
            while self.step < self.steps and not self.stopped_early:
                rows, following = self._step(batches)
                bar.update(rows)
                if self.step % window == 0 or self.step == self.steps:
                    bar.set_postfix(loss=f"{self._close_window():.4f}", refresh=False)
                if self.config.eval_every and self.step % self.config.eval_every == 0:
                    self._evaluate()
                if self.stopped_early:
                    break
                if stop is not None and self.data.ranks.any_true(stop.is_set()):
                    self.save()
                    raise RunInterruptedError(f"interrupted after step {self.step} of {self.steps}", self.directory)
                if self.config.checkpoint_every and self.step % self.config.checkpoint_every == 0:
                    self.save()
                if following is not None and self.config.backing == "host":  # after evaluations, which use the cache
                    self.model.prefetch(following)
        if self.window.steps:  # stopped early
            self._close_window()
        self.save()

    def test(self) -> dict:
        """Scores the test rows; records and returns the test record."""
        scores, sizes = self._scores("test"), self._sizes()
        test = {
            "kind": "test",
            **scores,
            "step": self.step,
            "stopped_early": self.stopped_early,
            "device": devices.gpu_name(self.model.device) or "cpu",
            "machines": self.machines,
            "train_examples": self._rows_done(),
            "train_seconds": self.seconds,
            "examples_per_second": self._rows_done() / self.seconds,
            "dense_parameters": sum(p.numel() for p in self.model.dense_parameters()),
            "table_parameters": sum(t["num_embeddings"] * t["embedding_dim"] for t in sizes["tables"]),
            "flops_per_example": flops_per_example(self.model, self.data.features, self.data.num_dense),
            **sizes,
            "counted_from": self.counted_from,
        }
        if any(feature.shared for feature in self.data.features):
            test |= {"dedup": self.data.dedup.on, "dedup_factor": self.data.dedup.factor}
        self.records.append(test)
        return test

    def _scores(self, split: str) -> dict:
        return score(*predict(self.model, self.data, split))

    def _sizes(self) -> dict:
        tables, peak = self.model.local_tables, runs.peak_memory_bytes()
        return {"tables": tables.memory_report(), "tiers": tables.tier_report(), "peak_memory_bytes": peak}

    def save(self) -> None:
        """Writes the checkpoint."""
        self._write(
            {
                "data": checkpoint.identity(self.data),
                **{name: getattr(self, name) for name in POSITION},
                "window": self.window.state(),
                "records": self.records.mark(),
                "options": self.config.outcome(),
                "model": self.model.state_dict(),
                "dense_optimizer": self.dense_optimizer.state_dict(),
            }
        )

    def _write(self, state: dict) -> None:
        checkpoint.save(self.directory, state)

    def _restore(self, state: dict) -> None:
        """Restores everything but the model."""
        with checkpoint.as_data_error(self.directory):
            checkpoint.check_position(state, self.steps)
            checkpoint.load_optimizer(self.dense_optimizer, state["dense_optimizer"])
            for name in POSITION:
                setattr(self, name, state[name])
            self.window = Window(state["window"], self.data.ranks)
            self.records.rewind(state["records"])
            self.counted_from = self.step

    def _rows_done(self) -> int:
        epochs, steps = divmod(self.step, self.steps_per_epoch)
        rows, batches = self.data.num_rows("train"), steps * self.config.accumulate
        return epochs * rows + min(batches * self.config.batch_size, rows)

    def _first_batch(self) -> int:
        """Index in the epoch of the next step's first batch."""
        return self.step % self.steps_per_epoch * self.config.accumulate

    def _batches(self) -> Generator[Any]:
        """Yields (batch, next batch of the epoch or None) from step ``self.step`` on, for ``_learn``."""
        while self.step < self.steps:
            read = self.data.batches("train", self.config.batch_size, self._first_batch())
            yield from pairwise(chain(prefetch(devices.to_device(read, self.model.device)), [None]))

    def _step(self, batches: Generator[Any]) -> tuple[int, Batch | None]:
        """Makes one update; returns its rows, and the batch after it in the epoch."""
        c, first, following = self.config, self._first_batch(), None
        count = min(c.accumulate, self.batches_per_epoch - first)
        rows = min(c.accumulate * c.batch_size, self.data.num_rows("train") - first * c.batch_size)
        for optimizer, base in ((self.dense_optimizer, c.dense_lr), (self.model.embeddings.fused_optimizer, c.lr)):
            for group in optimizer.param_groups:
                group["lr"] = c.learning_rate(base, self.step)
        clock = Clock(self.window.seconds)
        self.dense_optimizer.zero_grad()
        clock.lap("optimizer")
        with self.model.embeddings.accumulate() if count > 1 else nullcontext():
            for _ in range(count):
                following = self._learn(batches, rows, clock)
        if count > 1:
            clock.lap("backward")  # the tables are updated at the end of accumulate()
        self.dense_optimizer.step()
        clock.lap("optimizer")
        self.step += 1
        self.window.steps += 1
        return rows, following

    def _learn(self, batches: Generator[Any], rows: int, clock: Clock) -> Batch | None:
        """Forward and backward of the next batch in a step of ``rows`` rows; returns the batch after it."""
        batch, following = next(batches)
        share = len(batch.label) / rows
        clock.lap("data")
        logits = self.model(batch)
        if following is not None and self.config.backing == "disk":
            self.model.prefetch(following)
        loss = binary_cross_entropy_with_logits(logits, batch.label)
        value = loss.item()
        clock.lap("forward")
        if not math.isfinite(value):
            raise self._not_finite(value)
        (loss if share == 1.0 else loss * share).backward()
        clock.lap("backward")
        self.window.add(logits.detach(), batch.label)
        return following

    def _not_finite(self, loss: float) -> NotFiniteError:
        return NotFiniteError(
            f"loss is {loss} at step {self.step + 1} of {self.steps}, must be finite: try a smaller lr (now "
            f"{self.config.lr}) or dense_lr (now {self.config.dense_lr}), or look at the data: the step begins with "
            f"batch {self._first_batch()} of the epoch"
        )

    def _close_window(self) -> float:
        """Records the steps since the last record; returns their mean loss."""
        epoch = (self.step - 1) // self.steps_per_epoch
        record = {"kind": "train", "epoch": epoch, "step": self.step} | self.window.record()
        record["lr"] = self.config.learning_rate(self.config.lr, self.step - 1)
        self.records.append(record)
        self.seconds += sum(record["seconds"].values()) - record["seconds"]["evaluation"]
        self.window = Window(ranks=self.data.ranks)
        return record["loss"]

    def _evaluate(self) -> None:
        clock = Clock(self.window.seconds)
        split = "valid" if self.data.num_rows("valid") else "test"
        scores = self._scores(split)
        self.records.append({"kind": "eval", "split": split, "step": self.step} | scores)
        self.worse = 0 if scores["log_loss"] < self.best else self.worse + 1
        self.best = min(scores["log_loss"], self.best)
        self.stopped_early = 0 < self.config.patience <= self.worse
        clock.lap("evaluation")
