"""Every registered op passes torch.library.opcheck, and has its recorded schema."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from row_cache_samples import cached_calls
from tiers import cross

import rec_kernels as rk
from rec_kernels.ops.autograd import Differentiable, overload_of
from rec_kernels.testing import same_bits

RECORDED = Path(__file__).with_name("schemas.json")

B, TABLES, FEATURE_TABLES = 3, ((11, 4), (7, 6)), (0, 1, 1)
DIMS = [TABLES[t][1] for t in FEATURE_TABLES]


def registered() -> dict[str, str]:
    """Public op, such as "scale_rows" or "embedding_bag.layout" -> schema."""
    names = [n.split("::")[1] for n in torch._C._dispatch_get_all_op_names() if n.startswith("rec_kernels::")]
    return {n: str(overload_of(n)._schema) for n in sorted(names) if not n.startswith("_")}


#: Argument limits of ops that look up, train or cache; the limit of others is 12.
MOST_ARGUMENTS = {
    "embedding_bag.layout": 17,
    "embedding_bag_tables.layout": 17,
    "embedding_bag_fused.layout": 35,
    "embedding_bag_backward_fused_.layout": 36,
    "row_cache_insert_.layout": 21,
    "row_cache_plan.layout": 21,
}


def test_ops_are_short() -> None:
    """Ops have few arguments: the layout holds all values per table."""
    counts = {name: len(overload_of(name)._schema.arguments) for name in registered()}
    assert len(counts) > 30
    assert {name: n for name, n in counts.items() if n > MOST_ARGUMENTS.get(name, 12)} == {}


def layout(**options) -> dict[str, object]:
    """Two tables, the second with two features, one of them with mean pooling."""
    starts, rows = options.pop("starts", [0, 48]), [0, 11]
    return rk.table_layout(
        [TABLES[t][0] for t in FEATURE_TABLES],
        DIMS,
        weight_offsets=[starts[t] for t in FEATURE_TABLES],
        row_offsets=[rows[t] for t in FEATURE_TABLES],
        mean=[False, True, False],
        **options,
    )._asdict()


def halves() -> dict[str, object]:
    """The layout of fp16 and bf16 tables in bytes: 88 and 40 of padding, 84 and 44."""
    return layout(starts=[0, 128], formats=[["fp16", "bf16"][t] for t in FEATURE_TABLES])


STEP = {"weight_decay": 0.1, "weight_decay_mode": "decoupled", "clip_grad_value": 1.0, "clip_grad_norm": 2.0}


# in_dims, out_dims, outputs: two groups in the first block, the second of them the identity.
PROJECTION = ([2, 5, 3], [5, 4], [0, 0, 1])


def strides() -> dict[str, object]:
    """The layout with different batch sizes of features, one of which is frozen."""
    return layout(frozen=[False, True, False]) | {"bag_starts": torch.tensor([0, 2, 5, 9])}


def shared() -> dict[str, object]:
    """The layout with a group of two features, with two bags shared by five samples, and an ungrouped feature."""
    return layout() | {
        "bag_starts": torch.tensor([0, 2, 4, 9]),
        "inverse": torch.tensor([[1, 0, 1, 1, 0]]),
        "groups": [0, 0, -1],
    }


def partitions() -> dict[str, object]:
    """Three features over both tables: plain, a product of both, and hashed with unlimited ids."""
    return rk.table_layout(
        [7, 11, 7, 11],
        [4] * 4,
        weight_offsets=[48, 0, 48, 0],
        row_offsets=[11, 0, 11, 0],
        partitions=rk.IdPartitions(
            starts=[0, 1, 3, 4],
            divisors=[1, 1, 11, 1],
            moduli=[7, 11, 7, 3],
            id_limits=[7, 77, None],
            combine=["concat", "mult", "concat"],
        ),
    )._asdict()


def _parts() -> list[torch.Tensor]:
    """The tables of partitions(), with the offsets of embedding_bag_tables."""
    return [torch.randn(shape, requires_grad=True) for shape in ((11, 4), (7, 4))]


def jagged() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """values, offsets, per_sample_weights of the three features."""
    lengths = torch.tensor([2, 0, 3, 1, 2, 1, 0, 1, 2])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return torch.arange(int(offsets[-1])) % 7, offsets, torch.rand(int(offsets[-1]))


def weights(requires_grad: bool = False) -> torch.Tensor:
    """Flat tables: 44 floats and 4 of padding, 42 and 6."""
    return torch.randn(96, requires_grad=requires_grad)


def _fused(values, offsets, factors, **given) -> tuple[tuple, dict]:
    state = (weights(), torch.zeros(18), torch.zeros((), dtype=torch.int64), torch.tensor(0.1))
    token = torch.empty(0, requires_grad=True)
    return (*state, token, values, offsets), given | {"per_sample_weights": factors.clone().requires_grad_()}


def _moments(optimizer: str) -> dict:
    """The arguments of an elementwise optimizer; state has the weights' offsets."""
    arguments = layout(state_offsets=[0, 48, 48]) | {"optimizer": optimizer}
    if optimizer == "adagrad":
        return arguments
    return arguments | {"exp_avg": torch.zeros(96), "exp_avg_sq": torch.zeros(96), "beta_powers": torch.ones(2)}


