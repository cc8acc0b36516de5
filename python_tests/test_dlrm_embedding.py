"""The trainer with compressed tables: records, resumption, errors and comparisons."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_lines import main
from dlrm_cases import PLAIN, flags_of
from dlrm_records import records

import rec_kernels as rk
from rec_kernels.dlrm import DLRM, TrainConfig, checkpoint, model, train
from rec_kernels.dlrm.config import EMBEDDINGS
from rec_kernels.dlrm.data import Feature
from rec_kernels.dlrm.synthetic import Synthetic
from rec_kernels.dlrm.train import build_model

pytestmark = pytest.mark.usefixtures("no_pictures")
FLAGS = flags_of(PLAIN)


@pytest.mark.parametrize("embedding", EMBEDDINGS[1:])
@pytest.mark.parametrize("format", ["fp32", "int8"])
def test_every_kind_trains(embedding: str, format: str, data: Synthetic, tmp_path: Path) -> None:
    """Every kind trains with two row formats: the run has its name, tables shrink, loss falls, and bits repeat."""
    collisions = 4 if embedding == "mixed" else 5  # which "mixed" does not have
    flags = ["--embedding", embedding, "--format", format, "--epochs", "2"]
    flags += ["--collisions", "5"] * (collisions == 5)
    assert main(["train", *FLAGS, *flags, "--runs-dir", str(tmp_path)]) == 0
    run = next(tmp_path.iterdir())
    kind = "mixed0.3" if embedding == "mixed" else f"{embedding}5"
    assert run.name.startswith(f"{data.name}-d16-{kind}-{'b500' if format == 'fp32' else 'int8-stochastic'}")
    test = records(run)[-1]
    assert test["log_loss"] < 0.7
    full = sum(f.num_embeddings for f in data.features) * rk.row_bytes(format, 16)
    kept = sum(table["weight_bytes"] for table in test["tables"])
    assert kept < 0.65 * full
    config = TrainConfig.read(run)
    assert (config.embedding, config.collisions) == (embedding, collisions)
    options = PLAIN | {"embedding": embedding, "collisions": collisions, "format": format, "epochs": 2}
    again = train(TrainConfig(**options, runs_dir=str(tmp_path), run="again"), data, progress=False)
    states = [checkpoint.load(directory)["model"] for directory in (run, Path(again["directory"]))]
    assert all(torch.equal(a, b) for a, b in zip(*(s.values() for s in states), strict=True))


def test_which_tables_are_compressed() -> None:
    """Tables of more ids than the threshold are compressed; mixed dimensions have the widths of rk.mixed_dimensions."""
    features = [Feature("big", 100_000), Feature("small", 200), Feature("middle", 5000)]
    kinds = {
        "full": {},
        "hash": {"big": rk.Hash(25_000), "middle": rk.Hash(1250)},
        "qr": dict.fromkeys(("big", "middle"), rk.QuotientRemainder(4)),
        "qr_add": dict.fromkeys(("big", "middle"), rk.QuotientRemainder(4, "add")),
        "qr_concat": dict.fromkeys(("big", "middle"), rk.QuotientRemainder(4, "concat")),
        "mixed": {"big": rk.MixedDimension(2), "middle": rk.MixedDimension(6)},
    }
    for kind, expected in kinds.items():
        assert TrainConfig(embedding=kind).compressions(features) == expected
    assert TrainConfig(embedding="hash", threshold=10**6).compressions(features) == {}
    assert TrainConfig(embedding="mixed", threshold=0, temperature=0.0).compressions(features) == {}
    assert list(TrainConfig(embedding="mixed", threshold=0).compressions(features)) == ["big", "middle"]


@pytest.mark.parametrize("embedding", EMBEDDINGS[1:])
@pytest.mark.parametrize("format", ["fp32", "int8"])
def test_full_tables_start_as_ever(embedding: str, format: str, data: Synthetic) -> None:
    """Uncompressed tables and the MLPs have the same initial values beside compressed tables."""
    options = PLAIN | {"threshold": 14, "temperature": 0.5, "format": format}  # 15 rows stay full for mixed only
    full, other = (build_model(TrainConfig(**options, embedding=kind), data) for kind in ("full", embedding))
    plain = [t.name for t in other.embeddings.tables if t.compression is None]
    names = [t.name for t in other.embeddings.tables]
    assert 0 < len(plain) < len(names)
    assert min(names.index(name) for name in plain) > 0  # some are after compressed ones
    for name in plain:
        one, two = (made.embeddings.embedding_bags[name].weight for made in (full, other))
        assert torch.equal(one, two)
    for one, two in ((full.bottom, other.bottom), (full.top, other.top)):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_skipped_numbers_are_drawn_in_pieces(data: Synthetic, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing skipped random numbers in pieces of any size gives the same initial weights."""
    config = TrainConfig(**PLAIN, embedding="hash", threshold=14)
    whole = build_model(config, data)
    monkeypatch.setattr(model, "_SKIP_CHUNK", 7)
    pieces = build_model(config, data)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), pieces.parameters(), strict=True))


def test_compressed_tables_have_streams_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compressed tables have separate random streams by table and seed; the generators of GPUs are not reseeded."""
    features = [Feature("apart", 300), Feature("common", 300, shared=True), Feature("plain", 75)]
    half = dict.fromkeys(("apart", "common"), rk.Hash(75))
    monkeypatch.setattr(torch, "manual_seed", None)  # would reseed every GPU
    weights = []
    for seed in (0, 1, 2):
        made = DLRM(features, 2, compressions=half, seed=seed)
        weights += [made.embeddings.embedding_bags["apart"].weight, made.embeddings.embedding_bags["common"].weight]
        weights.append(DLRM(features[2:], 2, seed=seed).embeddings.embedding_bags["plain"].weight)
    first = [round(abs(float(weight[0, 0] / weight.abs().max())), 6) for weight in weights]
    assert len(set(first)) == len(first)


def test_projections_are_dense_parameters(data: Synthetic) -> None:
    """Projections are trained by the MLPs' optimizer."""
    made = build_model(TrainConfig(**PLAIN, embedding="mixed", temperature=0.5), data)
    shapes = [tuple(p.shape) for p in made.dense_parameters()]
    narrow = [t.projection for t in made.embeddings.tables if t.projection]
    assert narrow
    assert all(shape in shapes for shape in narrow)
