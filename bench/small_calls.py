"""Small calls, where Python and autograd take longer than the kernels: microseconds, with torch's and FBGEMM's.

``python -m bench.small_calls``: one thread; the implementations of a case take turns. It writes the median of all
calls, and the ratio to torch's. "no grad": no argument requires a gradient, but grad mode is enabled, as in inference
without no_grad; "under no_grad" also disables grad mode.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

import bench
import rec_kernels as rk
from bench.peers import available
from bench.script import machine, parser_of, positive
from bench.shapes import Workload
from bench.timing import take_turns

#: One id in each of 26 tables.
TABLES = Workload("26 tables", 26, 1, 10_000, 16, 1)
Case = dict[str, Callable[[int], object]]


def scale_rows(requires_grad: bool) -> Case:
    """Times scale_rows and a torch multiplication of the same values."""
    x, scale = torch.randn(8, 16, requires_grad=requires_grad), torch.randn(8)
    column = scale[:, None]
    return {"ours": lambda _: rk.scale_rows(x, scale), "torch": lambda _: torch.mul(x, column)}


def one_table(requires_grad: bool) -> Case:
    """Eight ids in four bags of one table, D = 16."""
    weight = torch.randn(1000, 16, requires_grad=requires_grad)
    ids, offsets = torch.arange(8) * 100, torch.arange(4) * 2
    theirs = torch.nn.functional.embedding_bag
    return {
        "ours": lambda _: rk.embedding_bag(ids, weight, offsets, mode="sum"),
        "torch": lambda _: theirs(ids, weight, offsets, mode="sum"),
    }


def lookups(gradients: bool) -> Case:
    """One id in each of 26 tables: a collection, torch's function 26 times, FBGEMM's module."""
    ids = TABLES.ids(0)

    def call(forward: Callable[[Tensor], object]) -> Callable[[int], object]:
        def called(_: int) -> object:
            with torch.set_grad_enabled(gradients):
                return forward(ids)

        return called

    return {name: call(peer(TABLES).forward) for name, peer in peers().items()}


def steps() -> Case:
    """Times the case's lookup with its backward and the update of the rows."""
    ids, grad = TABLES.ids(0), torch.randn(1, TABLES.tables * TABLES.dim)
    made = {name: peer(TABLES) for name, peer in peers().items()}
    return {name: lambda _, train=each.train: train(ids, grad) for name, each in made.items()}


def peers() -> dict[str, type]:
    """name -> implementation; without huge pages, which do not affect small calls."""
    return {name: peer for name, peer in available().items() if "," not in name}


CASES: dict[str, Callable[[], Case]] = {
    "scale_rows, no grad": lambda: scale_rows(False),
    "scale_rows, x requires grad": lambda: scale_rows(True),
    "one table, no grad": lambda: one_table(False),
    "one table, weight requires grad": lambda: one_table(True),
    "26 tables, under no_grad": lambda: lookups(False),
    "26 tables, gradients": lambda: lookups(True),
    "26 tables, step": steps,
}


def measure(case: Case, turns: int, seconds: float) -> dict[str, float]:
    """Implementation -> median, in microseconds."""
    found = take_turns(case, 1, turns=turns, seconds=seconds)
    return {name: round(statistics.median(calls) * 1e6, 2) for name, calls in found.items()}


def main() -> None:
    parser = parser_of(__doc__, "small_calls.json")
    parser.add_argument("--turns", type=positive, default=10, help="how often each implementation has its turn (10)")
    parser.add_argument("--seconds", type=float, default=0.1, help="how long a turn lasts (0.1)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name, case in CASES.items():
        found[name] = measure(case(), arguments.turns, arguments.seconds)
        ratio = found[name]["ours"] / found[name]["torch"]
        figures = "  ".join(f"{who} {time:7.2f} us" for who, time in found[name].items())
        print(f"{name:<32} {figures}  ours / torch {ratio:.2f}", flush=True)
    bench.save({"machine": machine(), "threads": 1, "microseconds": found}, arguments.output)


if __name__ == "__main__":
    main()
