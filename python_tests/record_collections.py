"""Makes data/recorded_collections.zip: runs of every module with tables, with their outputs, gradients and states.

    python python_tests/record_collections.py

As record_calls.py: a recording is made once, from the modules of the commit it names.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from recording import DATA, Writer
from replay_collections import FOLDER, Player, build, inputs_of
from torch import Tensor

from rec_kernels.nn.tables.config import BAG_FORMATS

Run = dict[str, object]


def new(name: str, /, **arguments: object) -> dict[str, object]:
    """An expression of a recording."""
    return {"new": name, "with": arguments}


OPTIMIZERS = [
    new("SGD", lr=0.5),
    new("RowwiseAdagrad", lr=0.5, weight_decay=0.01),
    new("Adagrad", lr=0.5, clip_grad_norm=1.0),
    new("Adam", lr=0.1, weight_decay=0.1, weight_decay_mode="decoupled"),
    new("RowwiseAdam", lr=0.1, clip_grad_value=0.1),
    new("LAMB", lr=0.1, weight_decay=0.01, weight_decay_mode="decoupled"),
    new("Adam", lr=0.1, state_dtype=torch.bfloat16),
]
DIMS = dict(zip(BAG_FORMATS, [6, 7, 16, 20, 9, 33, 16, 5], strict=True))


class Recorder(Player):
    """Draws the gradients of the outputs, and keeps them with the step."""

    def __init__(self, module: torch.nn.Module, seed: int) -> None:
        super().__init__(module)
        self.generator = torch.Generator().manual_seed(seed)

    def grads(self, step: dict, outputs: list[Tensor]) -> list[Tensor]:
        """Random ones; with "overflow", one of them is infinite."""
        drawn = [torch.randn(o.shape, generator=self.generator).to(o.dtype) for o in outputs]
        if step.get("overflow"):
            drawn[0].view(-1)[0] = torch.inf
        step["grads"] = drawn
        return drawn


def tables(formats: tuple[str, ...], rows: int = 6, kind: str = "EmbeddingBagConfig", **common: object) -> list:
    """t0, t1, ... of the formats; the first has two features; sums and means in turn."""
    found = []
    for i, format in enumerate(formats):
        pooling = {"pooling": ("sum", "mean")[i % 2]} if kind == "EmbeddingBagConfig" else {}
        features = [f"f{i}", f"g{i}"][: 2 - min(i, 1)]
        sizes = {"num_embeddings": rows + i, "embedding_dim": DIMS[format]}
        found.append(new(kind, **sizes, name=f"t{i}", feature_names=features, format=format, **pooling, **common))
    return found


def batch(keys: list[str], rows: int, seed: int, *, size: int = 3, weighted: bool = False, **more: object) -> dict:
    """Bags of 0 to 3 ids for each feature; ``more`` goes to the features as it is."""
    g = torch.Generator().manual_seed(seed)
    strides = more.get("stride_per_key", [size] * len(keys))
    lengths = torch.randint(0, 4, (sum(strides),), generator=g)
    values = torch.randint(0, rows, (int(lengths.sum()),), generator=g)
    if seed % 2:
        values, lengths = values.int(), lengths.int()
    weights = torch.rand(len(values), generator=g).requires_grad_() if weighted else None
    return new("KeyedJaggedTensor", keys=keys, values=values, lengths=lengths, weights=weights, **more)


def keys_of(given: list[dict]) -> list[str]:
    """The features of tables, each once."""
    return list(dict.fromkeys(f for table in given for f in table["with"]["feature_names"]))


def lookup(features: dict, **more: object) -> dict[str, object]:
    """A step of training."""
    return {"do": "lookup", "features": features, "backward": True} | more


def training(keys: list[str], rows: int, seed: int, steps: int = 3) -> list[dict]:
    """Steps with and without weights, then what is there."""
    batches = [batch(keys, rows, seed + s, weighted=s % 2 == 1) for s in range(steps)]
    return [*map(lookup, batches), {"do": "read", "features": batches[0]}, {"do": "state"}]


def run(module: dict, steps: list[dict], **more: object) -> Run:
    """A run before it has been made."""
    return {"module": module, "steps": steps, "exact": True} | more


def optimizers() -> Iterator[tuple[str, Run]]:
    """Every optimizer, over tables of every format, pooled and not."""
    for number, optimizer in enumerate(OPTIMIZERS):
        name = f"{optimizer['new']} {number}"
        formats = tuple(BAG_FORMATS[(3 * number + i) % 8] for i in range(4))
        given = tables(formats)
        rounding = ("stochastic", "nearest")[number % 3 == 2]
        options = {"optimizer": optimizer, "seed": number - 3, "rounding": rounding}
        pooled = new("EmbeddingBagCollection", tables=given, **options)
        yield f"bags, {name}", run(pooled, training(keys_of(given), 6, number))
        given = tables(formats[:2], kind="EmbeddingConfig")
        rows = new("EmbeddingCollection", tables=given, **options)
        yield f"sequences, {name}", run(rows, training(keys_of(given), 6, number + 50))


def untrained() -> Iterator[tuple[str, Run]]:
    """Ordinary parameters with dense gradients; outputs of all types; tables of bytes that nobody trains."""
    for number, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16)):
        for kind in ("EmbeddingBag", "Embedding"):
            given = tables(("fp32", "fp32"), kind=f"{kind}Config")
            given[1]["with"] |= {"feature_names": ["g0", "h"], "embedding_dim": 9}
            module = new(f"{kind}Collection", tables=given, output_dtype=dtype)
            yield f"{kind}, gradients, {dtype}", run(module, training(keys_of(given), 6, 100 + number))
    given = tables(BAG_FORMATS, rows=3)
    steps = [{"do": "read", "features": batch(keys_of(given), 3, 7)}, {"do": "state"}]
    steps.append({"do": "serve", "features": batch(keys_of(given), 3, 8)})
    yield "bags, no optimizer, every format", run(new("EmbeddingBagCollection", tables=given), steps)


def compressed() -> Iterator[tuple[str, Run]]:
    """Tables of several parts, hashed, projected; with and without a fused optimizer."""
    ways = [new("Hash", buckets=7), new("MixedDimension", dim=3)]
    for combine, compose in itertools.product(("mult", "add", "concat"), ("per_id", "pooled")):
        ways.append(new("QuotientRemainder", collisions=3, combine=combine, compose=compose))
    ways.append(new("Partitions", pairs=[[1, 4], [4, 5]], combine="concat", columns=[5, 3]))
    ways.append(new("Partitions", pairs=[[1, 3], [3, 3], [9, 3]], combine="mult"))
    for number, way in enumerate(ways):
        arguments = {"num_embeddings": 20, "embedding_dim": 8, "name": "c", "feature_names": ["c", "d"]}
        plain = tables(("fp32",))
        for optimizer in (None, OPTIMIZERS[1 + number % 3]):
            formats = "fp32" if optimizer is None else ("fp32", "int8", "bf16")[number % 3]
            given = [*plain, new("EmbeddingBagConfig", **arguments, compression=way, format=formats)]
            module = new("EmbeddingBagCollection", tables=given, optimizer=optimizer)
            kind = "fused" if optimizer else "gradients"
            yield f"compressed, {number}, {kind}", run(module, training(keys_of(given), 6, 200 + number))


def shared_batches() -> Iterator[tuple[str, Run]]:
    """Batch sizes of features' own, samples that share bags, windows, wrapped modules."""
    given = tables(("fp32", "int8"))
    keys, own = keys_of(given), {"stride_per_key": [2, 3, 4]}
    inverse = [["f0", "g0", "f1"], torch.tensor([[0, 1, 1, 0, 1], [2, 0, 1, 1, 2], [3, 3, 0, 1, 2]])]
    g = torch.Generator().manual_seed(9)
    for number, optimizer in enumerate((OPTIMIZERS[0], OPTIMIZERS[3], None)):
        formats = given if optimizer else tables(("fp32", "fp32"))
        module = new("EmbeddingBagCollection", tables=formats, optimizer=optimizer, seed=number)
        steps = [
            lookup(batch(keys, 6, 300 + number, **own), method="by_feature"),
            lookup(batch(keys, 6, 310 + number, weighted=True, **own, inverse_indices=inverse)),
            lookup(_distinct(keys, 320 + number, torch.randint(2, (1, 5), generator=g))),
            lookup(_windows(keys, torch.randint(2, (1, 4), generator=g))),
            {"do": "state"},
        ]
        yield f"shared bags, {number}", run(module, steps)
        rows = tables(("fp32", "int8" if optimizer else "fp32"), kind="EmbeddingConfig")
        module = new("EmbeddingCollection", tables=rows, optimizer=optimizer)
        steps = [lookup(batch(keys, 6, 330, **own)), lookup(batch(keys, 6, 331), method="rows"), {"do": "state"}]
        yield f"sequences, batch sizes, {number}", run(module, steps)
    module = new("EmbeddingBagCollection", tables=given, optimizer=OPTIMIZERS[0])
    several = _distinct(keys, 340, torch.randint(2, (1, 5), generator=g), rest=False)
    steps = [lookup(several), lookup(batch(keys, 6, 341)), {"do": "state"}]
    yield "deduplicated", run(new("Deduplicated", module=module, group=0), steps)


