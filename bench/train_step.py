"""One DLRM training step of rec_kernels against plain torch, on Complete Journey.

Three implementations train the same model from the same initial weights on the same batches, in interleaved
rounds:

ours    fused lookups and row-wise Adagrad of rec_kernels; every distinct history once
recipe  the usual recipe: one nn.EmbeddingBag(sparse=True) per table, a history bag per row, torch's Adagrad
tuned   one concatenated table, every distinct history once, torch's Adagrad

recipe and tuned have the usual interaction: bmm, an index and cat. Finding the distinct histories is part of building
a batch. The batch builder, the MLPs and Adam are shared. torch's sparse Adagrad is element-wise: it keeps D numbers of
state per row where the row-wise one keeps one. Batches are built inline, not on the trainer's background thread, so
that every part of a step can be timed.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from tqdm import tqdm

from bench.script import options_of, parser_of, positive, write_result
from bench.studies.train_quality import RecipeDLRM, TunedDLRM
from rec_kernels.dlrm import DLRM, Batch, CompleteJourney, load_completejourney
from rec_kernels.dlrm.reader import dedup_batch

PARTS = ("batch", "forward", "backward", "optimizer")


class Stepper:
    """One implementation, its optimizers, and its conversion of batches."""

    def __init__(
        self,
        model: DLRM,
        data: CompleteJourney,
        batch_size: int,
        table_optimizer: torch.optim.Optimizer | None,
        read: Callable[[Batch], Batch],
    ):
        self.model, self.data, self.batch_size, self.read = model, data, batch_size, read
        self.num_batches = -(-data.num_rows("train") // batch_size)
        dense_optimizer = torch.optim.Adam(model.dense_parameters(), lr=0.001, fused=True)
        self.optimizers = [dense_optimizer] + ([table_optimizer] if table_optimizer else [])

    def step(self, index: int) -> list[float]:
        """Trains on batch ``index``; returns the seconds of each of ``PARTS``."""
        ticks = [time.perf_counter()]
        batch = self.read(next(self.data.batches("train", self.batch_size, index)))
        ticks.append(time.perf_counter())
        loss = binary_cross_entropy_with_logits(self.model(batch), batch.label)
        ticks.append(time.perf_counter())
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        ticks.append(time.perf_counter())
        for optimizer in self.optimizers:
            optimizer.step()
        ticks.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(ticks)]


def steppers(batch_size: int, embedding_dim: int, weeks: int | None, data_dir: str | None) -> dict[str, Stepper]:
    """Makes the three implementations with the same initial weights."""
    data = load_completejourney(weeks, data_dir, progress=True)
    ours, recipe, tuned = (
        model(data.features, data.num_dense, embedding_dim=embedding_dim) for model in (DLRM, RecipeDLRM, TunedDLRM)
    )
    recipes, tunes = (torch.optim.Adagrad(model.table_parameters(), lr=0.05) for model in (recipe, tuned))
    return {
        "ours": Stepper(ours, data, batch_size, None, lambda batch: dedup_batch(batch).joined()),
        "recipe": Stepper(recipe, data, batch_size, recipes, lambda batch: batch),
        "tuned": Stepper(tuned, data, batch_size, tunes, dedup_batch),
    }


def measure(implementations: dict[str, Stepper], rounds: int, steps: int) -> dict[str, list[list[float]]]:
    """Returns median milliseconds of each part per round, after an unreported warm-up round."""
    timings = {name: [] for name in implementations}
    for number in tqdm(range(rounds + 1), desc="rounds"):
        for name, stepper in implementations.items():
            indices = (index % stepper.num_batches for index in range(number * steps, (number + 1) * steps))
            parts = zip(*(stepper.step(index) for index in indices), strict=True)
            if number:
                timings[name].append([1000 * statistics.median(part) for part in parts])
    return timings


def summarise(timings: dict[str, list[list[float]]], batch_size: int) -> dict[str, dict]:
    """Returns medians over rounds of each part, of the step, and of its ratio to ours within the round."""
    step = {name: [sum(parts) for parts in rounds] for name, rounds in timings.items()}
    summary = {}
    for name, rounds in timings.items():
        milliseconds = statistics.median(step[name])
        ratios = [other / ours for other, ours in zip(step[name], step["ours"], strict=True)]
        summary[name] = {
            "examples_per_second": batch_size / milliseconds * 1000,
            "step_ms": milliseconds,
            "parts_ms": {part: statistics.median(r[i] for r in rounds) for i, part in enumerate(PARTS)},
            "speedup_of_ours": statistics.median(ratios),
            "speedup_of_ours_range": [min(ratios), max(ratios)],
        }
    return summary


def table(summary: dict[str, dict]) -> str:
    """The summary as text."""
    lines = [f"{'':<8}{'examples/s':>12}{'ms/step':>9}" + "".join(f"{p:>11}" for p in PARTS) + f"{'ours is':>10}"]
    for name, row in summary.items():
        parts = "".join(f"{row['parts_ms'][part]:>11.2f}" for part in PARTS)
        whole = f"{row['examples_per_second']:>12,.0f}{row['step_ms']:>9.2f}"
        lines.append(f"{name:<8}{whole}{parts}{row['speedup_of_ours']:>9.2f}x")
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__, "train_step.json", data=True)
    parser.add_argument("--rounds", type=positive, default=7, help="measured rounds (default: 7)")
    parser.add_argument(
        "--steps", type=positive, default=40, help="steps of each implementation per round (default: 40)"
    )
    parser.add_argument("--batch-size", type=positive, default=2048, help="rows per step (default: 2048)")
    parser.add_argument("--embedding-dim", type=positive, default=16, help="columns of every table (default: 16)")
    options = options_of(parser)
    implementations = steppers(options.batch_size, options.embedding_dim, options.weeks, options.data_dir)
    summary = summarise(measure(implementations, options.rounds, options.steps), options.batch_size)
    print(table(summary))
    settings = ("rounds", "steps", "batch_size", "embedding_dim", "weeks")
    write_result(options, settings, summary)


if __name__ == "__main__":
    main()
