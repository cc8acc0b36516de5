"""All that decides a training run, as one dataclass; the command line is made from it."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rec_kernels as rk
from rec_kernels.dlrm import files
from rec_kernels.dlrm.completejourney import LAST_WEEK
from rec_kernels.dlrm.data import DataError, Feature
from rec_kernels.dlrm.files import TEXT, Check, shown
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
LEAST_RATE = 1e-7  # learning rates do not fall below it
FUNCTION = "module:function"  # any other data set
EMBEDDINGS = ("full", "hash", "qr", "qr_add", "qr_concat", "mixed")
ROUNDINGS = ("stochastic", "nearest")
FORMER = ("tensorboard",)  # options of older configs that decided no outcome
#: Groups of options in a command's help, by their first one.
GROUPS = {
    "data": "data",
    "model": "model",
    "embedding": "tables in fewer numbers",
    "precision": "dense side",
    "format": "rows of the tables",
    "cache": "row cache, and where the tables are",
    "optimizer": "optimizers and learning rates",
    "epochs": "training and evaluation",
    "device": "how to run",
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
    """Widths of hidden layers: "64,32" -> (64, 32), "" -> ()."""
    return tuple(int(part) for part in text.split(",")) if text else ()


# The values of options, by the function that makes them of a flag's text.
_KINDS = {
    int: Check("a whole number", lambda v: type(v) is int),
    float: Check("a number", lambda v: isinstance(v, float) or (type(v) is int and abs(v) < 2**1000)),
    str: TEXT,
    widths: Check("whole numbers", lambda v: isinstance(v, (tuple, list)) and all(type(w) is int for w in v)),
}

_UNITS = (
    {"": 1} | {f"{p}B": 1000**i for i, p in enumerate("kMGT", 1)} | {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}
)


def parse_size(text: str) -> int:
    """Reads bytes: "512MB" -> 512000000, "4GiB", "4096"; 0 for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text.strip())
    return int(float(match[1]) * _UNITS.get(match[2], 0)) if match else 0


def _option(
    default: Any,
    kind: Callable,
    help: str,
    allowed: str,
    check: Callable[[Any], bool],
    of: str = "",
    how: bool = False,
    names: Sequence[str] = (),
) -> Any:
    """A field, which may be None where that is its default.

    Args:
        kind: makes the value of a flag's text. help: of the flag.
        allowed: text of what ``check`` lets pass.
        of: names of the only models or data sets that have it.
        how: it says how a run is carried out, not what comes out of it, and may change when it is resumed.
        names: all values, where there are few.
    """
    metadata = {"kind": kind, "help": help, "allowed": allowed, "check": check, "of": of.split(), "how": how}
    metadata["names"] = tuple(names)
    return field(default=default, metadata=metadata)


def _count(default: int | None, help: str, least: int = 1, most: int = 0, bits: int = 63, **more) -> Any:
    allowed = f"{least} to {most}" if most else f"{least} or more, below 2**{bits}"
    return _option(default, int, help, allowed, lambda v: least <= v <= (most or 2**bits - 1), **more)


def _number(default: float | None, help: str, least: float = 0, most: float = math.inf, **more) -> Any:
    allowed = f"{least} or more" if most == math.inf else f"{least} to {most}"
    return _option(default, float, help, allowed, lambda v: least <= v <= most and v < math.inf, **more)


def _positive(default: float, help: str) -> Any:
    return _option(
        default, float, help, "a finite number above 0, as float32", lambda v: 2.0**-149 <= v <= LARGEST_FLOAT
    )


def _text(default: str | None, help: str, **more) -> Any:
    return _option(default, str, help, "text", lambda v: v != "", **more)


def _choice(default: str, help: str, names: Sequence[str], **more) -> Any:
    *first, last = names
    return _option(default, str, help, f"{', '.join(first)} or {last}", lambda v: v in names, names=names, **more)


def _layers(default: tuple[int, ...], help: str, **more) -> Any:
    return _option(default, widths, help, "widths of 1 or more", lambda v: all(1 <= w < 2**63 for w in v), **more)


