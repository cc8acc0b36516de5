"""Cases of the row cache: tables, sets and batches; the ops' tensors, and the reference model of the same state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from embedding_bag_cases import Case, make_case, wide_floats
from embedding_bag_format_cases import ROUNDINGS, SEED, EncodedCase
from hypothesis import strategies as st
from layout_calls import padding_of
from torch import Tensor

import rec_kernels as rk
from rec_kernels.ops.autograd import signature_of
from rec_kernels.reference.embedding_bag import Bags, Parts
from rec_kernels.reference.row_cache import POLICIES, Row, RowCache, Sets, Table, named_rows
from rec_kernels.testing import same_bits

FORMATS = ["fp32", "bf16", "int8", "int4", "mx6"]
UNUSED = -77.25  # initial value of cache floats that belong to no row
INTS = {32: torch.int32, 64: torch.int64}
State = dict[str, Tensor]  # tensors that the ops change, by argument name


@dataclass(frozen=True)
class Batch:
    """Lengths of each feature's bags; the last ids are the ``bad`` ones; ``unused`` ids before and after all bags."""

    lengths: list[list[int]]
    bad: list[int] = field(default_factory=list)
    unused: tuple[int, int] = (0, 0)
    seed: int = 0


@dataclass(frozen=True)
class Update:
    """New values for about half of the cached rows, as written by an update."""

    seed: int


@dataclass(frozen=True)
class Action:
    """An action, "insert", "lookup", "update" or "flush", and its argument."""

    name: str
    given: Batch | Update | None = None


@dataclass(frozen=True)
class CacheSample:
    """A cache before its first batch. ``seed`` determines the tables' values and the rows' counts.

    ``sets`` belong to a width, and its tables share them; a table of another width, or in ``uncached``, has none.
    """

    tables: list[tuple[int, int, str]]  # (E, D, format)
    features: list[tuple[int | Parts, str]]  # (table or parts, pooling)
    sets: dict[int, int]  # width -> number of sets
    ways: int = 2
    uncached: tuple[int, ...] = ()
    policy: str = "lru"
    rounding: str = "nearest"
    decay_every: int = 0
    padding_idx: int | list[int] = -1
    bounds_check: str = "error"
    ids: int = 64
    offsets: int = 64
    gap: int = 0  # unused sets before each range, and three times as many unused floats before its rows
    clock: int = 0
    seed: int = 0


