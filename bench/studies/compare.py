"""Comparison of configurations over paired seeds: ``python -m bench.studies compare``."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import gc
import itertools
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rec_kernels.dlrm import checkpoint, files
from rec_kernels.dlrm.config import (
    DATA,
    EMBEDDINGS,
    FORMATS,
    MODELS,
    ROUNDINGS,
    TrainConfig,
    changes,
    options_of,
    refuse_options_without_effect,
    widths,
)
from rec_kernels.dlrm.data import DataError, DataSet
from rec_kernels.dlrm.reader import open_data
from rec_kernels.dlrm.runs import CONFIG, RUN_NAMES, NotFiniteError, Records, RunExistsError, is_run_name
from rec_kernels.dlrm.train import train

# Options that determine the data set.
DATA_OPTIONS = ("data", "data_dir", *sorted({name for data in DATA for name in options_of(data)}))
MOST_SEEDS = 1000


@dataclass(frozen=True)
class Comparison:
    """Configurations to train and compare.

    Args:
        folder: parent of the runs' folders and of the results.
        configs: the configurations by name; the first one is the reference.
        seeds: every configuration is trained once per seed.
    """

    folder: Path
    configs: dict[str, TrainConfig]
    seeds: tuple[int, ...]

    def run_config(self, name: str, seed: int) -> TrainConfig:
        """The config of one run."""
        run = f"{name}-seed{seed}"
        return dataclasses.replace(self.configs[name], seed=seed, run=run, runs_dir=str(self.folder))


def plan(
    configurations: Sequence[str],
    base: TrainConfig,
    seeds: str,
    name: str,
    *,
    formats: str | None = None,
    roundings: str | None = None,
    embeddings: str | None = None,
    models: str | None = None,
    given: Mapping[str, Any] | None = None,
) -> Comparison:
    """Creates the comparison of a command line.

    Args:
        configurations: "NAME" or "NAME:option=value,option=value"; options are those of ``TrainConfig``, widths of
            layers are joined by "+" ("bottom=64+32").
        base: the default options of the configurations.
        seeds: a count N for 0, 1, ..., N - 1, or a list "3,5,8".
        name: of the folder in ``base.runs_dir``.
        formats, roundings: lists, as in "fp32,int8": every configuration in every format with every rounding, named
            "NAME-int8-nearest", or without configurations "int8-nearest"; fp32 only once, as it is not rounded. None:
            those of ``base``.
        embeddings: a list of table compressions, as in "full,hash,qr", in every format, named "NAME-qr-int8-nearest".
            A configuration cannot set options that a list sets.
        models: a list of models, as in "dlrm,dcnv2", named "NAME-dcnv2-qr-int8-nearest".
        given: options of ``base`` given on the command line, with their values: each must affect a configuration.

    Raises:
        ValueError: names the configuration, the option, its value and what is allowed.
    """
    if not is_run_name(name):
        raise ValueError(f"name is {name!r}, allowed is {RUN_NAMES}")
    networks = _kinds("model", base.model if models is None else models, MODELS)
    kinds = _kinds("embedding", base.embedding if embeddings is None else embeddings, EMBEDDINGS)
    rows = _variants(base.format if formats is None else formats, base.rounding if roundings is None else roundings)
    variants = {
        "-".join(filter(None, names)): networks[names[0]] | kinds[names[1]] | rows[names[2]]
        for names in itertools.product(networks, kinds, rows)
    }
    # Options set by lists, with their flags: another option must not override a variant, e.g. "int8" with fp32.
    listed = {} if "" in rows else dict.fromkeys(("format", "rounding"), "--format or --rounding")
    listed |= {} if "" in kinds else {"embedding": "--embedding"}
    listed |= {} if "" in networks else {"model": "--model"}
    if not configurations and "" in variants:
        raise ValueError(
            "there is nothing to compare: give configurations, or lists such as --format fp32,int8, "
            "--embedding full,qr or --model dlrm,dcnv2"
        )
    configs = _configs(configurations, base, variants, listed)
    refuse_options_without_effect(given or {}, configs.values())
    if len(configs) < 2:
        raise ValueError(f"there is only one configuration, {next(iter(configs))!r}: a comparison needs at least 2")
    return Comparison(Path(base.runs_dir) / name, configs, parse_seeds(seeds))


def _configs(
    configurations: Sequence[str], base: TrainConfig, variants: dict[str, dict], listed: dict[str, str]
) -> dict[str, TrainConfig]:
    """Every configuration in every variant, by name; ``listed``: flags of the options that lists set."""
    configs: dict[str, TrainConfig] = {}
    for text in configurations or [None]:
        key, given = ("", {}) if text is None else parse_configuration(text)
        option = next((option for option in given if option in listed), None)
        if option is not None:
            raise ValueError(
                f"configuration {text!r}: {option!r} is given, but {listed[option]} is a list: leave one out"
            )
        own = len(configs)
        for variant, options in variants.items():
            full = "-".join(part for part in (key, variant) if part)
            if full in configs:
                raise ValueError(f"two configurations are named {full!r}: names must be unique")
            try:
                configs[full] = dataclasses.replace(base, **options | given)
            except ValueError as error:
                raise ValueError(f"configuration {full if text is None else text!r}: {error}") from error
        try:
            refuse_options_without_effect(given, list(configs.values())[own:])
        except ValueError as error:
            raise ValueError(f"configuration {text!r}: {error}") from error
    return configs


def _kinds(option: str, text: str, allowed: Sequence[str]) -> dict[str, dict[str, str]]:
    """The values in an option's list by name; a single value has the name ""."""
    names = text.split(",")
    if not set(names) <= set(allowed) or len(set(names)) < len(names):
        raise ValueError(f"{option} is {text!r}, allowed is {', '.join(allowed)}, or several of them")
    return {name if len(names) > 1 else "": {option: name} for name in names}