def _row_samples() -> dict[str, list[tuple[tuple, dict]]]:
    """Samples of the ops on dense rows."""
    x, scale = torch.randn(5, 7, requires_grad=True), torch.randn(5, requires_grad=True)
    projected, matrices = torch.randn(5, 10), torch.randn(22)
    return {
        "scale_rows": [((x, scale), {})],
        "dot_interaction": [
            ((*(torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((5, 6), (5, 3, 6))), pairs), {})
            for dtype in (torch.float32, torch.bfloat16)
            for pairs in (False, True)
        ],
        "dot_interaction_backward": [((torch.randn(5, 12), torch.randn(5, 6), torch.randn(5, 3, 6)), {})],
        "factorization_machine": [
            (tuple(torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((5, 3, 6), y)), {})
            for dtype in (torch.float32, torch.bfloat16)
            for y in ((3, 4), (5, 3, 4))
        ],
        "factorization_machine_backward": [
            ((torch.randn(5, 3, 4), torch.randn(5, 3, 6), torch.randn(y)), {}) for y in ((3, 4), (5, 3, 4))
        ],
        "quantize_rows": [
            ((torch.randn(5, 37), format, *rest), {})
            for format in rk.ROW_FORMATS
            for rest in ((), ("stochastic", torch.tensor(3), torch.tensor(4), 1, 2**33, "floor"))
        ],
        "dequantize_rows": [
            ((torch.zeros(5, rk.row_bytes(format, 37), dtype=torch.uint8), format, 37, dtype), {})
            for format in rk.ROW_FORMATS
            for dtype in (torch.float32, torch.bfloat16)
        ],
        "fake_quantize": [
            ((torch.randn(2, 5, 37, dtype=dtype, requires_grad=True), format, *rest), {})
            for format, dtype in zip(rk.ROW_FORMATS, [torch.float32, torch.float16, torch.bfloat16] * 5, strict=True)
            for rest in ((), ("stochastic", torch.tensor(3), torch.tensor(4), 1, 2**33, "floor"))
        ],
        "grouped_projection": [((projected.requires_grad_(), matrices.requires_grad_(), *PROJECTION), {})],
        "grouped_projection_backward_input": [((torch.randn(5, 9), matrices.detach(), *PROJECTION), {})],
        "grouped_projection_backward_weights": [((torch.randn(5, 9), projected.detach(), *PROJECTION), {})],
        "row_dot": [((x, torch.randn(5, 7, requires_grad=True)), {})],
    }


def _jagged_samples() -> dict[str, list[tuple[tuple, dict]]]:
    """Samples of the ops on jagged rows, with offsets of both widths and totals known or not.

    opcheck adds up an op's outputs in the first output's dtype, and cannot if that is integer and another one has a
    gradient: test_jagged_permute.py and test_jagged_bucketize.py test the gradients of weights.
    """
    values, offsets, factors = jagged()
    index, blocks, x = torch.tensor([8, 0, 2, 2, 5]), torch.tensor([2, 3, 7]), torch.randn(4, 5, requires_grad=True)
    chosen = int(offsets.diff()[index].sum())
    rows, weights = torch.randn(len(values), 3, requires_grad=True), factors.clone().requires_grad_()
    sizes = [2, 3, 4]
    return {
        "expand": [((x, torch.tensor([3, 0, 3])), {}), ((torch.arange(6).view(3, 2), torch.tensor([1]).int()), {})],
        "expand_backward": [((torch.randn(3, 5), torch.tensor([3, 0, 3]), 4), {})],
        "jagged_dedup": [
            ((values, offsets, [0, -1, 1]), {}),
            ((values.int(), offsets.int(), [0, 0, 0], factors), {"hash_bits": 4}),
        ],
        "jagged_index_select": [
            ((rows, offsets, index), {}),
            ((weights, offsets.int(), index.int()), {"total": chosen}),
            ((values, offsets, index), {"total": chosen}),
        ],
        "jagged_overlaps": [((values, offsets), {}), ((values.int(), offsets.int()), {})],
        "jagged_windows": [
            ((rows, index, index % 3), {}),
            ((weights, index.int(), index % 3), {"total": int((index % 3).sum())}),
            ((values, index, index.int() % 3), {"total": int((index % 3).sum())}),
        ],
        "jagged_permute": [
            ((rows[:, 0].detach(), offsets, [2, 0, 1], sizes, weights), {}),
            ((rows[:, 0].detach(), offsets, [1, 1], sizes, weights), {}),
            ((values.int(), offsets.int(), [1, 1], sizes), {}),
            ((values, offsets, [1], sizes, factors), {"total": int(offsets[5] - offsets[2])}),
        ],
        "jagged_bucketize": [
            ((values, offsets, blocks, 4, sizes, factors), {}),
            ((values.int(), offsets.int(), blocks, 4, sizes), {}),
        ],
    }


