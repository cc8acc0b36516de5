"""Philox4x32-10: a random word for every (seed, step, table, row, column).

Source: J. K. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF


def philox(counter: Sequence[Tensor], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the four words of each counter.

    Args:
        counter: four int64 tensors of values in [0, 2^32) that broadcast together, the lowest word first.
        seed: taken modulo 2^64; the key is (low 32, high 32).

    Returns:
        Four int64 tensors of the broadcast shape, values in [0, 2^32).
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    key0, key1 = seed & WORD, (seed >> 32) & WORD
    for _ in range(ROUNDS):
        # The int64 products may wrap to negative; masking the shifted product still gives the upper word.
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = ((product1 >> 32) & WORD) ^ c1 ^ key0, ((product0 >> 32) & WORD) ^ c3 ^ key1
        c1, c3 = product1 & WORD, product0 & WORD
        key0, key1 = (key0 + KEY_STEPS[0]) & WORD, (key1 + KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3


def row_words(seed: int, step: int, table: int, first_row: int, rows: int, columns: int, stream: int = 0) -> Tensor:
    """Computes the 32-bit word of every column of rows first_row, first_row + 1, ...

    The counter is (column / 4, row mod 2^32, table | stream << 16 | (row div 2^32) << 20, step mod 2^32); column uses
    word column mod 4.

    Args:
        seed: taken modulo 2^64.
        step: taken modulo 2^32.
        table: in [0, 2^16).
        first_row: row index in the whole table; every row is in [0, 2^44).
        rows, columns: N and D.
        stream: in [0, 16): 0 for weights, 1 and 2 for optimizer state, 3 and 4 for the row cache.

    Returns:
        int64 [N, D], values in [0, 2^32).

    Raises:
        ValueError: table, stream or a row exceeds its bits of the counter.
    """
    for name, value, end in (("table", table, 2**16), ("stream", stream, 2**4)):
        if not 0 <= value < end:
            raise ValueError(f"{name} must be in [0, {end}), got {value}")
    if not 0 <= first_row <= first_row + rows <= 2**44:
        raise ValueError(f"rows must be in [0, 2^44), got {rows} from {first_row}")
    row = torch.arange(first_row, first_row + rows)[:, None]
    block = torch.arange(-(-columns // 4))[None, :]
    place = table | stream << 16 | (row >> 32) << 20
    words = philox((block, row & WORD, place, torch.tensor(step & WORD)), seed)
    return torch.stack(words, dim=-1).flatten(1)[:, :columns]