def _variants(formats: str, roundings: str) -> dict[str, dict[str, str]]:
    """The options "format" and "rounding" by "int8-nearest", "fp32", ...; by "" if neither is a list."""
    lists = {}
    for option, text, allowed in (("format", formats, FORMATS), ("rounding", roundings, ROUNDINGS)):
        lists[option] = names = text.split(",")
        if not set(names) <= set(allowed) or len(set(names)) < len(names):
            raise ValueError(f"{option} is {text!r}, allowed is {', '.join(allowed)}, or several of them")
    if all(len(names) == 1 for names in lists.values()):
        return {"": {"format": formats, "rounding": roundings}}
    if formats == "fp32":
        raise ValueError(f"rounding is {roundings!r}, but format is 'fp32', which is not rounded: also give --format")
    variants = {}
    for format in lists["format"]:
        for rounding in ROUNDINGS[:1] if format == "fp32" else lists["rounding"]:
            name = "fp32" if format == "fp32" else f"{format}-{rounding}"
            variants[name] = {"format": format, "rounding": rounding}
    return variants


def parse_seeds(text: str) -> tuple[int, ...]:
    """ "8" -> (0, ..., 7); "3,5" -> (3, 5).

    Raises:
        ValueError: seeds that are not numbers, missing, too many, out of range or repeated.
    """
    message = (
        f"seeds is {text!r}, allowed is a count of 1 to {MOST_SEEDS}, or different seeds of 0 or more, below 2**64, as "
        "in 0,1,2"
    )
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(message) from error
    if len(numbers) == 1 and numbers[0] > MOST_SEEDS:
        raise ValueError(message)
    seeds = numbers if len(numbers) > 1 else tuple(range(numbers[0]))
    if not seeds or min(seeds) < 0 or max(seeds) >= 2**64 or len(set(seeds)) < len(seeds):
        raise ValueError(message)
    return seeds


def parse_configuration(text: str) -> tuple[str, dict[str, Any]]:
    """Parses "NAME" or "NAME:option=value,..." to the name and options."""
    name, colon, given = text.partition(":")
    where = f"configuration {text!r}"
    if not is_run_name(name):
        raise ValueError(f"{where}: its name is {name!r}, allowed is {RUN_NAMES}")
    allowed = {option.name: option for option in dataclasses.fields(TrainConfig)}
    values = {}
    for part in given.split(",") if colon else ():
        option, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{where}: {part!r} is not option=value")
        if option not in allowed:
            raise ValueError(f"{where}: there is no option {option!r}, allowed are {', '.join(comparable_defaults())}")
        if option not in comparable_defaults():
            allowed_here = ", ".join(comparable_defaults())
            raise ValueError(f"{where}: {option!r} cannot differ between configurations, allowed are {allowed_here}")
        if option in values:
            raise ValueError(f"{where}: {option!r} is given twice")
        kind = allowed[option].metadata["parse"]
        try:
            values[option] = kind(value.replace("+", ",") if kind is widths else value)
        except ValueError as error:
            raise ValueError(
                f"{where}: {option} is {value!r}, allowed is {allowed[option].metadata['allowed']}"
            ) from error
    return name, values