def _one_table_samples() -> dict[str, list[tuple[tuple, dict]]]:
    """Samples of the embedding_bag family without a layout."""
    values, offsets, factors = jagged()
    table, encoded = torch.randn(9, 5, requires_grad=True), torch.zeros(9, rk.row_bytes("int8", 5), dtype=torch.uint8)
    of_bytes = {"format": "int8", "embedding_dim": 5}
    grad, shape = torch.randn(9, 5), [9, 5]
    return {
        "embedding_bag.table": [
            ((table, values, offsets), {"pooling": "mean", "padding_idx": 2}),
            ((table, values, offsets[:-1], factors.clone().requires_grad_()), {"include_last_offset": False}),
            ((table, values, offsets), {"output_dtype": torch.bfloat16}),
            ((encoded, values, offsets, factors.clone().requires_grad_()), of_bytes),
        ],
        "embedding_bag_backward_dense.table": [((grad, shape, values, offsets, factors), {"pooling": "mean"})],
        "embedding_bag_backward_sparse.table": [((grad, shape, values, offsets, factors), {"pooling": "mean"})],
        "embedding_bag_backward_per_sample_weights.table": [
            ((grad, table.detach(), values, offsets), {}),
            ((grad, encoded, values, offsets), of_bytes),
        ],
    }


def _bag_samples() -> dict[str, list[tuple[tuple, dict]]]:
    """Samples of the embedding_bag family with a layout."""
    values, offsets, factors = jagged()
    grad = torch.randn(B, sum(DIMS))
    tables = [torch.randn(t, requires_grad=True) for t in TABLES]
    state = (weights(), torch.zeros(18), torch.zeros((), dtype=torch.int64), torch.tensor(0.1))
    bags, weighted = (values, offsets), {"per_sample_weights": factors}

    def trained() -> dict:
        return {"per_sample_weights": factors.clone().requires_grad_()}

    flat = torch.zeros(256, dtype=torch.uint8)
    gradients = [
        ((grad, weights(), *bags), layout() | weighted),
        ((grad, flat, *bags), halves() | weighted),
        ((torch.randn(5, sum(DIMS)), weights(), *bags), shared() | weighted),
        ((torch.randn(B, 12), weights(), *bags), partitions() | weighted),
    ]
    return {
        "embedding_bag.layout": [
            *(((weights(True), *bags), of() | trained()) for of in (layout, strides, shared, partitions)),
            ((weights(True), *bags), partitions() | {"output_dtype": torch.bfloat16}),
        ],
        "embedding_bag_tables.layout": [
            ((weights(), tables, *bags), layout() | trained()),
            ((torch.randn(80), _parts(), *bags), partitions() | trained()),
            ((flat, [tables[0].half(), tables[1].bfloat16()], *bags), halves() | trained()),
        ],
        "embedding_bag_fused.layout": [
            _fused(values, offsets, factors, **layout()),
            _fused(values, offsets, factors, **partitions()),
            _fused(values, offsets, factors, **layout(), grad_scale=torch.tensor([4.0])),
        ],
        "embedding_bag_backward_fused_.layout": [
            ((*state, grad, *bags), layout() | weighted),
            ((state[0], None, *state[2:], grad, *bags), layout() | {"optimizer": "sgd"}),
            ((state[0], torch.zeros(96), *state[2:], grad, *bags), _moments("adagrad")),
            ((state[0], None, *state[2:], grad, *bags), _moments("adam")),
            ((*state, torch.randn(9, 6), *bags), strides() | STEP | weighted),
            ((*state, torch.randn(5, sum(DIMS)), *bags), shared() | weighted),
            ((*state, torch.randn(B, 12), *bags), partitions() | weighted),
        ],
        "embedding_bag_backward_dense.layout": gradients,
        "embedding_bag_backward_sparse.layout": gradients,
        "embedding_bag_backward_per_sample_weights.layout": [
            ((grad, weights(), *bags), layout()),
            ((torch.randn(B, 12), weights(), *bags), partitions()),
        ],
    }


