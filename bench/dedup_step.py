"""Measures what whole-bag deduplication saves and costs in a training step, on the same batches with and without it.

history     Complete Journey, for several lengths of the longest history and sizes of the batch
break-even  synthetic sessions, whose ids repeat more and more often: from which factor on it pays

dedup       the reader's stage: equal bags are found and kept once; the trainer has it on the reader's thread
embedding   lookup, backward and fused row-wise Adagrad of the history's table alone
step        all of a training step of the trainer's default model; its batch is there already

Both ways have a model of their own, from the same initial weights, and take turns. Times are medians.
"""

from __future__ import annotations

import argparse
import itertools
import statistics

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

import bench
import rec_kernels as rk
from bench import RESULTS
from bench.script import options_of, parser_of, positive, write_result
from bench.timing import take_turns
from rec_kernels.dlrm import DLRM, Batch, DataSet, load_completejourney
from rec_kernels.dlrm.completejourney import HISTORY
from rec_kernels.dlrm.reader import dedup_batch
from rec_kernels.dlrm.synthetic import Synthetic

WAYS = ("without", "with")
HISTORIES, BATCHES = (10, 50, 100, 200), (2048, 8192, 65536)
FACTORS, EVEN_BATCHES = (1.0, 1.1, 1.2, 1.5, 2.0, 4.0), (2048, 8192)
SESSION, EVEN_HISTORY, EVEN_ROWS = 9, 50, 100_000  # rows of a session, ids of a history, rows of a table
INPUTS = 4  # batches that every way cycles through


class Way:
    """A model, a table, and batches in the representation of one of ``WAYS``."""

    def __init__(self, data: DataSet, batches: list[Batch], dim: int):
        self.batches, self.joined = batches, [batch.joined() for batch in batches]
        self.model = DLRM(data.features, data.num_dense, embedding_dim=dim)
        self.optimizer = torch.optim.Adam(self.model.dense_parameters(), lr=0.001, fused=True)
        (history,) = (f for f in data.features if f.name == HISTORY)
        table = rk.EmbeddingBagConfig(
            history.num_embeddings, dim, name=HISTORY, feature_names=[HISTORY], pooling=history.pooling
        )
        torch.manual_seed(0)
        self.table = rk.EmbeddingBagCollection([table], optimizer=rk.RowwiseAdagrad(lr=0.05))
        self.gradient = torch.randn(max(len(batch.label) for batch in batches), dim) / 1000

    def embedding(self, number: int) -> None:
        """Runs lookup, backward and update of the history alone."""
        batch = self.batches[number]
        self.table(batch.shared).values().backward(self.gradient[: len(batch.label)])

    def step(self, number: int) -> None:
        """Runs a training step."""
        batch = self.joined[number]
        loss = binary_cross_entropy_with_logits(self.model(batch), batch.label)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def num_bytes(shared: rk.KeyedJaggedTensor | rk.InverseKeyedJaggedTensor) -> int:
    """Bytes of ids, offsets and inverse indices."""
    # Sums over all tensors of the containers, which are pytrees.
    return sum(t.nbytes for t in tree_leaves(shared) if t is not None)