def comparable_defaults() -> dict[str, Any]:
    """The options that configurations may differ in, i.e. those that affect the outcome, with defaults."""
    fields = {option.name: option for option in dataclasses.fields(TrainConfig)}
    return {n: o.default for n, o in fields.items() if n == "path" or not (o.metadata["execution"] or n == "seed")}


def run(comparison: Comparison) -> dict[str, dict[int, dict]]:
    """Trains the missing runs.

    Finished runs and runs whose loss was not finite are kept. Runs that were interrupted or failed for another reason
    are resumed from their checkpoint or started again. A failed run does not stop the others.

    Returns:
        The run's "test" or "failed" record by configuration and seed.

    Raises:
        RunExistsError: a run exists with another config, the folder is itself a run, or another process uses it.
        DataError: the data is missing or invalid, a run's folder is a link, or its records are invalid and it has no
            checkpoint to resume.
        TrainingError: a batch is too large for the memory budget. IndexError: an id is out of range.
        RunInterruptedError: Ctrl-C or SIGTERM; a repeated call resumes.
    """
    pairs = [(name, seed) for seed in comparison.seeds for name in comparison.configs]
    data: dict[tuple, DataSet] = {}
    outcomes: dict[str, dict[int, dict]] = {name: {} for name in comparison.configs}
    with _locked(comparison.folder), tqdm(total=len(pairs), desc="runs", unit="run") as bar:
        # All configs are checked before the first training, so that errors do not come after an hour.
        for name, seed in pairs:
            _check(comparison.run_config(name, seed))
        for name, seed in pairs:
            config = comparison.run_config(name, seed)
            bar.set_postfix_str(config.run)
            outcomes[name][seed] = _outcome(Path(config.runs_dir) / config.run) or _train(config, data)
            gc.collect()  # frees models, which are in reference cycles
            bar.update()
    return outcomes


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Creates the folder if it is missing and locks it against other processes; the lock ends with the process."""
    if (folder / CONFIG).exists():
        raise RunExistsError(f"{folder} is a run, not a comparison: choose another name")
    folder.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # follow no link, do not wait for a pipe
    with open(os.open(folder / ".lock", flags, 0o666), "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunExistsError(f"another process is running the comparison {folder}: wait for it") from error
        yield


def _check(config: TrainConfig) -> None:
    directory = Path(config.runs_dir) / config.run
    files.refuse_foreign(directory, folder=True)
    if not directory.exists():
        return
    before = TrainConfig.read(directory)
    differences = changes(before.outcome(), config.outcome())
    places = [None if path is None else Path(path).resolve() for path in (before.path, config.path)]
    if places[0] != places[1]:  # a finished run is valid wherever its data is now
        differences.append(f"path is {config.path!r}, was {before.path!r}")
    if differences:
        raise RunExistsError(
            f"{directory} has another config: {'; '.join(differences)}: choose another --name or delete it"
        )
    _outcome(directory)


def _outcome(directory: Path) -> dict | None:
    """The final record of a run, or None; failures other than a loss that is not finite are retried."""
    try:
        records = Records(directory).read()
    except DataError as error:
        if _has_checkpoint(directory):  # resuming reports it, or drops records after the checkpoint
            return None
        raise DataError(f"{error}; there is no {checkpoint.NAME}, so delete {directory} to train it again") from error
    last = records[-1] if records else {"kind": "none"}
    ended = last["kind"] == "test" or (last["kind"] == "failed" and last.get("cause") == NotFiniteError.__name__)
    return last if ended else None


def _has_checkpoint(directory: Path) -> bool:
    return os.path.lexists(directory / checkpoint.NAME)  # also for a broken link, so that nothing is deleted


def _train(config: TrainConfig, opened: dict[tuple, DataSet]) -> dict:
    """Starts or resumes a run; returns its final record."""
    key = tuple(getattr(config, option) for option in DATA_OPTIONS)
    if key not in opened:
        opened[key] = open_data(config)
    directory = Path(config.runs_dir) / config.run
    resume = directory if _has_checkpoint(directory) else None
    if resume is None and directory.exists():
        shutil.rmtree(directory)  # killed before its first checkpoint
    try:
        train(config, opened[key], resume=resume, progress=False)
    except NotFiniteError:
        if _outcome(directory) is None:
            raise
    return _outcome(directory)