def _all_samples() -> dict[str, list[tuple[tuple, dict]]]:
    return _row_samples() | _jagged_samples() | _one_table_samples() | _bag_samples()


def samples(op: str) -> list[tuple[tuple, dict]]:
    """Arguments for opcheck. A new op without an entry here fails its test."""
    calls = _all_samples().get(op, []) + cached_calls().get(op, [])
    assert calls, f"no sample of {op}"
    return calls


def kinds(arguments: object) -> object:
    """Classifies arguments as AOT dispatch does: tensors by dtype and gradient, others by type."""
    if isinstance(arguments, torch.Tensor):
        return arguments.dtype, arguments.requires_grad
    if isinstance(arguments, dict):
        return tuple((name, kinds(value)) for name, value in arguments.items())
    if isinstance(arguments, (tuple, list)):
        return tuple(dict.fromkeys(map(kinds, arguments))) if isinstance(arguments, list) else (*map(kinds, arguments),)
    return type(arguments)


@pytest.mark.parametrize("op", registered())
def test_opcheck(op: str) -> None:
    """Schema, fake kernel and autograd registration are valid, as is AOT dispatch with dynamic shapes, per kind."""
    dispatched = set()
    for args, kwargs in samples(op):
        checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
        if (kind := kinds((args, kwargs))) not in dispatched:
            dispatched.add(kind)
            checks.append("test_aot_dispatch_dynamic")
        torch.library.opcheck(overload_of(op), args, kwargs, test_utils=checks)


def with_autograd() -> list[str]:
    """Ops with a gradient."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return [op for op in registered() if has(f"rec_kernels::{op}", "Autograd")]


@pytest.mark.parametrize("op", with_autograd())
def test_no_forward_mode_derivative(op: str) -> None:
    """Forward-mode tangents of every float tensor raise instead of being ignored."""

    def refused(t: torch.Tensor, args: list, place: int, kwargs: dict) -> None:
        def call(t: torch.Tensor) -> object:
            given = [t] if isinstance(args[place], list) else t
            return overload_of(op)(*args[:place], given, *args[place + 1 :], **kwargs)

        for requires_grad in (False, True):
            t = t.detach().requires_grad_(requires_grad)
            with pytest.raises(NotImplementedError, match=f"rec_kernels::{op} has no forward-mode derivative"):
                torch.func.jvp(call, (t,), (torch.ones_like(t),))

    for args, kwargs in samples(op):
        tensors = [(i, t[0] if isinstance(t, list) and t else t) for i, t in enumerate(args)]
        floats = [(i, t) for i, t in tensors if isinstance(t, torch.Tensor) and t.is_floating_point()]
        for i, t in floats:
            refused(t, list(args), i, kwargs)


def test_every_op_is_recorded() -> None:
    """`python python_tests/test_opcheck.py` records new schemas."""
    assert set(registered()) == set(json.loads(RECORDED.read_text()))


@pytest.mark.parametrize(("op", "schema"), json.loads(RECORDED.read_text()).items())
def test_schema_stays_compatible(op: str, schema: str) -> None:
    """Calls by the recorded schema fit the current one."""
    now = torch._C.parse_schema(registered()[op])
    assert now.is_backward_compatible_with(torch._C.parse_schema(schema)), (str(now), schema)


def test_version_is_development() -> None:
    """Schemas may change until 0.1.0; from then on this file's record binds."""
    assert rk.__version__.startswith("0.1.0")


STEPS = 20


def _collection(optimizer, formats=("fp32", "fp32"), cache: rk.RowCache | None = None) -> rk.EmbeddingBagCollection:
    torch.manual_seed(0)
    tables = [
        rk.EmbeddingBagConfig(50, 6, name="a", feature_names=["f", "g"], format=formats[0]),
        rk.EmbeddingBagConfig(70, 20, name="b", feature_names=["h"], pooling="mean", format=formats[1]),
    ]
    return rk.EmbeddingBagCollection(tables, optimizer=optimizer, cache=cache)


