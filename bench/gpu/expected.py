"""Work of our kernels in every case of bench.gpu, the input of the model."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from bench.gpu.cases import ADAGRAD, ADAM, SGD, STATE_BYTES, bytes_moved, is_weighted, operations, shares
from bench.gpu.code_paths import Paths
from bench.gpu.dense_side import DenseSide
from bench.gpu.encoded import EncodedLookup
from bench.gpu.jagged import Expand, Jagged
from bench.gpu.machine_code import THREADS
from bench.gpu.model import ROW_OVERHEAD, WARP, Gpu, Work
from bench.gpu.subjects import Case, EmbeddingBag, GroupedProjection, ScaleRows
from bench.shapes import Workload

#: Factor of error in either direction: for kernels with analyzed machine code, and for all others.
READ, UNREAD = 1.4, 2.0
#: Bytes that the backward moves for an id besides rows and gradients, without its sort: 16 for the entry, 8 for the
#: starts of runs, and 4 for the list of long ones (csrc/embedding_bag/cuda/sort.cu); with weights, 8 more.
BOOKKEEPING = 28
#: Bits per pass of a sort.
SORT_BITS = 8
#: Bytes that sum_rows moves per index besides the gradient, and per pass of its sort: keys and positions of 4 bytes.
SUMMED, SUMMED_PASS = 64, 16
#: Entries of one row per partial sum: kChunk of csrc.
CHUNK = 64
#: Short bags that a group of lanes pools together: kShortBags of csrc.
SHORT_BAGS = 4
#: Runs of one row that a group of lanes looks up together, of rows of up to 256 columns and of wider ones: kRunsAhead
#: of csrc. It has several where there are more runs than lanes for them in the blocks that a GPU holds.
RUNS_AHEAD = (4, 2)
#: Occurrences of a row whose sums of chunks a group of lanes adds up: kMostOfGroup of csrc.
MOST_OF_GROUP = CHUNK * CHUNK
#: Share of the loop over gradients that is executed for aligned rows.
ALIGNED = 0.4
#: Ratio of an update's instruction time to that of its shortest path: for a row of 128 columns, an H200 executed 558
#: instructions instead of 408, and issued one in 72 % of the cycles.
TAKEN = 1.9
#: Microseconds on an H200, on top of a launch: the kernel that checks the layout; a pass of the sort; the kernels that
#: list entries and find runs, together.
START_US, SORT_PASS_US, RUNS_US = 5.0, 8.5, 20.0
FORMATS = {
    "fp32": "Fp32",
    "fp16": "Fp16",
    "bf16": "Bf16",
    "int8": "Affine<8>",
    "int4": "Affine<4>",
    "mx9": "SharedMicroexponents<7>",
    "mx4": "SharedMicroexponents<2>",
}
#: Formats whose lookups take half as many lanes for a row of up to 128 columns: kHalfTheLanes of csrc.
HALF_THE_LANES = ("int8", "int4", "mx9", "mx4")
TARGETS = {SGD: "UpdateTarget", ADAGRAD: "UpdateTarget", ADAM: "ElementwiseTarget<UpdateTarget>"}


@dataclass(frozen=True)
class Reuse:
    """Statistics of the rows of a batch, over all tables.

    Attributes:
        unique: distinct rows.
        repeats_cached: whether a row that is named again is still in the L2: of skewed ids.
        chunks: sums of CHUNK entries of rows that are named more often than that.
        hottest: entries of the row that is named most often.
    """

    unique: float
    repeats_cached: bool
    chunks: float = 0.0
    hottest: float = 1.0


@functools.cache
def reuse_of(w: Workload) -> Reuse:
    """Expected values, as if a bag could repeat ids."""
    drawn, upper = w.batch * w.bag, shares(w)
    if upper is None:
        return Reuse(-w.tables * w.rows * math.expm1(drawn * math.log1p(-1 / w.rows)), False)
    share = upper.diff(prepend=upper.new_zeros(1))
    # Bags have distinct rows, so no row has more entries than there are bags.
    entries = (drawn * share).clamp_(max=w.batch)
    unique = -(drawn * (-share).clamp_(min=-0.999).log1p()).expm1().sum().item()
    return Reuse(w.tables * unique, True, w.tables * (entries[entries > CHUNK] / CHUNK).sum().item(), entries[0].item())


def widths(dim: int) -> tuple[int, int]:
    """Lanes per row, and blocks of four columns per lane: with_widths of csrc/core/cuda/group.cuh."""
    lanes = 4
    while lanes < WARP and 4 * lanes < dim:
        lanes *= 2
    blocks = -(-dim // (4 * lanes))
    return lanes, blocks if blocks <= 2 else 4


def update_widths(dim: int, optimizer: str) -> tuple[int, int]:
    """Lanes and blocks per updated row: with_few_lanes of csrc/core/cuda/group.cuh."""
    most = 2 if optimizer == ADAM else 4  # blocks
    found = ((16, (4, 1)), (32, (4, 2)), (64, (8, 2)), (128, (32 // most, most)), (256, (64 // most, most)))
    return next((those for columns, those in found if dim <= columns), (32, 4))


def lookup_widths(dim: int, format: str) -> tuple[int, int]:
    """``widths`` of a lookup: with_lookup_widths of csrc/embedding_bag/cuda/pool_table.cu."""
    lanes, blocks = widths(dim)
    halves = format in HALF_THE_LANES and blocks == 1 and lanes > 4
    return (lanes // 2, 2) if halves else (lanes, blocks)


def always_weighted(format: str, blocks: int) -> bool:
    """True for lookups with one kernel for weighted and unweighted bags: kAlwaysWeighted of pool_table.cu."""
    return (blocks == 4 and format != "fp32") or (blocks == 2 and format.startswith("mx"))


def bags_together(w: Workload, format: str) -> int:
    """Number of bags per group of lanes: are_short of csrc/embedding_bag/cuda/pool_table.cu."""
    lanes, blocks = widths(w.dim)
    floats = format in ("fp32", "fp16", "bf16") and blocks == 1 and w.dim % 4 == 0
    return SHORT_BAGS if floats and w.bag <= min(lanes // SHORT_BAGS, 2) else 1


def pool(w: Workload, reuse: Reuse, kernels: Mapping[str, Paths], format: str = "fp32") -> list[Work]:
    """Work of a forward: checks the layout, then each group of lanes pools one bag or several short ones."""
    lanes, blocks = lookup_widths(w.dim, format)
    weighted, together = is_weighted(w), bags_together(w, format)
    if together > 1:
        code = kernels[f"pool_short_kernel<{FORMATS[format]}, {lanes}, {str(weighted).lower()}>"]
    else:
        weighted |= always_weighted(format, blocks)
        code = kernels[f"pool_kernel<{FORMATS[format]}, {lanes}, {blocks}, {str(weighted).lower()}>"]
    ids = w.bag * together
    fetched = [min(lanes, ids - first) for first in range(0, ids, lanes)]  # ids, by so many at once
    asked = sum(-(-ids // code.rows) for ids in fetched)
    # A round shrinks to four rows where fewer than four of its eight are left.
    step = min(4, code.rows)
    rounds = sum(-(-ids // step) * step / code.rows for ids in fetched)
    moved = bytes_moved(w, "forward", SGD, reuse.unique, format)
    rows = reuse.unique if reuse.repeats_cached else w.num_ids
    return [
        Work("start", fixed_us=START_US),
        Work(
            "pool",
            memory=moved["unique" if reuse.repeats_cached else "all"] + rows * ROW_OVERHEAD,
            cached=moved["all"] + w.num_ids * ROW_OVERHEAD,
            warps=w.tables * w.batch / together * lanes / WARP,
            instructions=code.before + rounds * code.round + code.after,
            waits=1 + len(fetched) + asked,
            blocks=code.blocks,
        ),
    ]


def backward(w: Workload, optimizer: str, reuse: Reuse, kernels: Mapping[str, Paths], gpu: Gpu) -> list[Work]:
    """Work of a fused update: entries, their sort, runs of equal rows, sums of long runs, and the update."""
    lanes, blocks = update_widths(w.dim, optimizer)
    short = kernels[f"finish_kernel<{lanes}, {blocks}, {TARGETS[optimizer]}>"]
    ids, row = w.num_ids, 4 * w.dim
    gradient = w.tables * w.batch * row
    bits = (w.tables * w.rows).bit_length()
    passes, key = -(-bits // SORT_BITS), 4 if bits <= 32 else 8
    entry = key + 4  # and its payload
    kept = 2 * ids * entry < gpu.l2_bytes  # data passed between kernels stays in the L2

    def stream(name: str, size: float, kernels: int, fixed_us: float = 0.0) -> Work:
        return Work(name, memory=0.0 if kept else size, cached=size, kernels=kernels, fixed_us=fixed_us)

    # Rows are updated table by table. A table's rows of the gradient are read again unless they stay in their half of
    # the L2; table rows have the other half.
    missed = max(0.0, 1 - gpu.l2_bytes / 2 * w.tables / gradient)
    gradient_rows = gradient / row + (ids - gradient / row) * missed if ids * row > gradient else ids
    update = 2 * reuse.unique * (row + STATE_BYTES[optimizer](w.dim) + ROW_OVERHEAD)
    of_run = (ids - reuse.chunks * CHUNK) / reuse.unique
    rounds = max(0.0, of_run - 1) / short.rows  # the first term of a run needs no lookup
    of_group = reuse.unique * lanes / (short.blocks * THREADS * gpu.multiprocessors)
    together = min(RUNS_AHEAD[lanes == WARP], max(1.0, of_group))
    finish = Work(
        "update",
        memory=gradient_rows * (row + ROW_OVERHEAD) + update,
        cached=ids * (row + ROW_OVERHEAD) + update,
        warps=reuse.unique * lanes / WARP,
        instructions=TAKEN * (short.before + short.ahead / together + rounds * ALIGNED * short.round + short.after),
        # Loads the ends and first entries of several runs together, then each run's gradient rows and the row itself.
        waits=(2 + is_weighted(w)) / together + 1 + rounds + 1,
        blocks=short.blocks,
    )
    return [
        Work("start", fixed_us=START_US),
        stream("bookkeeping", ids * (BOOKKEEPING + 8 * is_weighted(w)), kernels=4, fixed_us=RUNS_US),
        stream("sort", ids * (key + passes * 2 * entry), kernels=4 + 2 * passes, fixed_us=SORT_PASS_US * passes),
        *long_runs(w, reuse, kernels),
        finish,
        Work("advance"),
    ]


def long_runs(w: Workload, reuse: Reuse, kernels: Mapping[str, Paths]) -> list[Work]:
    """Work for runs longer than CHUNK entries: sums of chunks, and sums of these sums for the longest."""
    lanes, blocks = widths(w.dim)
    code = kernels[f"sum_chunks_kernel<{lanes}, {blocks}>"]
    rounds = CHUNK / code.rows
    sums = Work(
        "long runs",
        cached=reuse.chunks * CHUNK * 4 * w.dim,
        warps=reuse.chunks * lanes / WARP,
        instructions=code.before + rounds * ALIGNED * code.round + code.after,
        waits=3 + rounds,
        blocks=code.blocks,
    )
    launched, needed = w.num_ids > MOST_OF_GROUP, reuse.hottest > MOST_OF_GROUP
    return [sums, Work("sums of sums", kernels=int(launched), fixed_us=8.0 * needed)]


#: Tera-operations a second of Triton's products: FP32 without tensor cores, and bfloat16 with them.
FLOPS = {"float32": 25.0, "bfloat16": 200.0}


def of_bytes(
    name: str, moved: float, kernels: int, fixed_us: float = 0.0, flops: float = 0.0, dtype: str = "float32"
) -> list[Work]:
    """Work of kernels without machine code to read: bytes, launches and floating-point operations."""
    return [Work(name, memory=moved, kernels=kernels, fixed_us=fixed_us, flops=flops, flops_rate=FLOPS[dtype])]


def of_dense_side(case: DenseSide) -> dict[str, list[Work]]:
    """Work of the products of every sample's vectors; a backward has twice as many."""
    (batch, vectors, columns), about = case.sizes, case.about()
    tile = 1 << vectors.bit_length()  # of vectors, one more of dot_interaction
    flops = 2.0 * batch * columns * (tile * tile if case.op == "dot_interaction" else 2 * tile * 16)
    moved = case.moved()
    return {
        operation: of_bytes(case.op, size, 1 if operation == "forward" else 3, 0.0, flops * many, str(about["dtype"]))
        for (operation, size), many in zip(moved.items(), (1, 2), strict=True)
    }


