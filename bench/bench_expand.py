"""expand compared with torch's indexing and index_select, forward and with the gradient."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

import rec_kernels as rk
from bench.cases import INPUTS, Case, Way, op_case, trained_case

SESSION = 9.4  # samples of a distinct row


def cases() -> Iterator[Case]:
    """Yields the cases: M samples of M / 9.4 distinct rows of D columns, in sessions of neighbours or in random order.

    Bytes: what is written, and read for it; the gradient reads as many again.
    """
    for samples, columns, order in itertools.product((2048, 65536), (64, 128), ("clustered", "shuffled")):
        distinct = int(samples / SESSION)
        inverse = torch.arange(samples) * distinct // samples
        inverse = inverse if order == "clustered" else inverse[torch.randperm(samples)]
        given = [(torch.randn(distinct, columns, requires_grad=True), inverse) for _ in range(INPUTS)]
        ways = {
            "ours": Way(rk.expand, given),
            "indexing": Way(lambda x, inverse: x[inverse], given),
            "index_select": Way(lambda x, inverse: x.index_select(0, inverse), given),
        }
        copy = Way(Tensor.clone, [(torch.randn(samples, columns),)] * INPUTS)
        size = f"{samples} x {columns}, {order}"
        yield op_case(f"expand {size}", ways | {"copy": copy}, 8 * samples * columns)
        yield trained_case(f"expand, trained, {size}", ways, 12 * samples * columns)