def _distinct(keys: list[str], seed: int, inverse: Tensor, rest: bool = True) -> dict:
    """Samples that share the bags of a group, of all features or all but the last."""
    count, grouped = inverse.shape[1], keys[:-1] if rest else keys
    strides = [2] * len(grouped) + [count] * (len(keys) - len(grouped))
    unique = batch(keys, 6, seed, stride_per_key=strides)
    return new("InverseKeyedJaggedTensor", unique=unique, groups=[grouped], inverse=inverse)


def _windows(keys: list[str], inverse: Tensor) -> dict:
    """A deduplicated batch of bags that overlap in memory."""
    starts, lengths = torch.tensor([0, 1, 1, 3, 2, 0, 4]), torch.tensor([2, 3, 0, 2, 1, 4, 1])
    values = torch.tensor([5, 0, 3, 3, 1])
    bags = {"values": values, "starts": starts[:6], "lengths": lengths[:6], "stride_per_key": [2] * len(keys)}
    unique = new("KeyedJaggedWindows", keys=keys, **bags)
    return new("InverseKeyedJaggedTensor", unique=unique, groups=[keys], inverse=inverse)


def cached() -> Iterator[tuple[str, Run]]:
    """Rows that come and go: policies, formats, optimizers, memory of the host, reading ahead."""
    given = tables(("int8", "int4", "bf16", "fp32"), rows=14)
    keys = keys_of(given)
    caches = [
        new("RowCache", fraction=0.3, ways=2),
        new("RowCache", fraction=0.4, ways=4, policy="lfu", decay_every=2),
        new("RowCache", fraction={"t0": 1.0, "t2": 0.3}, ways=3, backing="host"),
        new("RowCache", fraction=0.0),
    ]
    for number, (cache, optimizer) in enumerate(zip(caches, (1, 3, 0, 6), strict=True)):
        options = {"optimizer": OPTIMIZERS[optimizer], "cache": cache, "seed": 2**40 + number}
        module = new("EmbeddingBagCollection", tables=given, **options)
        ahead = batch(keys, 14, 404 + number)
        steps = [*training(keys, 14, 400 + number, steps=5)]
        steps += [{"do": "call", "method": "prefetch", "given": [ahead]}, lookup(ahead)]
        steps += [{"do": "call", "method": "flush"}, {"do": "call", "method": "reset_cache_states"}]
        steps += [lookup(batch(keys, 14, 410 + number)), {"do": "state"}]
        yield f"cached, {number}", run(module, steps)
    rows = tables(("int8", "mx6"), rows=14, kind="EmbeddingConfig")
    module = new("EmbeddingCollection", tables=rows, optimizer=OPTIMIZERS[1], cache=caches[0])
    yield "cached sequences", run(module, training(keys_of(rows), 14, 420, steps=5))


