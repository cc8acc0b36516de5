"""Updates below half a step of the row format: rounding to the nearest loses them, stochastic rounding does not.

drift     tables whose every update is the same fraction of half a step; how far they come beside fp32
training  DLRM on Complete Journey with a learning rate so small that most updates are below half a step: test AUC
          and the way that the tables go beside fp32's, over paired seeds; "frozen" is fp32 with tables that stay

Runs of the training are ordinary runs in runs/half-step, those that are there are kept. Writes a JSON file.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import bench
import rec_kernels as rk
from bench.script import environment, options_of, parser_of
from bench.studies import compare, compare_report
from rec_kernels.dlrm import DLRM, TrainConfig, checkpoint
from rec_kernels.dlrm.data import DataError, DataSet
from rec_kernels.dlrm.model_factory import build_model
from rec_kernels.dlrm.reader import open_data
from rec_kernels.dlrm.runs import RunExistsError, RunInterruptedError
from rec_kernels.nn.tables.rows import decode

# Steps of rows whose elements lie in [1, 2): bf16 has 7 bits after the point; int8 has 255 steps from LOW to HIGH.
LOW, HIGH = 1.0, 1 + 255 / 256
STEPS = {"bf16": 2.0**-7, "int8": 2.0**-8}
FRACTIONS = (0.125, 0.25, 0.5, 0.9, 1.1, 2.0, 4.0)  # update over half a step
START, WAY = 1.25, 0.25
LR = 1e-5
CONFIGURATIONS = (
    "fp32",
    *(f"{format}-{rounding}:format={format},rounding={rounding}" for format in STEPS for rounding in compare.ROUNDINGS),
    "frozen:lr=1e-30",
)
LOOK_EVERY = 20  # steps between looks at the sizes of the updates


def drift(format: str, rounding: str, fraction: float, rows: int = 1000) -> dict:
    """Moves a table by ``WAY`` in updates of ``fraction`` half steps.

    The first and the last column of every row stay at LOW and HIGH and hold an int8 row's step in place.

    Returns:
        updates; moved, the mean way of an element over fp32's, and its standard deviation over the elements.
    """

    def start(weight: torch.Tensor) -> None:
        weight.fill_(START)
        weight[:, 0], weight[:, -1] = LOW, HIGH

    update = fraction * STEPS[format] / 2
    updates = round(WAY / update)
    table = rk.EmbeddingBagConfig(rows, 16, name="t", feature_names=["t"], format=format, init=start)
    collection = rk.EmbeddingBagCollection([table], optimizer=rk.SGD(lr=update), rounding=rounding)
    every_row = rk.KeyedJaggedTensor(["t"], torch.arange(rows), lengths=torch.ones(rows, dtype=torch.int64))
    for _ in range(updates):
        (-collection(every_row).values()[:, 1:-1]).sum().backward()
    moved = (_tables(collection)["t"][:, 1:-1] - START) / (updates * update)
    return {"updates": updates, "moved": float(moved.mean()), "sd": float(moved.std())}


def drifts() -> list[dict]:
    """Every format, rounding and size of updates."""
    keys = [(f, r, fraction) for f in STEPS for r in compare.ROUNDINGS for fraction in FRACTIONS]
    return [{"format": f, "rounding": r, "fraction": fraction} | drift(f, r, fraction) for f, r, fraction in keys]


def _tables(collection: rk.EmbeddingBagCollection) -> dict[str, torch.Tensor]:
    """Every table as float32 [E, D]."""
    bags = collection.embedding_bags
    return {t.name: decode(bags[t.name].weight.detach(), t.format, t.embedding_dim) for t in collection.tables}


def _all_tables(model: DLRM) -> torch.Tensor:
    """The tables of a model as one float32 [rows, D]."""
    return torch.cat(list(_tables(model.embeddings).values()))


def half_steps(weight: torch.Tensor, format: str) -> torch.Tensor:
    """Half the distance of neighbouring numbers of a format around each element of ``weight`` [N, D]."""
    if format == "bf16":
        return torch.ldexp(torch.ones_like(weight), torch.frexp(weight).exponent - 9)
    return ((weight.amax(1, keepdim=True) - weight.amin(1, keepdim=True)) / 255 / 2).expand_as(weight)


def below_half_step(config: TrainConfig, data: DataSet) -> dict[str, float]:
    """Share of the updates of a run in fp32 that are below half a step of each format, seen every LOOK_EVERY steps."""
    model = build_model(config, data)
    optimizer = torch.optim.Adam(model.dense_parameters(), lr=config.dense_lr, fused=True)
    below, seen = dict.fromkeys(STEPS, 0), 0
    for step, batch in enumerate(data.batches("train", config.batch_size)):
        before = _all_tables(model).clone() if step % LOOK_EVERY == 0 else None
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(model(batch), batch.label).backward()
        optimizer.step()
        if before is not None:
            update = (_all_tables(model) - before).abs()
            seen += int((update > 0).sum())
            for format in STEPS:
                below[format] += int(((update > 0) & (update < half_steps(before, format))).sum())
    return {format: count / seen for format, count in below.items()}


def progress(comparison: compare.Comparison, name: str, seed: int, data: DataSet) -> float:
    """Progress of a run's tables along fp32's direction: 1 if as far, whatever the noise across it."""
    ways = []
    for which in ("fp32", name):
        config = comparison.run_config(which, seed)
        model = build_model(config, data)
        start = _all_tables(model).clone()
        model.load_state_dict(checkpoint.load(Path(config.runs_dir) / config.run)["model"])
        ways.append((_all_tables(model) - start).double().flatten())
    full, own = ways
    return float(own @ full / (full @ full))


def training(comparison: compare.Comparison) -> dict:
    """The comparison's result with, for each configuration, the progress of each of its runs."""
    result = compare_report.summarise(comparison, outcomes := compare.run(comparison))
    compare_report.write(comparison, result)
    config = comparison.run_config("fp32", comparison.seeds[0])
    data = open_data(config)
    result["below_half_step"] = below_half_step(config, data)
    for configuration in result["configurations"]:
        name = configuration["name"]
        tested = [s for s in comparison.seeds if all(outcomes[n][s]["kind"] == "test" for n in ("fp32", name))]
        configuration["progress"] = [progress(comparison, name, seed, data) for seed in tested]
    return result


