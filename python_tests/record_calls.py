"""Makes data/recorded_calls.zip: seeded calls of every op, their outputs, gradients and changed arguments, and errors.

    python python_tests/record_calls.py

A recording is made once, from the ops of the commit it names, and never again for other ops: it says what those did.
The calls come from the generators of other tests; what is stored are the numbers themselves.
"""

from __future__ import annotations

import functools
import json
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import embedding_bag_fuzz
import op_fuzz
import torch
from embedding_bag_call_cases import ALL_OPTIMIZERS
from embedding_bag_cases import EPS, LR, make_case, wide_floats
from embedding_bag_format_cases import STEP, EncodedCase
from embedding_bag_moment_cases import BETAS, ELEMENTWISE, MomentCase
from recording import DATA, UnrecordableError, Writer
from replay import backward_from, gradients_of, outputs
from row_cache_cases import call
from row_cache_fuzz import CachedCall
from test_embedding_bag_shared import share
from test_embedding_bag_strides import Strided
from test_opcheck import RECORDED, registered, samples
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

import rec_kernels as rk
from rec_kernels.nn.tables.config import BAG_FORMATS
from rec_kernels.ops.embedding_bag import table_starts
from rec_kernels.testing import same_bits

#: Arguments that an op of the embedding_bag family takes for its layout: a changed one is not what a user would give.
LAYOUT = (
    *("weight_offsets", "row_offsets", "num_embeddings", "embedding_dims", "output_offsets", "mean", "output_dim"),
    *("num_rows", "max_embedding_dim", "formats", "format_of", "bag_starts", "groups", "partition_starts", "divisors"),
    *("moduli", "id_limits", "combine", "max_parts", "multiplies", "cache_sets", "cache_set_starts", "cache_ways"),
    *("cache_offsets", "moment_offsets", "table_ids"),
)


class Recorder:
    """``torch.ops.rec_kernels``, whose calls are written down; generators take it for the namespace of the ops."""

    def __init__(self) -> None:
        self.writer, self.entries, self.errors = Writer(), [], []
        self.generator = torch.Generator().manual_seed(0)

    def __getattr__(self, op: str) -> object:
        return functools.partial(self._positional, op)

    def _positional(self, op: str, *args: object, **kwargs: object) -> object:
        results = self.call(op, op_fuzz.by_name(op, args, kwargs))
        return results[0] if len(results) == 1 else tuple(results)

    def call(self, op: str, arguments: dict[str, object]) -> list[Tensor]:
        """A call and, where an output requires a gradient, its backward.

        Raises:
            Exception: what the op raises; that is written down as well.
        """
        entry = {"op": op, "arguments": self.writer.encode(arguments)}
        before = tree_map_only(Tensor, _copied, arguments)
        try:
            results = outputs(op, arguments, torch.ops.rec_kernels)
        except Exception as error:
            self._error(entry, error)
            raise
        grads = [torch.randn(r.shape, generator=self.generator).to(r.dtype) for r in results if r.requires_grad]
        if grads:
            backward_from(results, grads)
            entry["grads"] = self.writer.encode(grads)
            entry["gradients"] = self.writer.encode(gradients_of(arguments))
        entry["results"] = self.writer.encode([r.detach() for r in results])
        changed = {name: a for name, a in arguments.items() if not _same(a, before[name])}
        entry["changed"] = self.writer.encode(changed)
        self.entries.append(entry)
        return results

    def _error(self, entry: dict, error: Exception) -> None:
        schema = getattr(torch.ops.rec_kernels, entry["op"]).default._schema
        said = str(error).replace("mean nothing", "")  # no argument
        named = {a.name for a in schema.arguments} & {*re.findall(r"\w+", said)}
        text = {"type": type(error).__name__, "message": str(error), "arguments": sorted(named)}
        self.errors.append(entry | {"error": text})


def _copied(t: Tensor) -> Tensor:
    return t.detach().clone() if t.layout == torch.strided and not t.is_meta else t


def _same(a: object, b: object) -> bool:
    pairs = zip(tree_leaves(a), tree_leaves(b), strict=True)
    return all(same_bits(x.detach(), y) for x, y in pairs if isinstance(x, Tensor))