def on_disk() -> Iterator[tuple[str, Run]]:
    """Tables in a file that the recorded commit has written."""
    given = tables(("int8", "bf16"), rows=40)
    file = {"backing": "disk", "path": f"{FOLDER}tables", "memory_budget": 2**20}
    cache = new("RowCache", fraction=0.2, ways=4, **file)
    module = new("EmbeddingBagCollection", tables=given, optimizer=OPTIMIZERS[1], cache=cache)
    yield "on disk", run(module, training(keys_of(given), 40, 500, steps=3), in_file=True)


def steps_of_training() -> Iterator[tuple[str, Run]]:
    """Accumulation, frozen features, learning rates, scaled losses, ids out of range, other formats."""
    given = tables(("fp32", "int8", "fp16"))
    keys = keys_of(given)
    batches = [batch(keys, 6, 600 + i, weighted=i % 2 == 1) for i in range(6)]
    module = new("EmbeddingBagCollection", tables=given, optimizer=OPTIMIZERS[3])
    state, freeze = {"do": "state"}, {"do": "call", "method": "freeze", "given": ["g0", "f1"]}
    steps = [{"do": "accumulate", "steps": [lookup(b) for b in batches[:3]]}, state, freeze, lookup(batches[3])]
    steps += [{"do": "rate", "lr": 0.25}, lookup(batches[4]), state]
    steps += [{"do": "call", "method": "unfreeze", "given": ["f1"]}, lookup(batches[5]), state]
    yield "accumulated, frozen", run(module, steps)
    steps = [{"do": "scaler", "scale": 1024.0}, lookup(batches[1]), lookup(batches[0], overflow=True)]
    yield "scaled losses", run(module, [*steps, lookup(batches[3]), lookup(batches[4]), state])
    cache = new("RowCache", fraction=0.5, ways=2)
    module = new("EmbeddingBagCollection", tables=given, optimizer=OPTIMIZERS[0], cache=cache)
    yield "accumulated, cached", run(module, [{"do": "accumulate", "steps": [lookup(b) for b in batches[:3]]}, state])
    yield "loaded and converted", run(module, [{"do": "load", "state": _floats(), "options": {"convert": True}}, state])
    module = new("EmbeddingBagCollection", tables=given, optimizer=OPTIMIZERS[1], bounds_check="ignore")
    yield "ids out of range", run(module, [lookup(batch(keys, 12, 620)), lookup(batch(keys, 9, 621)), state])
    module = new("EmbeddingBagCollection", tables=given, optimizer=OPTIMIZERS[1])
    steps = [lookup(batch(keys, 12, seed), raises=True) for seed in (630, 631, 632)]
    steps += [lookup(batch(keys[:2], 6, 633), raises=True), state]
    yield "ids that are refused", run(module, steps)


