"""The list of cases, for a GPU or for a trial of the program."""

from __future__ import annotations

import torch

from bench.gpu import cases
from bench.gpu.dense_side import DenseSide
from bench.gpu.encoded import EncodedLookup
from bench.gpu.implementations import ONLY
from bench.gpu.jagged import Expand, Jagged
from bench.gpu.subjects import Case, EmbeddingBag, GroupedProjection, ScaleRows


def every_case(found: dict[str, object], memory: int, trial: bool = False) -> list[Case]:
    """All cases in the order of measurement; implementations take turns going first.

    Args:
        found: the implementations by name, as ``implementations.available`` gives them.
        memory: bytes of the device.
        trial: tiny ones, which need no GPU.
    """
    if trial:
        workloads, rows, groups = cases.TRIAL, [(5, 16)], [(5, [2, 4], 4)]
        interactions, samples, bags = [(5, 3, 4)], [(20, 16)], [(2, 20, 3)]
        encoded = cases.TRIAL_ENCODED
    else:
        workloads, rows, groups = cases.workloads(memory), [(2**20, 128), (2**22, 16)], cases.GROUPS
        interactions, samples, bags = cases.INTERACTIONS, cases.SAMPLES, cases.BAGS
        encoded = cases.ENCODED
    names = [name for name in found if name not in ONLY]
    last = [name for name in found if name in ONLY]
    turned = [names[i % len(names) :] + names[: i % len(names)] + last for i in range(len(workloads))]
    return [
        *(EmbeddingBag(w, {n: found[n] for n in order}) for w, order in zip(workloads, turned, strict=True)),
        *(EncodedLookup(encoded, format) for format in cases.FORMATS),
        *(ScaleRows(*size) for size in rows),
        *(GroupedProjection(*group) for group in groups),
        *(
            DenseSide(op, *size, dtype)
            for op in ("dot_interaction", "factorization_machine")
            for size in interactions
            for dtype in (torch.float32, torch.bfloat16)
        ),
        *(Expand(*size) for size in samples),
        *(Jagged(*size, fbgemm="fbgemm" in found) for size in bags),
    ]