def record_samples(recorder: Recorder) -> None:
    """Every sample of every op, with gradients; once more with other bags, where there are bags."""
    for again in (False, True):
        torch.manual_seed(17 + again)
        for op in registered():
            for args, kwargs in samples(op):
                arguments = tree_map_only(Tensor, op_fuzz._own, op_fuzz.by_name(op, args, kwargs))
                if again and not _redraw(arguments):
                    continue
                recorder.call(op, arguments)


def _redraw(arguments: dict[str, object]) -> bool:
    """Gives a sample other ids, of which some repeat, in bags of other lengths; whether it has any to redraw."""
    values, offsets = arguments.get("values"), arguments.get("offsets")
    if values is None or offsets is None or values.is_floating_point() or arguments.get("cache_slots") is not None:
        return False
    if arguments.get("total") is not None:
        return False
    values.copy_(torch.randint(6, values.shape))
    inner = torch.randint(len(values) + 1, (len(offsets) - 2,)).sort().values
    offsets[1:-1] = inner.to(offsets.dtype)
    return True


def record_rows(recorder: Recorder) -> None:
    """Records options of the ops on rows of numbers that the samples of test_opcheck.py lack."""
    g = torch.Generator().manual_seed(3)
    dense, sparse, y = (torch.randn(shape, generator=g) for shape in ((5, 6), (5, 3, 6), (3, 4)))
    for precision in ("ieee", "tf32"):
        recorder.dot_interaction(dense, sparse, True, precision)
        recorder.dot_interaction_backward(torch.randn(5, 12, generator=g), dense, sparse, False, precision)
        recorder.dot_interaction_backward(torch.randn(5, 16, generator=g), dense, sparse, True, precision)
        recorder.factorization_machine(sparse, y, precision)
        recorder.factorization_machine_backward(torch.randn(5, 3, 4, generator=g), sparse, y, precision)


def _one_table(r: random.Random, format: str) -> dict[str, object]:
    """A table of one format alone, [E, D] or [E, row_bytes]."""
    rows, columns, count = r.choice([3, 9, 20]), r.choice([1, 5, 16, 33]), r.choice([0, 4, 11])
    numbers = wide_floats(rows, columns, seed=r.randrange(999))
    arguments = {"weights": numbers.requires_grad_()}
    if format != "fp32":
        arguments = {"weights": rk.quantize_rows(numbers.detach(), format), "formats": [format]}
        arguments["embedding_dim"] = columns
    ids = torch.tensor([r.randrange(rows) for _ in range(count)], dtype=r.choice([torch.int32, torch.int64]))
    starts = [0, *sorted(r.randint(0, count) for _ in range(4))]
    arguments |= {"values": ids, "offsets": torch.tensor([*starts, count], dtype=r.choice([torch.int32, torch.int64]))}
    if r.random() < 0.4:
        arguments |= {"offsets": arguments["offsets"][:-1].clone(), "include_last_offset": False}
    if r.random() < 0.5:
        arguments["per_sample_weights"] = wide_floats(count, seed=r.randrange(999)).requires_grad_()
    arguments["pooling"], arguments["padding_idx"] = r.choice(["sum", "mean"]), r.choice([-1, 0, 2])
    arguments["output_dtype"] = r.choice([None, torch.float32, torch.float16, torch.bfloat16])
    return arguments


def record_one_table(recorder: Recorder) -> None:
    """Single tables, of every format; those of floats with dense and with sparse gradients."""
    r = random.Random(5)
    for format in ("fp32", *BAG_FORMATS):
        recorder.call("embedding_bag", _one_table(r, format))
    for number in range(8):
        recorder.call("embedding_bag", _one_table(r, "fp32") | {"sparse": number % 2 == 0})
    for format in BAG_FORMATS:
        given = {name: a for name, a in _one_table(r, format).items() if name != "include_last_offset"}
        _record_backwards(recorder, tree_map_only(Tensor, _copied, given), r)