class CacheCase:
    """The ops' arguments for a sample, and the model of its state."""

    def __init__(self, sample: CacheSample) -> None:
        self.sample = sample
        case = self.batch(Batch([[] for _ in sample.features]))
        self.encoded = EncodedCase(case, [format for _, _, format in sample.tables])
        self.ranges: dict[int, Sets] = {}
        self.float_starts: dict[int, int] = {}  # of a width's first slot
        self.num_sets, self.num_floats = 0, 0
        for width, count in sample.sets.items():
            self.ranges[width] = Sets(self.num_sets + sample.gap, count)
            self.float_starts[width] = self.num_floats + 3 * sample.gap
            self.num_sets += sample.gap + count
            self.num_floats = self.float_starts[width] + count * sample.ways * width

    def batch(self, batch: Batch) -> Case:
        """Ids and bags of the call, for tables of floats."""
        s = self.sample
        case = make_case(
            [(rows, dim) for rows, dim, _ in s.tables],
            [feature for feature, _ in s.features],
            [n for bags in batch.lengths for n in bags],
            mean=[pooling == "mean" for _, pooling in s.features],
            ids_dtype=INTS[s.ids],
            offsets_dtype=INTS[s.offsets],
            padding_idx=s.padding_idx,
            unused=batch.unused,
            seed=s.seed + 7919 * batch.seed,
        )
        end = int(case.offsets[-1])
        bad = torch.tensor(batch.bad, dtype=case.values.dtype)[: end - int(case.offsets[0])]
        case.values[end - len(bad) : end] = bad
        # Tables depend only on the sample.
        return dataclasses.replace(case, seed=s.seed)

    def sets_of(self, table: int) -> Sets | None:
        """The range of sets of a table, if it is cached."""
        return None if table in self.sample.uncached else self.ranges.get(self.sample.tables[table][1])

    def table_id(self, table: int) -> int:
        """Number of the table for its noise; it differs from the table's index in the call."""
        return 3 + 2 * ((table + 1) % len(self.sample.tables))

    @functools.cached_property
    def row_counts(self) -> list[int]:
        """Counts of all linear rows before the first batch, small ones more often."""
        g = torch.Generator().manual_seed(self.sample.seed + 5)
        largest = torch.tensor([4, 20, 60, 256])[torch.randint(4, (len(self.encoded.case.sum),), generator=g)]
        return (torch.rand(len(largest), generator=g) * largest).long().tolist()

    def model(self) -> RowCache:
        """The reference before the first batch."""
        s, views = self.sample, self.encoded.split(self.encoded.flat.clone())
        first_rows = self.encoded.case.first_rows
        tables = [
            Table(views[t], format, dim, first_rows[t], self.table_id(t), self.sets_of(t))
            for t, (_, dim, format) in enumerate(s.tables)
        ]
        options = {"decay_every": s.decay_every, "clock": s.clock, "row_counts": list(self.row_counts)}
        return RowCache(tables, self.num_sets, s.ways, s.policy, s.rounding, SEED, **options)

    def named(self, case: Case) -> list[Row | None]:
        """The rows selected by the ids of a batch."""
        bags = Bags(case.values, case.offsets, None, case.padding_idx)
        return named_rows(case.features, [rows for rows, _ in case.tables], bags)

    def layout(self, **changed: object) -> rk.TableLayout:
        """Layout of the tables and sets; ``changed``: arguments of ``rk.table_layout``, or of places as "cache_..."."""
        s, case = self.sample, self.encoded.case
        of_parts = [(self.sets_of(t) or Sets(0, 0), s.tables[t][1]) for t in case.parts]
        starts = [
            self.float_starts[dim] - sets.first * s.ways * dim if sets.count else 0
            for sets, dim in of_parts  # position of slot 0, if it were of that width
        ]
        places = {
            "ways": s.ways,
            "sets": [sets.count for sets, _ in of_parts],
            "first_sets": [sets.first for sets, _ in of_parts],
            "row_offsets": starts,
        }
        places |= {name: changed.pop(f"cache_{name}") for name in places if f"cache_{name}" in changed}
        ids = {"table_ids": [self.table_id(t) for t in case.parts]}
        ids["padding_idx"] = padding_of(s.padding_idx, limits_of(case))
        return layout_of(self.encoded, **({"cache": rk.CachePlaces(**places)} | ids | changed))

    @functools.cached_property
    def arguments(self) -> dict[str, object]:
        """Arguments that the ops do not change, without the bags."""
        s = self.sample
        options = {"policy": s.policy, "decay_every": s.decay_every, "rounding": s.rounding}
        options |= {"bounds_check": s.bounds_check, "seed": torch.tensor(SEED)}
        return self.layout()._asdict() | options

    @property
    def first_stats(self) -> Tensor:
        """int64 [tables, 6] before the first batch; rows beyond the number of tables stay unchanged."""
        return torch.arange(6 * (4 + 2 * len(self.sample.tables))).view(-1, 6) * 1000

    def state(self, model: RowCache | None = None) -> State:
        """The tensors that the ops change, in the model's state; None: before the first batch."""
        model = model or self.model()
        slots, flat = model.slots, self.encoded.flat.clone()
        for view, table in zip(self.encoded.split(flat), model.tables, strict=True):
            view.copy_(table.rows)
        rows, stats = torch.full((self.num_floats,), UNUSED), self.first_stats
        for s, slot in enumerate(slots):
            if slot.values is not None:
                rows[self.place(s, len(slot.values))] = slot.values
        for t, of_table in enumerate(model.stats):
            stats[self.table_id(t)] += torch.tensor(dataclasses.astuple(of_table))
        state = {
            "weights": flat,
            "cache_rows": rows,
            "cache_tags": torch.tensor([slot.tag for slot in slots], dtype=torch.int64),
            "cache_marks": torch.tensor([slot.mark for slot in slots], dtype=torch.uint8),
            "cache_stamps": torch.tensor([slot.stamp for slot in slots], dtype=torch.int64),
            "cache_dirty": torch.tensor([slot.dirty for slot in slots], dtype=torch.uint8),
            "cache_clock": torch.tensor(model.clock),
            "cache_stats": stats,
        }
        if model.policy == "lfu":
            state["cache_counts"] = torch.tensor([slot.count for slot in slots], dtype=torch.uint8)
            state["row_counts"] = torch.tensor(model.row_counts, dtype=torch.uint8)
        return state

    def place(self, slot: int, width: int) -> slice:
        """Position of a slot's row in ``cache_rows``."""
        start = self.float_starts[width] + (slot - self.ranges[width].first * self.sample.ways) * width
        return slice(start, start + width)

    def differing(self, found: State, expected: State) -> list[str]:
        """Names of the tensors that differ; payloads of float NaN may."""
        found, expected = normalized(found), normalized(expected)
        names = [name for name in expected if name != "weights" and not same_bits(found[name], expected[name])]
        same = self.encoded.same_tables(found["weights"], expected["weights"])
        return names if same else ["weights", *names]