def text(result: dict) -> str:
    """The result for a person."""
    lines = ["moved, over fp32, in updates of so many half steps:"]
    lines.append(f"{'':<18}" + "".join(f"{fraction:>8}" for fraction in FRACTIONS))
    for key in dict.fromkeys((row["format"], row["rounding"]) for row in result["drift"]):
        own = [row["moved"] for row in result["drift"] if (row["format"], row["rounding"]) == key]
        lines.append(f"{' '.join(key):<18}" + "".join(f"{moved:>8.3f}" for moved in own))
    below = result["training"]["below_half_step"]
    shares = ", ".join(f"{format} {share:.1%}" for format, share in below.items())
    lines += ["", f"updates below half a step in the training, lr {LR}: {shares}"]
    lines.append(f"{'':<18}{'AUC':>9}{'to fp32':>10}{'95 % interval':>24}{'on its way':>12}")
    for c in result["training"]["configurations"]:
        apart, ways = c["auc"]["difference"] or {"mean": None, "low": None}, c["progress"]
        mean = "" if apart["mean"] is None else f"{apart['mean']:+.5f}"
        interval = "" if apart["low"] is None else f"{apart['low']:+.5f} to {apart['high']:+.5f}"
        way = f"{sum(ways) / len(ways):.3f}" if ways else "-"
        auc = compare_report.number(c["auc"]["mean"], 5)
        lines.append(f"{c['name']:<18}{auc:>9}{mean:>10}{interval:>24}{way:>12}")
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__, "half_step.json", data=True)
    parser.add_argument("--seeds", default="8", help="a count, or a list as in 0,1,2 (default: 8)")
    parser.add_argument("--runs-dir", default="runs", help="folder that gets half-step/ with the runs (default: runs)")
    options = options_of(parser)
    given = {key: getattr(options, key) for key in ("threads", "weeks", "data_dir", "runs_dir")}
    try:
        comparison = compare.plan(CONFIGURATIONS, TrainConfig(lr=LR, **given), options.seeds, "half-step")
    except ValueError as error:
        parser.error(str(error))
    result = {"environment": environment(), "drift": drifts()}
    try:
        result["training"] = training(comparison)
    except (DataError, RunExistsError, RunInterruptedError) as error:
        raise SystemExit(f"error: {error}") from error
    bench.save(result, options.output)
    print(f"{text(result)}\nwritten to {options.output}")


if __name__ == "__main__":
    main()