def _floats() -> dict[str, Tensor]:
    """The state of the tables above, if all were of floats."""
    floats = new("EmbeddingBagCollection", tables=tables(("fp32", "int8", "fp16")), optimizer=OPTIMIZERS[0])
    for table in floats["with"]["tables"]:
        table["with"]["format"] = "fp32"
    return {n: t.clone() for n, t in build({"module": floats}, Path()).state_dict().items()}


def tables_of_one() -> Iterator[tuple[str, Run]]:
    """Modules around one table; what goes through torch's matrix products is compared with a tolerance."""
    for number, optimizer in enumerate((None, OPTIMIZERS[1])):
        format = "int8" if optimizer else "fp32"
        path = {"num_embeddings": 20, "embedding_dim": 6, "collisions": 4, "optimizer": optimizer, "format": format}
        blocks = {"block_sizes": [5, 7, 8], "block_dims": [8, 8, 8], "embedding_dim": 8}
        ranks = torch.randperm(20, generator=torch.Generator().manual_seed(1))
        mixed = {"optimizer": optimizer, "pooling": ("sum", "mean")[number], "ranks": ranks, "format": format}
        steps = [lookup(_bags(20, 700 + number)), lookup(_bags(20, 702 + number)), {"do": "state"}]
        yield f"path, {number}", run(new("PathEmbeddingBag", **path), steps, exact=False)
        yield (
            f"path with a hidden layer, {number}",
            run(new("PathEmbeddingBag", **path, hidden=5, pooling="mean"), steps, exact=False),
        )
        yield f"blocks, {number}", run(new("MixedDimensionEmbeddingBag", **blocks, **mixed), steps)
        blocks["block_dims"] = [8, 4, 2]
        yield f"narrow blocks, {number}", run(new("MixedDimensionEmbeddingBag", **blocks, **mixed), steps, exact=False)