def _record_backwards(recorder: Recorder, given: dict[str, object], r: random.Random) -> None:
    """The backwards of one table."""
    weights, bags = given["weights"], len(given["offsets"]) - 1
    columns = given.get("embedding_dim") or weights.shape[1]
    given |= {"grad": wide_floats(bags, columns, seed=r.randrange(999)), "weights_shape": list(weights.shape)}
    ops = ["embedding_bag_backward_per_sample_weights"]
    if "formats" not in given:
        ops += ["embedding_bag_backward_dense", "embedding_bag_backward_sparse"]
    for op in ops:
        call(op, given, recorder)
    token = torch.empty(0, requires_grad=True)
    for op in ("embedding_bag_fused", "embedding_bag_backward_fused_"):
        own = {"weights": weights.clone(), "sum": torch.rand(len(weights)), "step": torch.tensor(2), "token": token}
        noise = {"lr": torch.tensor(0.1), "seed": torch.tensor(5)}
        call(op, given | own | noise, recorder)


def _small(r: random.Random) -> embedding_bag_fuzz.BadCall:
    """A case of the fuzzer with few numbers in it."""
    while True:
        call = embedding_bag_fuzz.bad_call(r.randrange(10**6))
        size = call.encoded.flat.numel() + 4 * call.encoded.case.grad.numel() + 4 * len(call.encoded.case.values)
        if size < 1500 and call.sample.features and call.encoded.case.batch:
            return call


def _right(r: random.Random, cached: bool = False) -> embedding_bag_fuzz.BadCall:
    """A small case that nothing is wrong with; for a cache, one with ids that are looked at."""
    while True:
        call = _small(r)
        ids = call.encoded.case.values.numel() and call.sample.bounds_check != "none"
        if call.complaint is None and (ids or not cached):
            return call


def record_bags(recorder: Recorder, count: int = 44) -> None:
    """Every op of the family on random tables of all formats, optimizers, poolings, partitions and bounds modes."""
    r = random.Random(23)
    for _ in range(count):
        right = _right(r)
        for op in embedding_bag_fuzz.FORWARDS:
            right.forward(op, recorder)
        for op in embedding_bag_fuzz.BACKWARDS:
            right.backward(op, recorder)


def _step_options() -> Iterator[dict[str, object]]:
    """Options of an update beside its optimizer."""
    yield {"weight_decay": 0.1, "weight_decay_mode": "l2"}
    yield {"weight_decay": 0.01, "weight_decay_mode": "decoupled", "clip_grad_norm": 0.5}
    yield {"clip_grad_value": 0.25, "grad_scale": torch.tensor([16.0])}
    yield {"found_inf": torch.tensor([1.0]), "grad_scale": torch.tensor([3.7])}
    yield {"frozen": torch.tensor([True, False, False])}
    yield {"bounds_check": "ignore", "status": torch.tensor([2**63 - 1, 0])}
    yield {"status": torch.tensor([1, 0])}


def _update_arguments(encoded: EncodedCase, optimizer: str, half: bool) -> dict[str, object]:
    """The arguments of a fused update; ``half``: state for every element, where there is any, is bfloat16."""
    case, rows = encoded.case, {"sum": encoded.case.sum if optimizer == "rowwise_adagrad" else None}
    if optimizer in ELEMENTWISE:
        moments = MomentCase(encoded, optimizer, half=half)
        rows |= moments.state | {"moment_offsets": torch.tensor([moments.starts[t] for t in case.parts])}
    hyper = {"optimizer": optimizer, "eps": EPS, "lr": torch.tensor(LR), "beta1": BETAS[0], "beta2": BETAS[1]}
    bags = dict(zip(("values", "offsets", "per_sample_weights"), case.jagged, strict=True))
    own = {"weights": encoded.flat, "step": torch.tensor(STEP), "grad": case.grad, "token": torch.empty(0)}
    return tree_map_only(Tensor, _copied, encoded.layout | encoded.noise | rows | hyper | bags | own)