def layout_of(encoded: EncodedCase, **changed: object) -> rk.TableLayout:
    """The layout of a case; ``changed``: other arguments of ``rk.table_layout``."""
    starts = [encoded.starts[t] for t in encoded.case.parts]
    formats = [encoded.formats[t] for t in encoded.case.parts]
    return layout_of_floats(encoded.case, **({"weight_offsets": starts, "formats": formats} | changed))


def limits_of(case: Case) -> list[int]:
    """Number of ids of each feature."""
    return [f.num_ids if isinstance(f, Parts) else case.tables[f][0] for f in case.features]


def layout_of_floats(case: Case, **changed: object) -> rk.TableLayout:
    """The layout of a case's float tables."""
    numbers = {
        "num_embeddings": [case.tables[t][0] for t in case.parts],
        "embedding_dims": [case.tables[t][1] for t in case.parts],
        "weight_offsets": [case.starts[t] for t in case.parts],
        "row_offsets": [case.first_rows[t] for t in case.parts],
        "mean": case.mean,
        "num_rows": len(case.sum),
    }
    numbers["padding_idx"] = padding_of(case.padding_idx, limits_of(case))
    if any(isinstance(f, Parts) for f in case.features):
        numbers["partitions"] = rk.IdPartitions(*case.partitions().values())
    return rk.table_layout(**(numbers | changed))


def normalized(state: State) -> State:
    """Normalizes counts of empty slots, and row counts of cached rows, which are undefined."""
    state = dict(state)
    if "cache_counts" in state:
        used = state["cache_tags"] >= 0
        state["cache_counts"] = torch.where(used, state["cache_counts"], 0)
        state["row_counts"] = state["row_counts"].clone()
        state["row_counts"][state["cache_tags"][used]] = state["cache_counts"][used]
    return state


def argument_names(op: str) -> list[str]:
    """Argument names of an op with a layout."""
    return list(signature_of(f"{op}.layout"))


def call(op: str, given: dict[str, object], ops: object = torch.ops.rec_kernels) -> object:
    """Calls an op with the arguments in its schema."""
    return getattr(ops, op)(**{name: given[name] for name in argument_names(op) if name in given})


@dataclass
class Done:
    """An action and its results: slots (of "insert" and "lookup"), the state, numbers of cached and dirty rows."""

    action: Action
    slots: list[int] | None
    state: State
    cached_and_dirty: list[list[int]]
    writes: list[tuple[int, Tensor]]  # slots and their new rows, of "update"


def expected_of(case: CacheCase, actions: Sequence[Action], model: RowCache | None = None) -> list[Done]:
    """The reference's results for a sequence of actions."""
    model, done = model or case.model(), []
    for action in actions:
        slots, writes = None, []
        if action.name in ("insert", "lookup"):
            slots = getattr(model, action.name)(case.named(case.batch(action.given)))
        elif action.name == "update":
            writes = update(model, action.given)
        else:
            model.flush()
        cached_and_dirty = [list(model.cached_counts(t)) for t in case.encoded.case.parts]
        done.append(Done(action, slots, case.state(model), cached_and_dirty, writes))
    return done


def update(model: RowCache, given: Update) -> list[tuple[int, Tensor]]:
    """Changes values of cached rows; returns them by slot."""
    g, writes = torch.Generator().manual_seed(given.seed), []
    for s, slot in enumerate(model.slots):
        if slot.tag >= 0 and torch.rand((), generator=g) < 0.5:
            numbers = wide_floats(len(slot.values), seed=given.seed + s)
            model.write(model.row_in(s), numbers, step=0)
            writes.append((s, numbers))
    return writes


