"""Writes two tables and their layout for call_op.cpp, and prints its expected output.

python examples/cpp/save_tables.py tables.pt
"""

from __future__ import annotations

import sys

import torch

import rec_kernels as rk

BAGS = torch.tensor([3, 1, 4, 1, 5, 9]), torch.tensor([0, 2, 2, 6, 6])


def main(path: str) -> None:
    """Runs the command line."""
    layout, sizes = rk.table_layout([10, 10], [4, 2], mean=[True, False])
    weights = torch.arange(60.0).div(8)  # both tables, concatenated
    torch.save((weights, layout, torch.tensor(sizes)), path)
    print(torch.ops.rec_kernels.embedding_bag.layout(weights, *BAGS, layout, sizes)[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