def record_steps(recorder: Recorder) -> None:
    """Every optimizer with every option of the gradient's step; state of floats and of bfloat16."""
    for number, optimizer in enumerate(ALL_OPTIMIZERS):
        for again, options in enumerate(_step_options()):
            seed = 10 * number + again
            tables = [(4, 3), (3, 8 if seed % 2 else 5)]
            lengths = [(seed + 3 * i) % 4 for i in range(6)]
            case = make_case(tables, [0, 1, 1], lengths, mean=[False, True, False], weighted=seed % 3 == 0, seed=seed)
            encoded = EncodedCase(case, [BAG_FORMATS[seed % 8], BAG_FORMATS[(3 * seed + 1) % 8]])
            given = options | {"rounding": ("nearest", "stochastic")[again % 2]}
            for op in ("embedding_bag_backward_fused_", "embedding_bag_fused"):
                arguments = _update_arguments(encoded, optimizer, again % 2 == 0 and optimizer != "adagrad")
                arguments["token"].requires_grad_()
                call(op, arguments | given, recorder)


def _batches(r: random.Random, encoded: EncodedCase) -> dict[str, object]:
    """A case with batch sizes of its features' own, or with samples that share bags; a feature may be frozen."""
    case, features = encoded.case, len(encoded.case.features)
    if r.random() < 0.5:
        lengths = case.offsets.diff().view(features, case.batch)
        ends = [int(of.nonzero().max()) + 1 if of.any() else 0 for of in lengths]
        arguments = Strided(encoded, [r.randint(end, case.batch) for end in ends]).arguments
        rows = int(arguments["bag_starts"][-1])
    else:
        groups = [r.choice([-1, 0, 1]) for _ in range(features)]
        inverse = torch.tensor([[r.randrange(case.batch) for _ in range(case.batch)] for _ in range(2)])
        arguments, rows = share(encoded, groups, inverse).arguments, case.batch
    grad = wide_floats(rows, arguments["output_dim"], seed=case.seed + 7)
    frozen = torch.tensor([r.random() < 0.3 for _ in range(features)])
    if "partition_starts" in arguments:
        most, combined = int(arguments["partition_starts"].diff().max()), bool((arguments["combine"] == 2).any())
        arguments |= {"max_parts": most, "multiplies": combined}
    return arguments | {"grad": grad, "frozen": frozen}


def record_batches(recorder: Recorder, count: int = 16) -> None:
    """``bag_starts``, ``inverse`` and ``groups``, ``frozen`` in every op that has them, and half outputs."""
    r = random.Random(59)
    for number in range(count):
        wrong = _right(r)
        encoded, cached = wrong.encoded, CachedCall(wrong, number)
        batches = _batches(r, encoded) | wrong.options
        given = _update_arguments(encoded, wrong.sample.optimizer, False) | batches
        given["token"].requires_grad_()
        given["output_dtype"] = (None, torch.float16, torch.bfloat16)[number % 3]
        for op in ("embedding_bag", "embedding_bag_backward_per_sample_weights", "embedding_bag_fused"):
            call(op, given, recorder)
        call(
            "embedding_bag_backward_fused_",
            _update_arguments(encoded, wrong.sample.optimizer, False) | batches,
            recorder,
        )
        _record_gradients(recorder, encoded, given)
        for op in ("row_cache_plan", "row_cache_lookup", "row_cache_insert_"):
            cached.run(recorder, op, cached.state, (), **batches)


def _record_gradients(recorder: Recorder, encoded: EncodedCase, given: dict[str, object]) -> None:
    """The gradients of tables of floats, dense, sparse and of each table."""
    case = encoded.case
    floats = {"weight_offsets": case.layout["weight_offsets"], "weights": case.weights.clone()}
    floats |= {"formats": None, "format_of": None, "weights_shape": list(case.weights.shape)}
    for op in ("embedding_bag_backward_dense", "embedding_bag_backward_sparse"):
        call(op, given | floats, recorder)
    tables = [t.clone().requires_grad_() for t in case.split(case.weights)]
    starts, rows = table_starts([t.numel() for t in tables]), table_starts([len(t) for t in tables], 1)
    places = {"weight_offsets": starts, "row_offsets": rows}  # where this op looks for its tables
    floats |= {name: torch.tensor([firsts[t] for t in case.parts]) for name, firsts in places.items()}
    weights, sparse = torch.zeros(starts[-1]), case.seed % 2 == 0 and given.get("partition_starts") is None
    for start, table in zip(starts[:-1], tables, strict=True):
        weights[start : start + table.numel()] = table.detach().flatten()
    floats |= {"weights": weights, "tables": tables, "num_rows": rows[-1], "sparse": sparse}
    call("embedding_bag_tables", given | floats, recorder)