def apply(case: CacheCase, done: Done, state: State, ops: object) -> list[int] | None:
    """Applies an action with the ops: changes the state, returns slots."""
    given = case.arguments | state
    if done.action.name == "flush":
        call("row_cache_flush_", given, ops)
    if done.action.name == "update":
        for slot, numbers in done.writes:
            state["cache_rows"][case.place(slot, len(numbers))] = numbers
            state["cache_dirty"][slot] = 1
    if done.action.name not in ("insert", "lookup"):
        return None
    batch = case.batch(done.action.given)
    op = {"insert": "row_cache_insert_", "lookup": "row_cache_lookup"}[done.action.name]
    return call(op, given | {"values": batch.values, "offsets": batch.offsets}, ops).tolist()


ROWS = st.integers(1, 8) | st.integers(1, 60)
WIDTHS = [1, 4, 5, 16, 33]


@st.composite
def batches(draw, sample: CacheSample) -> Batch:
    """Bags of a few ids, some out of range if allowed; sometimes no ids at all."""
    size = draw(st.sampled_from([0, 1, 2, 4]))
    bags = st.lists(st.sampled_from([0, 1, 2, 5]), min_size=size, max_size=size)
    bad = st.sampled_from([-1, 61, 1000, -(2**31), 2**31 - 1])
    return Batch(
        [draw(bags) for _ in sample.features],
        bad=draw(st.lists(bad, max_size=3)) if sample.bounds_check == "ignore" else [],
        unused=draw(st.sampled_from([(0, 0), (0, 0), (2, 3)])),
        seed=draw(st.integers(0, 2**10)),
    )


@st.composite
def features_of(draw, tables: list[tuple[int, int, str]], uncached: list[int]) -> list[tuple[int | Parts, str]]:
    """Up to five features: of a table, hashed to a table, or partitioned over two uncached tables."""
    features, pooling = [], st.sampled_from(["sum", "mean"])
    for _ in range(draw(st.integers(1, 5))):
        table = draw(st.integers(0, len(tables) - 1))
        feature, kind, rows = table, draw(st.sampled_from(["plain", "plain", "hashed", "parts"])), tables[table][0]
        if kind == "hashed":
            divisor, ids = draw(st.sampled_from([1, 1, 3])), draw(st.sampled_from([5, 40, 900, None]))
            feature = Parts([table], [(1 if ids is None else divisor, rows)], ids, "concat")
        if kind == "parts" and len(uncached) > 1:
            feature = Parts(uncached[:2], [(1, tables[uncached[0]][0]), (2, tables[uncached[1]][0])], 40, "concat")
        features.append((feature, draw(pooling)))
    return features


@st.composite
def samples(draw) -> CacheSample:
    """One to four tables of up to three widths, in few sets."""
    widths = draw(st.lists(st.sampled_from(WIDTHS), min_size=1, max_size=3, unique=True))
    table = st.tuples(ROWS, st.sampled_from(widths), st.sampled_from(FORMATS))
    tables = draw(st.lists(table, min_size=1, max_size=4))
    uncached = draw(st.sampled_from([[], [], [0], [0, 1]]))
    uncached = [t for t in uncached if t < len(tables)]
    policy = draw(st.sampled_from(POLICIES))
    return CacheSample(
        tables,
        draw(features_of(tables, uncached)),
        # 16 sets or more hold whole tables.
        {width: draw(st.sampled_from([1, 2, 3, 16])) for width in widths},
        ways=draw(st.sampled_from([1, 2, 4, 32])),
        uncached=tuple(uncached),
        policy=policy,
        rounding=draw(st.sampled_from(ROUNDINGS)),
        decay_every=draw(st.sampled_from([0, 1, 2, 3])) if policy == "lfu" else 0,
        padding_idx=draw(st.sampled_from([-1, -1, 0, 1])),
        bounds_check=draw(st.sampled_from(["error", "ignore", "none"])),
        ids=draw(st.sampled_from([64, 32])),
        offsets=draw(st.sampled_from([64, 32])),
        gap=draw(st.sampled_from([0, 1])),
        clock=draw(st.sampled_from([0, 0, 2**32 - 2, -1000])),
        seed=draw(st.integers(0, 2**10)),
    )


@st.composite
def sequences(draw) -> tuple[CacheSample, list[Action]]:
    """A sample, and one to eight actions, mostly insertions and updates."""
    sample, actions = draw(samples()), []
    for _ in range(draw(st.integers(1, 8))):
        name = draw(st.sampled_from(["insert", "insert", "insert", "update", "update", "lookup", "flush"]))
        given = None
        if name in ("insert", "lookup"):
            given = draw(batches(sample))
        elif name == "update":
            given = Update(draw(st.integers(0, 2**10)))
        actions.append(Action(name, given))
    return sample, actions
