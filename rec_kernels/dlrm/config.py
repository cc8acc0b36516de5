"""``TrainConfig``, the options of a training run; the command line is generated from it."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rec_kernels as rk
from rec_kernels.dlrm import files
from rec_kernels.dlrm.completejourney import LAST_WEEK
from rec_kernels.dlrm.data import DataError, Feature
from rec_kernels.dlrm.files import TEXT, Check, short_repr
from rec_kernels.dlrm.model import ACTIVATIONS, PRECISIONS
from rec_kernels.dlrm.runs import CONFIG, RUN_NAMES, is_run_name
from rec_kernels.nn.arguments import LARGEST_FLOAT
from rec_kernels.nn.tables.compression import Compression
from rec_kernels.nn.tables.config import BAG_FORMATS as FORMATS
from rec_kernels.nn.tables.optimizers import Optimizer
from rec_kernels.nn.tables.row_cache import BACKINGS, POLICIES

COMPILE = ("no", "default")
DEDUP = ("auto", "on", "windows", "off")
DEVICES = ("cpu", "cuda")
MODELS = ("dlrm", "dcnv2", "wukong")
DATA = ("completejourney", "criteo", "synthetic")
MIN_LEARNING_RATE = 1e-7
FUNCTION = "module:function"  # a user's data set
EMBEDDINGS = ("full", "hash", "qr", "qr_add", "qr_concat", "mixed")
ROUNDINGS = ("stochastic", "nearest")
REMOVED = ("tensorboard",)  # options of older configs that did not affect the outcome
#: The first option of each group in ``--help``, and the group's title.
GROUPS = {
    "data": "data",
    "model": "model",
    "embedding": "compressed tables",
    "precision": "dense side",
    "format": "row format of the tables",
    "cache": "row cache and table storage",
    "optimizer": "optimizers and learning rates",
    "epochs": "training and evaluation",
    "device": "execution",
}
OPTIMIZERS: dict[str, Callable[[float], Optimizer]] = {
    "rowwise_adagrad": lambda lr: rk.RowwiseAdagrad(lr=lr, eps=1e-8),
    "sgd": lambda lr: rk.SGD(lr=lr),
    "adagrad": lambda lr: rk.Adagrad(lr=lr, eps=1e-8),
    "adam": lambda lr: rk.Adam(lr=lr),
    "rowwise_adam": lambda lr: rk.RowwiseAdam(lr=lr),
    "lamb": lambda lr: rk.LAMB(lr=lr),
}


def widths(text: str) -> tuple[int, ...]:
    """Parses hidden layer widths: "64,32" -> (64, 32), "" -> ()."""
    return tuple(int(part) for part in text.split(",")) if text else ()


# Allowed Python values of an option, by the function that parses its flag.
_VALUE_TYPES = {
    int: Check("a whole number", lambda v: type(v) is int),
    float: Check("a number", lambda v: isinstance(v, float) or (type(v) is int and abs(v) < 2**1000)),
    str: TEXT,
    widths: Check("whole numbers", lambda v: isinstance(v, (tuple, list)) and all(type(w) is int for w in v)),
}

_UNITS = {"": 1} | {f"{p}B": 1000**i for i, p in enumerate("kMGT", 1)}
_UNITS |= {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}


def parse_size(text: str) -> int:
    """Parses a number of bytes: "512MB" -> 512000000, "4GiB", "4096"; 0 if the text is not a size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text.strip())
    return int(float(match[1]) * _UNITS.get(match[2], 0)) if match else 0


def _option(
    default: Any, parse: Callable, help: str, allowed: str, check: Callable, of="", execution=False, names=()
) -> Any:
    """Define an option; None is a valid value if it is the default.

    Args:
        parse: converts the flag's text to a value.
        allowed: describes the values that ``check`` accepts.
        of: the only models or data sets that have the option, separated by spaces.
        execution: the option does not affect the outcome and may change on resume.
        names: all values of an enumeration.
    """
    metadata = {"parse": parse, "help": help, "allowed": allowed, "check": check, "of": of.split()}
    return field(default=default, metadata=metadata | {"execution": execution, "names": tuple(names)})