def record_caches(recorder: Recorder, count: int = 8) -> None:
    """Rows that come in, are read, updated and flushed: the ops of the cache, and the others with one."""
    r = random.Random(31)
    for number in range(count):
        right = _right(r, cached=True)
        cached = CachedCall(right, number)
        for inserts in (True, False):
            cached.run(recorder, "row_cache_plan", cached.state, right.encoded.case.jagged, inserts=inserts)
        cached.everything(recorder)


def record_changed(recorder: Recorder, right: int = 3, wrong: int = 4) -> None:
    """Records, for every op, changed samples that it accepts and changed samples that it refuses."""
    valid = op_fuzz.Samples()
    for op in registered():
        counts: Counter[str] = Counter()
        for seed in range(400):
            if counts["right"] >= right and counts["raised"] >= wrong:
                break
            call, _ = op_fuzz.bad_call(valid, f"recorded {op} {seed}", op)
            kind = _try_changed(recorder, call, {"right": counts["right"] < right, "raised": counts["raised"] < wrong})
            counts[kind] += 1


def _try_changed(recorder: Recorder, call: op_fuzz.Call, wanted: dict[str, bool]) -> str:
    """Records a changed call if it is of a kind that is wanted; says which kind it is."""
    layout = any(change.split(":")[0].split(" ")[0] in LAYOUT for change in call.changes)
    trial = op_fuzz.Call(call.op, tree_map_only(Tensor, _copied, call.arguments))
    try:
        trial.run()
        kind = "right" if call.changes and not layout else "nothing"
    except Exception as error:
        named = {a.name for a in call.schema.arguments} & {*re.findall(r"\w+", str(error))}
        kind = "raised" if named and not op_fuzz.OF_NO_ARGUMENT.search(str(error)) else "nothing"
    if not wanted.get(kind) or len(json.dumps(str(call.arguments))) > 10**5:
        return "nothing"
    try:
        recorder.call(call.op, call.arguments)
    except UnrecordableError:
        return "nothing"
    except Exception:
        return kind
    return kind


def record_bad_bags(recorder: Recorder, count: int = 14) -> None:
    """Ids and offsets that are refused, by every op that reads them."""
    r = random.Random(41)
    for _ in range(count):
        wrong = _small(r)
        while wrong.complaint is None:
            wrong = _small(r)
        embedding_bag_fuzz.raised(lambda wrong=wrong: wrong.forward("embedding_bag", recorder))
        for op in ("dense", "fused_"):
            embedding_bag_fuzz.raised(lambda op=op, wrong=wrong: wrong.backward(op, recorder))


def main() -> None:
    """Writes the file."""
    recorder = Recorder()
    for record in (
        record_samples,
        record_rows,
        record_one_table,
        record_bags,
        record_steps,
        record_batches,
        record_caches,
    ):
        record(recorder)
        sys.stdout.write(f"{record.__name__}: {len(recorder.entries)} calls, {len(recorder.writer._blob)} bytes\n")
    for record in (record_changed, record_bad_bags):
        record(recorder)
        sys.stdout.write(f"{record.__name__}: {len(recorder.entries)} calls, {len(recorder.errors)} errors\n")
    commit = subprocess.run(
        ["git", "merge-base", "HEAD", "main"], capture_output=True, text=True, check=True
    ).stdout.strip()
    index = {"commit": commit, "schemas": json.loads(RECORDED.read_text())}
    path = DATA / "recorded_calls.zip"
    recorder.writer.write(path, index | {"calls": recorder.entries, "errors": recorder.errors})
    sys.stdout.write(f"{path.name}: {path.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
