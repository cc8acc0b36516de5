"""The benchmark of narrow rows for rare ids: it reads ratings, trains both kinds of tables, and says what came out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from bench.studies import collaborative_filtering


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Ratings that users and movies decide are learned; parameters are those of the tables and matrices."""
    generator = torch.Generator().manual_seed(0)
    users, movies = torch.randn(30, 1, generator=generator), torch.randn(20, 1, generator=generator)
    lines = ["userId,movieId,rating,timestamp"]
    for u in range(30):
        for m in range(0 if u % 3 else 5, 20):  # some movies are rated more often
            stars = (3 + float(users[u] + movies[m])) * 2
            lines.append(f"{u + 1},{m + 1},{min(max(round(stars), 1), 10) / 2},{1000 * u + m}")
    (tmp_path / "ratings.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "movies.csv").write_text("movieId,title,genres\n1,One (1999),Drama\n")
    output = tmp_path / "runs.json"
    flags = ["--dims", "4", "--width", "4", "--blocks", "2", "--temperatures", "1.0", "--seeds", "2", "--epochs", "20"]
    flags += ["--batch-size", "50"]
    command = ["x", "--path", str(tmp_path), *flags, "--output", str(output)]
    monkeypatch.setattr(sys, "argv", command)
    threads = torch.get_num_threads()
    try:
        collaborative_filtering.main()
    finally:
        torch.set_num_threads(threads)
    table = capsys.readouterr().out.splitlines()
    assert table[2].startswith("| uniform 4 | 200 |")
    assert table[3].startswith("| blocks, temperature 1 |")
    runs = json.loads(output.read_text())["runs"]
    assert [(r["kind"], r["seed"]) for r in runs] == [("uniform", 0), ("uniform", 1), ("blocks", 0), ("blocks", 1)]
    ratings = collaborative_filtering.Ratings(tmp_path)
    assert ratings.sizes == [30, 20]
    assert ratings.is_test.sum() == sum((20 if u % 3 else 15) // 10 for u in range(30))
    constant = float((ratings.values[ratings.is_test] - ratings.mean).square().mean())
    assert all(r["test_mse"] < 0.8 * constant for r in runs), (runs, constant)