def _count(default: int | None, help: str, least: int = 1, most: int = 0, bits: int = 63, **more) -> Any:
    allowed = f"{least} to {most}" if most else f"{least} or more, below 2**{bits}"
    return _option(default, int, help, allowed, lambda v: least <= v <= (most or 2**bits - 1), **more)


def _number(default: float | None, help: str, least: float = 0, most: float = math.inf, **more) -> Any:
    allowed = f"{least} or more" if most == math.inf else f"{least} to {most}"
    return _option(default, float, help, allowed, lambda v: least <= v <= most and v < math.inf, **more)


def _learning_rate(default: float, help: str) -> Any:
    allowed = "a finite number above 0, as float32"
    return _option(default, float, help, allowed, lambda v: 2.0**-149 <= v <= LARGEST_FLOAT)


def _text(default: str | None, help: str, **more) -> Any:
    return _option(default, str, help, "text", lambda v: v != "", **more)


def _choice(default: str, help: str, names: Sequence[str], **more) -> Any:
    allowed = f"{', '.join(names[:-1])} or {names[-1]}"
    return _option(default, str, help, allowed, lambda v: v in names, names=names, **more)


def _layers(default: tuple[int, ...], help: str, **more) -> Any:
    return _option(default, widths, help, "widths of 1 or more", lambda v: all(1 <= w < 2**63 for w in v), **more)


_RUN: dict[str, Any] = {"execution": True}