def some_batches(data: DataSet, size: int) -> list[Batch]:
    """Returns ``INPUTS`` full batches spread over the whole training, since histories are short at its beginning."""
    full = max(data.num_rows("train") // size, 1)
    numbers = [full * (2 * i + 1) // (2 * INPUTS) for i in range(INPUTS)]
    return [next(data.batches("train", size, number)) for number in numbers]


def measure(data: DataSet, size: int, dim: int, turns: int, seconds: float) -> dict:
    """All figures of one data set and batch size."""
    plain = some_batches(data, size)
    made = [dedup_batch(batch) for batch in plain]
    ways = {"without": Way(data, plain, dim), "with": Way(data, made, dim)}
    check(*ways.values())
    before = sum(len(batch.shared.values()) for batch in plain)
    stored = sum(batch.shared.num_stored([HISTORY]) for batch in made)
    result = {
        "rows": len(plain[0].label),
        "ids_per_row": before / sum(len(batch.label) for batch in plain),
        "factor": before / stored,
        "bytes": {name: sum(num_bytes(b.shared) for b in way.batches) / INPUTS for name, way in ways.items()},
        "dedup_ms": times({"dedup": lambda i: dedup_batch(plain[i])}, turns, seconds)["dedup"],
    }
    for part in ("embedding", "step"):
        result[f"{part}_ms"] = times({name: getattr(way, part) for name, way in ways.items()}, turns, seconds)
    rows = result["rows"]
    result["examples_per_second"] = {name: rows / ms["median"] * 1000 for name, ms in result["step_ms"].items()}
    return result


def check(without: Way, with_: Way) -> None:
    """Exits unless both ways give the same bits before the first update."""
    with torch.no_grad():
        for one, other in zip(without.batches, with_.batches, strict=True):
            if not torch.equal(without.model(one), with_.model(other)):
                raise SystemExit("error: logits with and without deduplication differ: nothing was measured")


def times(functions: dict, turns: int, seconds: float) -> dict[str, dict]:
    """Returns median, first and last decile in milliseconds, and the number of calls."""
    found = {}
    for name, calls in take_turns(functions, INPUTS, turns=turns, seconds=seconds).items():
        milliseconds = [1000 * call for call in calls]
        deciles = statistics.quantiles(milliseconds, n=10)
        found[name] = {"median": statistics.median(milliseconds), "low": deciles[0], "high": deciles[-1]}
        found[name]["calls"] = len(calls)
    return found


def unchanged(factor: float) -> float:
    """The probability with which the ids of sessions of ``SESSION`` rows repeat ``factor`` times."""
    return 1 - (SESSION / factor - 1) / (SESSION - 1)


def cases(options: argparse.Namespace) -> list[dict]:
    """Returns all figures by name."""
    common = (options.embedding_dim, options.turns, options.seconds)
    results = []
    todo = list(itertools.product(*((10, 50), (256,)) if options.quick else (HISTORIES, BATCHES)))
    for history, size in tqdm(todo, desc="history"):
        data = load_completejourney(options.weeks, options.data_dir, history=history)
        results.append({"data": "completejourney", "history": history} | measure(data, size, *common))
    todo = [] if options.quick else list(itertools.product(FACTORS, EVEN_BATCHES))
    for factor, size in tqdm(todo, desc="break-even"):
        sessions = {"samples_per_session": SESSION, "unchanged": unchanged(factor), "history": EVEN_HISTORY}
        data = Synthetic(rows=16 * size, table_rows=EVEN_ROWS, **sessions)
        results.append({"data": "synthetic", "history": EVEN_HISTORY} | measure(data, size, *common))
    return results


def table(results: list[dict]) -> str:
    """The results as Markdown; ratios in parentheses are without over with deduplication."""
    heads = ["data", "history", "batch", "ids per row", "factor", "MB, without", "MB, with", "dedup, ms"]
    heads += ["embedding, ms, without", "with", "step, ms, without", "with", "examples/s, without", "with"]
    lines = []
    for r in results:
        cells = [r["data"], r["history"], f"{r['rows']:,}", f"{r['ids_per_row']:.1f}", f"{r['factor']:.2f}"]
        cells += [f"{r['bytes'][way] / 1e6:.2f}" for way in WAYS]
        cells.append(f"{r['dedup_ms']['median']:.2f}")
        for part in ("embedding_ms", "step_ms"):
            without, with_ = (r[part][way]["median"] for way in WAYS)
            cells += [f"{without:.2f}", f"{with_:.2f} ({without / with_:.2f}x)"]
        cells += [f"{r['examples_per_second'][way]:,.0f}" for way in WAYS]
        lines.append(cells)
    return bench.table(heads, lines)


def main() -> None:
    parser = parser_of(__doc__, "dedup_step.json", data=True)
    parser.add_argument("--embedding-dim", type=positive, default=64, help="columns of every table (default: 64)")
    parser.add_argument("--turns", type=positive, default=8, help="turns of each way (default: 8)")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn, at the least (default: 0.5)")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it runs: its figures mean nothing")
    options = options_of(parser)
    if options.quick:
        options.weeks, options.turns, options.seconds = 3, 2, 0.0
    results = cases(options)
    print(table(results))
    if options.quick and options.output == RESULTS / "dedup_step.json":
        return
    write_result(options, ("embedding_dim", "turns", "seconds", "weeks"), results)


if __name__ == "__main__":
    main()