def _bags(rows: int, seed: int) -> dict:
    """Weighted bags of one feature."""
    g = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, 2, 2, 5, 9])
    weights = torch.rand(9, generator=g).requires_grad_()
    return new("JaggedTensor", values=torch.randint(rows, (9,), generator=g), offsets=offsets, weights=weights)


WUKONG = {"fm_features": 2, "linear_features": 2, "factors": 2, "hidden": [5]}


def networks() -> Iterator[tuple[str, Run]]:
    """Networks over the features, whose sums are torch's."""
    g = torch.Generator().manual_seed(800)
    for name, module, shape in (
        ("low-rank cross", new("LowRankCrossNet", in_features=6, num_layers=2, low_rank=3), (4, 6)),
        ("wukong", new("Wukong", in_features=3, embedding_dim=4, num_layers=2, **WUKONG), (4, 3, 4)),
    ):
        given = torch.randn(shape, generator=g).requires_grad_()
        yield name, run(module, [lookup(given), {"do": "state"}], exact=False)


GROUPS = (
    *(optimizers, untrained, compressed, shared_batches, cached, on_disk, steps_of_training, tables_of_one),
    networks,
)


def record(name: str, made: Run, number: int) -> Run:
    """Makes a run: its first state, and what every step gives."""
    with tempfile.TemporaryDirectory() as folder:
        if made.pop("in_file", False):
            build(made, Path(folder)).close(apply=True)
            made["files"] = {p.name: _content(p) for p in sorted(Path(folder).iterdir())}
        module = build(made, Path(folder))
        made |= {"name": name, "initial": {n: t.clone() for n, t in module.state_dict().items()}}
        player, leaves = Recorder(module, number), [t for s in made["steps"] for _, t in inputs_of(s)]
        with contextlib.closing(module) if hasattr(module, "close") else contextlib.nullcontext():
            made["results"] = [player.play(step) for step in made["steps"]]
        assert all(t.grad is None for t in leaves)
    return made


def _content(path: Path) -> Tensor:
    return torch.tensor(list(path.read_bytes()), dtype=torch.uint8)


def main() -> None:
    """Writes the file."""
    writer, entries = Writer(), []
    for group in GROUPS:
        for name, made in group():
            entries.append(writer.encode(record(name, made, len(entries))))
        sys.stdout.write(f"{group.__name__}: {len(entries)} runs, {len(writer._blob)} bytes\n")
    commit = subprocess.run(
        ["git", "merge-base", "HEAD", "main"], capture_output=True, text=True, check=True
    ).stdout.strip()
    path = DATA / "recorded_collections.zip"
    writer.write(path, {"commit": commit, "torch": torch.__version__, "runs": entries})
    sys.stdout.write(f"{path.name}: {path.stat().st_size} bytes\n")


if __name__ == "__main__":
    random.seed(0)
    main()