OPTIMIZERS = [None, rk.SGD(lr=0.1), rk.RowwiseAdagrad(lr=0.1), rk.Adam(lr=0.1)]


def _loss(collection, values, offsets, factors) -> torch.Tensor:
    batch = rk.KeyedJaggedTensor(["f", "g", "h"], values, offsets=offsets, weights=factors)
    return collection(batch).values().square().sum()


@pytest.mark.parametrize(("backend", "optimizer"), cross(["aot_eager", "inductor"], OPTIMIZERS, OPTIMIZERS[2]), ids=str)
def test_compiled_training(optimizer, backend: str) -> None:
    """Compiled training has eager's bits over steps with new ids and a schedule, and compiles once."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    step: Callable = torch.compile(_loss, backend=counter, fullgraph=True)
    eager, compiled = _collection(optimizer), _collection(optimizer)
    schedules = []
    if optimizer is not None:
        schedules = [torch.optim.lr_scheduler.StepLR(c.fused_optimizer, 1, 0.9) for c in (eager, compiled)]
    offsets = torch.arange(0, 61, 2)
    for _ in range(STEPS if backend == "aot_eager" else 4):
        values, factors = torch.randint(0, 50, (60,)), torch.rand(60)
        losses = []
        for collection, loss in ((eager, _loss), (compiled, step)):
            losses.append(loss(collection, values, offsets, factors))
            losses[-1].backward()
        torch.testing.assert_close(losses[0], losses[1])
        for schedule in schedules:
            schedule.optimizer.step()
            schedule.step()
    assert counter.frame_count == 1
    for a, b in zip(eager.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a, b)
        if optimizer is None:
            torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize(("backend", "policy"), cross(["aot_eager", "inductor"], ["lru", "lfu"], "lfu"))
def test_compiled_training_with_a_row_cache(backend: str, policy: str) -> None:
    """One graph inserts, reads and updates rows with the bits of eager training, compiled once."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled: Callable = torch.compile(_loss, backend=counter, fullgraph=True)
    cache = rk.RowCache(0.3, ways=4, policy=policy, decay_every=3 if policy == "lfu" else 0)
    runs = [(_collection(rk.Adam(lr=0.1), ("int8", "int4"), cache), loss) for loss in (_loss, compiled)]
    offsets = torch.arange(0, 61, 2)
    for _ in range(STEPS if backend == "aot_eager" else 6):
        values, factors, grads = torch.randint(0, 50, (60,)), torch.rand(60), []
        for collection, loss in runs:
            given = factors.clone().requires_grad_()
            loss(collection, values, offsets, given).backward()
            grads.append(given.grad)
        torch.testing.assert_close(*grads)
    assert counter.frame_count == 1
    (eager, _), (other, _) = runs
    assert eager.memory_report() == other.memory_report()
    assert all(table["evicted"] and table["hits"] and table["dirty_rows"] for table in eager.memory_report())
    for (name, a), b in zip(eager.state_dict().items(), other.state_dict().values(), strict=True):
        assert same_bits(a, b), name


def test_an_op_of_one_argument_may_return_its_gradient() -> None:
    """A backward may return a tensor or a tuple of one, as for torch.library.register_autograd."""
    with torch.library._scoped_library("rec_kernels", "FRAGMENT") as library:
        library.define("_of_one(Tensor x) -> Tensor")
        library.impl("_of_one", lambda x: 3 * x, "CompositeExplicitAutograd")
        for backward in (lambda ctx, grad: 3 * grad, lambda ctx, grad: (3 * grad,)):
            x = torch.randn(4, 2, requires_grad=True)
            Differentiable("_of_one", backward, None)([x]).sum().backward()
            assert torch.equal(x.grad, torch.full((4, 2), 3.0))


def test_dynamic_batch() -> None:
    """A second batch size recompiles once, with symbolic sizes; further ones never."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(_loss, backend=counter, fullgraph=True)
    collection = _collection(rk.RowwiseAdagrad(lr=0.1))
    for batch in (4, 7, 9, 12):
        step(collection, torch.randint(0, 50, (6 * batch,)), torch.arange(0, 6 * batch + 1, 2), None).backward()
    assert counter.frame_count <= 2


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(registered(), indent=1) + "\n")
    sys.stdout.write(f"recorded {len(registered())} schemas in {RECORDED.name}\n")