@dataclass(frozen=True)
class TrainConfig:
    """Options of a training run: on the CPU, the same config on the same machine gives the same bits.

    Raises:
        ValueError: names the option, its value and what is allowed.
    """

    data: str = _text(DATA[0], f"{', '.join(DATA)}, or {FUNCTION} that returns a data set")
    path: str | None = _text(
        None, "file, plain or .gz, or folder of such files; argument of the function", of=f"criteo {FUNCTION}", **_RUN
    )
    rows: int | None = _count(
        None, "use only the first rows (default: all); synthetic: training rows (1000000)", of="criteo synthetic"
    )
    weeks: int | None = _count(
        None,
        "use only the first weeks, the last quarter for the test (default: train on 1-46, test on 47-53)",
        most=LAST_WEEK - 1,
        of="completejourney",
    )
    table_rows: int | None = _count(
        None,
        "hash ids to this many rows per table (default: a row per value); synthetic: largest table (100000)",
        of="criteo synthetic",
    )
    history: int | None = _count(
        None, "maximum history length, 10 to 200 (default: 50); synthetic: mean (20)", of="completejourney synthetic"
    )
    samples_per_session: float | None = _number(None, "mean rows per session (default: 9)", 1, of="synthetic")
    unchanged: float | None = _number(
        None, "probability that a row keeps its session's history (default: 1)", 0, 1, of="synthetic"
    )
    dedup: str = _choice("auto", "store equal shared bags of a batch once; windows: also overlapping bags", DEDUP)
    data_dir: str | None = _text(None, "folder for prepared data (default: ~/.cache/rec_kernels)", **_RUN)

    model: str = _choice("dlrm", "interaction: dlrm (dot products), dcnv2 (cross layers) or wukong", MODELS)
    embedding_dim: int = _count(16, "columns of every embedding table", most=2**20)
    bottom: tuple[int, ...] = _layers((64,), "hidden layer widths of the bottom MLP")
    top: tuple[int, ...] = _layers((64, 32), "hidden layer widths of the top MLP")
    cross_layers: int = _count(3, "number of cross layers", of="dcnv2")
    cross_rank: int = _count(16, "rank of the cross layers' weights", of="dcnv2")
    wukong_layers: int = _count(3, "number of layers", of="wukong")
    wukong_features: int = _count(8, "output vectors of each block (FM and linear) of a layer", of="wukong")
    wukong_factors: int = _count(8, "columns that the pairwise products are projected to", of="wukong")
    wukong_hidden: tuple[int, ...] = _layers((64,), "hidden layer widths of each layer's MLP", of="wukong")
    embedding: str = _choice(
        "full", "table compression: hash (ids share rows), qr (quotient-remainder), mixed (dimensions)", EMBEDDINGS
    )
    collisions: int = _count(4, "hash, qr: ids per row")
    temperature: float = _number(0.3, "mixed: exponent by which columns decrease with table size")
    threshold: int = _count(200, "hash, qr, mixed: leave tables of at most this many ids uncompressed", 0)
    precision: str = _choice("fp32", "precision of MLPs and interaction; bf16 uses torch.autocast", tuple(PRECISIONS))
    activations: str = _choice("fp32", "format that inputs of the dense side are rounded to", ACTIVATIONS)
    compile: str = _choice("no", "torch.compile mode of MLPs and interaction", COMPILE)
    format: str = _choice("fp32", "row format of all tables", FORMATS)
    rounding: str = _choice(
        "stochastic", "rounding of updated rows that are not fp32; nearest loses small updates", ROUNDINGS
    )
    cache: float = _number(0.0, "fraction of the tables' rows to cache in FP32 (0: no cache)", 0, 1)
    policy: str = _choice("lfu", "cache: eviction policy, least recently or least frequently used", POLICIES)
    decay_every: int = _count(0, "cache, lfu: halve access counts every N steps (0: never)", 0)
    backing: str = _choice("device", "storage of the tables: device, host memory (for a GPU) or disk", BACKINGS, **_RUN)
    memory_budget: str = _option(
        "512MB",
        str,
        "disk: memory for table rows, including the cache: 512MB, 4GiB or a number of bytes",
        "a number of bytes, or of kB, MB, GB, TB, KiB, MiB, GiB or TiB",
        lambda v: parse_size(v) > 0,
        **_RUN,
    )
    optimizer: str = _choice("rowwise_adagrad", "optimizer of the tables", tuple(OPTIMIZERS))
    lr: float = _learning_rate(0.05, "learning rate of the tables")
    dense_lr: float = _learning_rate(0.001, "learning rate of Adam, which trains the dense parameters")
    warmup_steps: int = _count(0, "steps of linear warm-up of both learning rates", 0)
    decay_start: int = _count(0, "step at which both learning rates begin to decay", 0)
    decay_steps: int = _count(0, "steps of quadratic decay (0: no decay)", 0)

    epochs: int = _count(1, "passes over the training rows")
    batch_size: int = _count(2048, "rows per batch")
    accumulate: int = _count(1, "batches per step, by gradient accumulation")
    valid_fraction: float = _option(
        0.0, float, "fraction of the training rows held out at the end", "0 or more, below 1", lambda v: 0 <= v < 1
    )
    eval_every: int = _count(
        0, "steps between evaluations on the held-out rows, or the test rows without them (0: none)", 0
    )
    patience: int = _count(0, "stop after this many evaluations without a better log loss (0: never)", 0)
    seed: int = _count(0, "seed of the initial weights and of stochastic rounding", 0, bits=64)
    device: str = _choice("cpu", "cpu, or cuda for torch's current GPU", DEVICES, **_RUN)
    threads: int | None = _count(None, "CPU threads (default: torch's choice)", most=1024, **_RUN)

    run: str | None = _option(
        None, str, "name of the run (default: from the options, numbered if taken)", RUN_NAMES, is_run_name, **_RUN
    )
    runs_dir: str = _text("runs", "folder of the runs' folders", **_RUN)
    checkpoint_every: int = _count(0, "steps between checkpoints (0: at the end and when interrupted)", 0, **_RUN)

    def __post_init__(self):
        for option in dataclasses.fields(self):
            value, allowed = getattr(self, option.name), option.metadata["allowed"]
            if value is None and option.default is None:
                continue
            type_check = _VALUE_TYPES[option.metadata["parse"]]
            if not type_check.fits(value):
                raise ValueError(f"{option.name} is {short_repr(value)}, must be {type_check.allowed} ({allowed})")
            if not option.metadata["check"](value):
                raise ValueError(f"{option.name} is {value!r}, allowed is {allowed}")
        if self.decay_steps and self.decay_start < self.warmup_steps:
            raise ValueError(
                f"decay_start is {self.decay_start}, must be at least warmup_steps (now {self.warmup_steps}) "
                "for a decaying learning rate (decay_steps)"
            )
        if self.backing == "disk" and self.device != "cpu":
            raise ValueError(f"backing is 'disk', which needs device 'cpu' (now {self.device!r})")
        if self.decay_every and not (self.cache and self.policy == "lfu"):
            raise ValueError(
                f"decay_every is {self.decay_every}, which needs a cache (now {self.cache}) with policy 'lfu' (now "
                f"{self.policy!r})"
            )
        if self.patience and not (self.eval_every and self.valid_fraction):
            raise ValueError(
                f"patience is {self.patience}, which needs eval_every (now {self.eval_every}) and valid_fraction (now "
                f"{self.valid_fraction}) above 0: stopping by the test rows would make their score worthless"
            )

    def run_name(self, data_name: str) -> str:
        """The default name of the run."""
        kind = f"mixed{self.temperature:g}" if self.embedding == "mixed" else f"{self.embedding}{self.collisions}"
        parts = [
            (data_name, True),
            (self.model, self.model != "dlrm"),
            (f"d{self.embedding_dim}", True),
            (kind, self.embedding != "full"),
            (f"{self.format}-{self.rounding}", self.format != "fp32"),
            (f"cache{self.cache:g}{self.policy}", self.cache),
            (f"dense{self.precision}", self.precision != "fp32"),
            (f"act{self.activations}", self.activations != "fp32"),
            (f"compiled-{self.compile}", self.compile != "no"),
            (f"b{self.batch_size}-seed{self.seed}", True),
        ]
        return "-".join(part for part, included in parts if included)

    def learning_rate(self, base: float, step: int) -> float:
        """The scheduled learning rate of step ``step`` (from 0) for a base learning rate.

        Source: the learning-rate policy of https://github.com/facebookresearch/dlrm (linear warm-up, quadratic decay).
        """
        factor = 1.0
        if step < self.warmup_steps:
            factor = (step + 1) / self.warmup_steps
        elif self.decay_steps and step >= self.decay_start:
            factor = max(1 - (step - self.decay_start + 1) / self.decay_steps, 0.0) ** 2
        return max(base * factor, min(MIN_LEARNING_RATE, base))

    def compressions(self, features: Sequence[Feature]) -> dict[str, Compression]:
        """The compression of each table that is compressed, by feature name."""
        large = [f for f in features if f.num_embeddings > self.threshold]
        if self.embedding == "full" or not large:
            return {}
        if self.embedding == "mixed":
            sizes = [f.num_embeddings for f in features]
            dims = rk.mixed_dimensions(sizes, self.embedding_dim, self.temperature, threshold=self.threshold)
            # A table of all columns stays uncompressed, and so gets the initial weights of a full table.
            sized = zip(features, dims, strict=True)
            return {f.name: rk.MixedDimension(dim) for f, dim in sized if dim < self.embedding_dim}
        if self.embedding == "hash":
            return {f.name: rk.Hash(-(-f.num_embeddings // self.collisions)) for f in large}
        combine = {"qr": "mult", "qr_add": "add", "qr_concat": "concat"}[self.embedding]
        return {f.name: rk.QuotientRemainder(self.collisions, combine) for f in large}

    def table_optimizer(self) -> Optimizer:
        """The fused optimizer of the tables."""
        return OPTIMIZERS[self.optimizer](self.lr)

    def outcome(self) -> dict[str, Any]:
        """The options that affect the outcome."""
        return {o.name: getattr(self, o.name) for o in dataclasses.fields(self) if not o.metadata["execution"]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """Creates a config from ``dataclasses.asdict`` of one; ValueError for unknown names and invalid values."""
        if not isinstance(values, dict):
            raise ValueError(f"config is {short_repr(values)}, must be an object")
        values = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items() if n not in REMOVED}
        if unknown := sorted(set(values) - {option.name for option in dataclasses.fields(cls)}):
            raise ValueError(f"unknown option(s) {', '.join(unknown)}")
        return cls(**values)

    @classmethod
    def read(cls, directory: Path) -> TrainConfig:
        """Reads the config of a run; DataError if its ``config.json`` is missing or invalid."""
        path = directory / CONFIG
        try:
            found = files.read_json(path)
            return cls.from_dict(found["config"] if isinstance(found, dict) else found)
        except (OSError, DataError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is not the config of a run: {error}") from error


def options_of(owner: str) -> list[str]:
    """The options that are specific to a model or a data set."""
    name = FUNCTION if ":" in owner else owner
    return [option.name for option in dataclasses.fields(TrainConfig) if name in option.metadata["of"]]


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Descriptions of the options of ``after`` that differ from ``before``."""
    return [f"{n} is {value!r}, was {before.get(n)!r}" for n, value in after.items() if before.get(n) != value]


#: Options that have no effect without another one: a description and a test of the requirement.
_REQUIREMENTS: dict[str, tuple[str, Callable[[TrainConfig], object]]] = {
    "rounding": ("a format other than 'fp32'", lambda config: config.format != "fp32"),
    "policy": ("a cache", lambda config: config.cache),
    "memory_budget": ("backing 'disk'", lambda config: config.backing == "disk"),
    "collisions": ("embedding 'hash' or 'qr'", lambda config: config.embedding not in ("full", "mixed")),
    "temperature": ("embedding 'mixed'", lambda config: config.embedding == "mixed"),
    "threshold": ("an embedding other than 'full'", lambda config: config.embedding != "full"),
    "decay_start": ("decay_steps", lambda config: config.decay_steps),
}


def _requirement(
    option: dataclasses.Field, configs: Collection[TrainConfig]
) -> tuple[str, Callable[[TrainConfig], object]]:
    owners = option.metadata["of"]
    if not owners:
        return _REQUIREMENTS.get(option.name, ("", lambda config: True))
    kind = "model" if owners[0] in MODELS else "data"
    allowed, now = (" or ".join(dict.fromkeys(map(repr, v))) for v in (owners, (getattr(c, kind) for c in configs)))
    return f"{kind} {allowed} (now {now})", lambda c: option.name in options_of(getattr(c, kind))


def refuse_options_without_effect(given: Mapping[str, Any], configs: Collection[TrainConfig]) -> None:
    """Raises ValueError if an option in ``given``, by name, has no effect in any of the configs."""
    options = {option.name: option for option in dataclasses.fields(TrainConfig)}
    for name, value in given.items():
        requirement, has_effect = _requirement(options[name], configs)
        if not any(map(has_effect, configs)):
            raise ValueError(
                f"{name} is {value!r}, which has no effect without {requirement}: leave it out, or give both"
            )


def add_options(parser: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    """Adds a flag for every option not in ``without``, in groups; flags that are not given set nothing."""
    group: Any = parser
    for option in dataclasses.fields(TrainConfig):
        if option.name in GROUPS:
            group = parser.add_argument_group(GROUPS[option.name])
        if option.name in without:
            continue
        parse, default, names = option.metadata["parse"], option.default, ",".join(option.metadata["names"])
        owners = f"{', '.join(option.metadata['of'])}: " if option.metadata["of"] else ""
        group.add_argument(
            f"--{option.name.replace('_', '-')}",
            type=parse,
            default=argparse.SUPPRESS,
            metavar=f"{{{names}}}" if names else "N,N" if parse is widths else parse.__name__.upper(),
            help=owners + option.metadata["help"] + ("" if default is None else f" (default: {option_text(default)})"),
        )


def option_text(value: Any) -> str:
    """The value of an option in its flag's syntax; "-" for None."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else "-" if value is None else str(value)
