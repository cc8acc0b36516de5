"""Reference of jagged_overlaps: a dictionary keyed by each row's last ids, and list comparison of the candidates."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

ANCHOR, TRIES = 4, 8  # minimum overlap of two rows, maximum number of comparisons per row


def jagged_overlaps(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns values [stored] and starts [R]."""
    bounds, ids = offsets.tolist(), values.tolist()
    rows = [ids[a:b] for a, b in itertools.pairwise(bounds)]
    chains: list[list[int]] = []
    places: list[tuple[int, int]] = []  # per row: its chain, and its start in the chain
    latest: dict[tuple, int] = {}  # last ids -> latest row that ends with them
    for r, row in enumerate(rows):
        earlier, overlap = _find_predecessor(row, rows, chains, places, latest)
        if earlier is None:
            places.append((len(chains), 0))
            chains.append([])
        else:
            chain, start = places[earlier]
            places.append((chain, start + len(rows[earlier]) - overlap))
        chains[places[r][0]] += row[overlap:]
        if len(row) >= ANCHOR and (earlier is None or overlap < len(row)):
            latest[tuple(row[-ANCHOR:])] = r
    begins = list(itertools.accumulate(map(len, chains), initial=0))
    starts = [begins[chain] + start for chain, start in places]
    stored = list(itertools.chain.from_iterable(chains))
    return torch.tensor(stored, dtype=values.dtype), torch.tensor(starts, dtype=offsets.dtype)


def _find_predecessor(
    row: list[int],
    rows: list[list[int]],
    chains: list[list[int]],
    places: list[tuple[int, int]],
    latest: dict[tuple, int],
) -> tuple[int | None, int]:
    """Finds the earlier row with the longest suffix that is a prefix of ``row``, and the length of that overlap."""
    tries = 0
    for overlap in range(len(row), ANCHOR - 1, -1):
        earlier = latest.get(tuple(row[overlap - ANCHOR : overlap]))
        if earlier is None:
            continue
        chain, start = places[earlier]
        is_last = start + len(rows[earlier]) == len(chains[chain])
        if rows[earlier][-overlap:] == row[:overlap] and (is_last or overlap == len(row)):
            return earlier, overlap
        tries += 1
        if tries == TRIES:
            break
    return None, 0