def of_grouped(case: GroupedProjection) -> dict[str, list[Work]]:
    """Work of the products with each group's matrix."""
    flops = 2.0 * case.batch * case.out_dim * sum(case.in_dims)
    moved = case.moved()
    return {
        "forward": of_bytes("projection", moved["forward"], 1, flops=flops),
        "backward": of_bytes("projection", moved["backward"], 3, flops=2 * flops),
    }


def of_scaled(case: ScaleRows) -> dict[str, list[Work]]:
    """Work of scale_rows: one kernel forward, and one per gradient backward."""
    return {op: of_bytes("rows", size, 1 + (op == "backward")) for op, size in case.moved().items()}


def of_expand(case: Expand) -> dict[str, list[Work]]:
    """Work of expand: copies rows; backward sorts ids and sums rows in their order."""
    moved = case.moved()
    passes = -(-case.distinct.bit_length() // SORT_BITS)
    sorted_bytes = case.samples * (SUMMED + passes * SUMMED_PASS)
    backward = of_bytes("sums", moved["backward"]["all"] + sorted_bytes, 7 + passes, fixed_us=3.0 * passes)
    return {"forward": of_bytes("rows", moved["forward"]["unique"], 2), "backward": backward}


#: Launches of the ops on jagged rows.
LAUNCHES = {"dedup": 10, "select": 5, "windows": 5, "permute": 7, "bucketize": 6}


def of_jagged(case: Jagged) -> dict[str, list[Work]]:
    """Work of each jagged op: launches and bytes."""
    return {op: of_bytes(op, size["all"], LAUNCHES[op]) for op, size in case.moved().items()}


def of_lookup(w: Workload, kernels: Mapping[str, Paths], gpu: Gpu) -> dict[str, list[Work]]:
    """Work of every timed operation with every optimizer."""
    reuse, found = reuse_of(w), {}
    forward = pool(w, reuse, kernels)
    for optimizer, timed in operations(w).items():
        update = backward(w, optimizer, reuse, kernels, gpu)
        works = {"forward": forward, "backward": update, "step": forward + update}
        for operation in timed:
            found[operation if operation == "forward" else f"{operation}, {optimizer}"] = works[operation]
    return found


def works_of(case: Case, kernels: Mapping[str, Paths], gpu: Gpu) -> tuple[dict[str, list[Work]], float]:
    """Work of our kernels for each operation of a case, by the report's names, and the expected error."""
    if isinstance(case, EmbeddingBag):
        return of_lookup(case.workload, kernels, gpu), READ
    if isinstance(case, EncodedLookup):
        return {"forward": pool(case.workload, reuse_of(case.workload), kernels, case.format)}, READ
    if isinstance(case, DenseSide):
        return of_dense_side(case), UNREAD
    if isinstance(case, GroupedProjection):
        return of_grouped(case), UNREAD
    if isinstance(case, ScaleRows):
        return of_scaled(case), UNREAD
    if isinstance(case, Expand):
        return of_expand(case), UNREAD
    if isinstance(case, Jagged):
        return of_jagged(case), UNREAD
    raise TypeError(f"no prediction for {case.name}")


def bytes_of(case: Case, operation: str) -> dict[str, float]:
    """Bytes by both counts, which the report divides by the time."""
    if isinstance(case, (EmbeddingBag, EncodedLookup)):
        name, _, optimizer = operation.partition(", ")
        w = case.workload
        return bytes_moved(w, name, optimizer or SGD, reuse_of(w).unique, getattr(case, "format", "fp32"))
    moved = case.moved()[operation]
    return moved if isinstance(moved, dict) else {"all": moved, "unique": moved}