@dataclass(frozen=True)
class TrainConfig:
    """All that decides a run: the same config on the same machine gives the same bits, on the CPU.

    Raises:
        ValueError: names the option, its value and what is allowed.
    """

    data: str = _text(DATA[0], f"{', '.join(DATA)}, or {FUNCTION} that returns a data set")
    path: str | None = _text(
        None, "file or folder of files, plain or .gz; an argument of the function", of=f"criteo {FUNCTION}", how=True
    )
    rows: int | None = _count(
        None, "only the first rows; synthetic: rows for training (default: all, 1000000)", of="criteo synthetic"
    )
    weeks: int | None = _count(
        None,
        "only the first weeks, tested on their last quarter (default: train on 1-46, test on 47-53)",
        most=LAST_WEEK - 1,
        of="completejourney",
    )
    table_rows: int | None = _count(
        None,
        "hash ids into so many rows per table (default: a row per value); synthetic: rows of a table",
        of="criteo synthetic",
    )
    history: int | None = _count(
        None,
        "the longest history (default: 50, allowed: 10 to 200); synthetic: the mean one (20)",
        of="completejourney synthetic",
    )
    samples_per_session: float | None = _number(None, "rows of a session, in the mean (default: 9)", 1, of="synthetic")
    unchanged: float | None = _number(
        None, "share of rows with the history of the row before (default: 1)", 0, 1, of="synthetic"
    )
    dedup: str = _choice(
        "auto",
        "equal shared bags of a batch once: on, off, auto; windows: what different bags have in common, too",
        DEDUP,
    )
    data_dir: str | None = _text(None, "folder of the prepared data (default: ~/.cache/rec_kernels)", how=True)

    model: str = _choice("dlrm", "dlrm, dot products between the MLPs; dcnv2, cross layers; wukong, its layers", MODELS)
    embedding_dim: int = _count(16, "columns of every embedding table", most=2**20)
    bottom: tuple[int, ...] = _layers((64,), "hidden layers of the bottom MLP")
    top: tuple[int, ...] = _layers((64, 32), "hidden layers of the top MLP")
    cross_layers: int = _count(3, "cross layers", of="dcnv2")
    cross_rank: int = _count(16, "rank of their matrices", of="dcnv2")
    wukong_layers: int = _count(3, "layers", of="wukong")
    wukong_features: int = _count(8, "vectors that either block of a layer makes", of="wukong")
    wukong_factors: int = _count(8, "columns that the pairwise products are projected to", of="wukong")
    wukong_hidden: tuple[int, ...] = _layers((64,), "hidden layers of each layer's MLP", of="wukong")
    embedding: str = _choice(
        "full", "tables: full; hash, ids share rows; qr, quotients and remainders; mixed, widths by size", EMBEDDINGS
    )
    collisions: int = _count(4, "hash, qr: how many ids share a row")
    temperature: float = _number(0.3, "mixed: columns fall with the rows to this power")
    threshold: int = _count(200, "hash, qr, mixed: tables of at most so many ids stay full", 0)
    precision: str = _choice("fp32", "of MLPs and interaction: fp32, or bf16 as torch.autocast does", tuple(PRECISIONS))
    activations: str = _choice("fp32", "format of inputs of the dense side", ACTIVATIONS)
    compile: str = _choice("no", "torch.compile of MLPs and interaction: no, or its mode default", COMPILE)
    format: str = _choice("fp32", "format of the tables' rows", FORMATS)
    rounding: str = _choice(
        "stochastic", "of updated rows that are not fp32: stochastic, or nearest, which loses small updates", ROUNDINGS
    )
    cache: float = _number(0.0, "share of the tables' rows kept in FP32, the most used ones (0: none)", 0, 1)
    policy: str = _choice("lfu", "cache: which rows stay, lfu (most used) or lru (used last)", POLICIES)
    decay_every: int = _count(0, "cache, lfu: steps after which uses count half (0: never)", 0)
    backing: str = _choice(
        "device", "the tables' other rows: device, host (memory, beside a GPU) or disk (files)", BACKINGS, how=True
    )
    memory_budget: str = _option(
        "512MB",
        str,
        "disk: memory for rows, in the cache or not, as 512MB, 4GiB or bytes",
        "a number of bytes, or of kB, MB, GB, TB, KiB, MiB, GiB or TiB",
        lambda v: parse_size(v) > 0,
        how=True,
    )
    optimizer: str = _choice("rowwise_adagrad", "optimizer of the tables", tuple(OPTIMIZERS))
    lr: float = _positive(0.05, "learning rate of the tables")
    dense_lr: float = _positive(0.001, "learning rate of all but the tables (Adam)")
    warmup_steps: int = _count(0, "steps in which both learning rates rise linearly", 0)
    decay_start: int = _count(0, "step at which both begin to fall", 0)
    decay_steps: int = _count(0, "steps in which they fall with the square of what is left (0: they do not fall)", 0)

    epochs: int = _count(1, "passes over the training rows")
    batch_size: int = _count(2048, "rows per batch")
    accumulate: int = _count(1, "batches whose gradients are added up for one step")
    valid_fraction: float = _option(
        0.0, float, "share of the training rows, the last ones, set apart", "0 or more, below 1", lambda v: 0 <= v < 1
    )
    eval_every: int = _count(0, "steps between evaluations, on the rows set apart or else the test rows (0: none)", 0)
    patience: int = _count(0, "evaluations without a better log loss after which to stop early (0: never)", 0)
    seed: int = _count(0, "fixes the initial weights and the noise of stochastic rounding", 0, bits=64)
    device: str = _choice("cpu", "cpu, or cuda for a GPU, which is never chosen by itself", DEVICES, how=True)
    threads: int | None = _count(None, "CPU threads (default: torch's choice)", most=1024, how=True)

    run: str | None = _option(
        None, str, "name of the run (default: derived, numbered if taken)", RUN_NAMES, is_run_name, how=True
    )
    runs_dir: str = _text("runs", "folder that gets one folder per run", how=True)
    checkpoint_every: int = _count(0, "steps between checkpoints (0: at the end, and when interrupted)", 0, how=True)

    def __post_init__(self):
        for option in dataclasses.fields(self):
            value = getattr(self, option.name)
            if value is None and option.default is None:
                continue
            kind = _KINDS[option.metadata["kind"]]
            if not kind.fits(value):
                raise ValueError(
                    f"{option.name} is {shown(value)}, must be {kind.allowed} ({option.metadata['allowed']})"
                )
            if not option.metadata["check"](value):
                raise ValueError(f"{option.name} is {value!r}, allowed is {option.metadata['allowed']}")
        if self.decay_steps and self.decay_start < self.warmup_steps:
            raise ValueError(
                f"decay_start is {self.decay_start}, must be at least warmup_steps (now {self.warmup_steps}) for rates "
                "that fall (decay_steps)"
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
        """Name of the run where none was given."""
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
        return "-".join(part for part, there in parts if there)

    def learning_rate(self, base: float, step: int) -> float:
        """The learning rate of step number ``step``, from 0, of parameters whose rate without the policy is ``base``.

        Source: the learning-rate policy of https://github.com/facebookresearch/dlrm (warm-up, start of the decay,
        steps).
        """
        factor = 1.0
        if step < self.warmup_steps:
            factor = (step + 1) / self.warmup_steps
        elif self.decay_steps and step >= self.decay_start:
            factor = max(1 - (step - self.decay_start + 1) / self.decay_steps, 0.0) ** 2
        return max(base * factor, min(LEAST_RATE, base))

    def compressions(self, features: Sequence[Feature]) -> dict[str, Compression]:
        """Compression of each feature's table; features with full tables are not in it."""
        large = [f for f in features if f.num_embeddings > self.threshold]
        if self.embedding == "full" or not large:
            return {}
        if self.embedding == "mixed":
            sizes = [f.num_embeddings for f in features]
            dims = rk.mixed_dimensions(sizes, self.embedding_dim, self.temperature, threshold=self.threshold)
            # Bounds for all columns: a full table, which starts like one.
            narrow = zip(features, dims, strict=True)
            return {f.name: rk.MixedDimension(dim) for f, dim in narrow if dim < self.embedding_dim}
        if self.embedding == "hash":
            return {f.name: rk.Hash(-(-f.num_embeddings // self.collisions)) for f in large}
        combine = {"qr": "mult", "qr_add": "add", "qr_concat": "concat"}[self.embedding]
        return {f.name: rk.QuotientRemainder(self.collisions, combine) for f in large}

    def table_optimizer(self) -> Optimizer:
        """The fused optimizer of the tables."""
        return OPTIMIZERS[self.optimizer](self.lr)

    def outcome(self) -> dict[str, Any]:
        """The options that decide the outcome."""
        return {o.name: getattr(self, o.name) for o in dataclasses.fields(self) if not o.metadata["how"]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """The config that ``dataclasses.asdict`` gave; unknown names and wrong values are errors."""
        if not isinstance(values, dict):
            raise ValueError(f"config is {shown(values)}, must be an object")
        values = {name: value for name, value in values.items() if name not in FORMER}
        if unknown := sorted(set(values) - {option.name for option in dataclasses.fields(cls)}):
            raise ValueError(f"unknown option(s) {', '.join(unknown)}")
        given: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in values.items()}
        return cls(**given)

    @classmethod
    def read(cls, directory: Path) -> TrainConfig:
        """The config of a run, from its ``config.json``.

        Raises:
            DataError: it is missing or not a config.
        """
        path = directory / CONFIG
        try:
            found = files.read_json(path)
            return cls.from_dict(found["config"] if isinstance(found, dict) else found)
        except (OSError, DataError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is not the config of a run: {error}") from error


def options_of(owner: str) -> list[str]:
    """The options that only some models or data sets have, of this one."""
    name = FUNCTION if ":" in owner else owner
    return [option.name for option in dataclasses.fields(TrainConfig) if name in option.metadata["of"]]


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Options of ``after`` that have another value than in ``before``, as text."""
    return [f"{n} is {value!r}, was {before.get(n)!r}" for n, value in after.items() if before.get(n) != value]


#: Options that do nothing without another one: which that is, in words and as a test.
_NEEDED: dict[str, tuple[str, Callable[[TrainConfig], object]]] = {
    "rounding": ("a format other than 'fp32'", lambda config: config.format != "fp32"),
    "policy": ("a cache", lambda config: config.cache),
    "memory_budget": ("backing 'disk'", lambda config: config.backing == "disk"),
    "collisions": ("embedding 'hash' or 'qr'", lambda config: config.embedding not in ("full", "mixed")),
    "temperature": ("embedding 'mixed'", lambda config: config.embedding == "mixed"),
    "threshold": ("an embedding other than 'full'", lambda config: config.embedding != "full"),
    "decay_start": ("decay_steps", lambda config: config.decay_steps),
}


def _need_of(option: dataclasses.Field, configs: Iterable[TrainConfig]) -> tuple[str, Callable[[TrainConfig], object]]:
    """An option does nothing without this; one of some models or data sets needs one of them."""
    owners = option.metadata["of"]
    if not owners:
        return _NEEDED.get(option.name, ("", lambda config: True))
    kind = "model" if owners[0] in MODELS else "data"
    allowed, now = (" or ".join(dict.fromkeys(map(repr, v))) for v in (owners, (getattr(c, kind) for c in configs)))
    return f"{kind} {allowed} (now {now})", lambda c: option.name in options_of(getattr(c, kind))


def refuse_options_without_effect(given: Mapping[str, Any], configs: Iterable[TrainConfig]) -> None:
    """Raises ValueError if an option of ``given``, a value each, does nothing in all of the configs."""
    configs, options = list(configs), {option.name: option for option in dataclasses.fields(TrainConfig)}
    for name, value in given.items():
        what, is_there = _need_of(options[name], configs)
        if not any(map(is_there, configs)):
            raise ValueError(f"{name} is {value!r}, which does nothing without {what}: leave it out, or give both")


def add_options(parser: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    """One flag per option that is not in ``without``, in groups. Only flags that were given end up in the namespace."""
    group: Any = parser
    for option in dataclasses.fields(TrainConfig):
        if option.name in GROUPS:
            group = parser.add_argument_group(GROUPS[option.name])
        if option.name in without:
            continue
        kind, default, names = option.metadata["kind"], option.default, ",".join(option.metadata["names"])
        owners = f"{', '.join(option.metadata['of'])}: " if option.metadata["of"] else ""
        of_kind = "N,N" if kind is widths else kind.__name__.upper()
        group.add_argument(
            f"--{option.name.replace('_', '-')}",
            type=kind,
            default=argparse.SUPPRESS,
            metavar=f"{{{names}}}" if names else of_kind,
            help=owners + option.metadata["help"] + ("" if default is None else f" (default: {option_text(default)})"),
        )


def option_text(value: Any) -> str:
    """The value of an option as its flag takes it; "-" for None."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else "-" if value is None else str(value)
