"""Memory of ops' arguments: freed or shrunk storages, and outputs that overlap arguments."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from test_opcheck import registered, samples
from torch import Tensor

import rec_kernels as rk
from rec_kernels.ops.autograd import overload_of

UPDATE = "embedding_bag_backward_fused_.layout"


def calls(op: str) -> Iterator[dict[str, object]]:
    """The op's samples by argument name, with cloned tensors."""
    arguments = overload_of(op)._schema.arguments
    for args, kwargs in samples(op):
        given = {a.name: value for a, value in zip(arguments, args, strict=False)} | kwargs
        yield {name: t.detach().clone() if isinstance(t, Tensor) else t for name, t in given.items()}


def tensors_of(op: str) -> list[str]:
    """Tensor arguments, without lists of tensors, whose memory the op does not access."""
    return [a.name for a in overload_of(op)._schema.arguments if str(a.type) in ("Tensor", "Optional[Tensor]")]


@pytest.mark.parametrize("missing", ["all", "a byte"])
@pytest.mark.parametrize("op", registered())
def test_freed_storage(op: str, missing: str) -> None:
    """A storage freed by resize_(0), as FSDP does, raises an error that names the argument instead of a crash."""
    found = 0
    for given in calls(op):
        for name in tensors_of(op):
            t = given.get(name)
            if not isinstance(t, Tensor) or t.numel() == 0:
                continue
            bytes_needed = t.numel() * t.element_size()
            shrunk = t.clone()
            shrunk.untyped_storage().resize_(0 if missing == "all" else bytes_needed - 1)
            with pytest.raises(ValueError, match=f"^{name} of shape .* needs {bytes_needed} bytes of storage"):
                overload_of(op)(**given | {name: shrunk})
            found += 1
    assert found


@pytest.mark.parametrize("op", [op for op in registered() if op.partition(".")[0].endswith("_")])
def test_overlaps(op: str) -> None:
    """An op refuses to write to memory that an argument shares: the error names both, and nothing changes."""
    schema = overload_of(op)._schema.arguments
    written = {a.name for a in schema if a.alias_info is not None and a.alias_info.is_write}
    given = next(calls(op))
    names = [name for name in tensors_of(op) if isinstance(t := given.get(name), Tensor) and t.numel()]
    assert written.intersection(names)
    for name in sorted(written.intersection(names)):
        for other in set(names) - {name}:
            ours, theirs = given[name], given[other]
            memory = torch.zeros(ours.numel() * 8 + theirs.numel() * 8, dtype=torch.uint8)
            # The last element of one is in the first of the other, whatever their widths.
            end = ours.numel() * ours.element_size()
            start = (end - 1) // theirs.element_size() * theirs.element_size()
            one = memory[:end].view(ours.dtype).view(ours.shape)
            two = memory[start : start + theirs.numel() * theirs.element_size()].view(theirs.dtype).view(theirs.shape)
            with pytest.raises(ValueError, match=r"overlaps with .* in memory, and is written to"):
                overload_of(op)(**given | {name: one, other: two})
            assert not memory.any()


def test_neighbours_do_not_overlap() -> None:
    """Adjacent parts of one flat state tensor, as in collections, are accepted."""
    memory = torch.zeros(96 + 18)
    given = next(calls(UPDATE))
    overload_of(UPDATE)(**given | {"weights": memory[:96], "sum": memory[96:]})
    assert memory[:96].any()
    assert memory[96:].any()


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -float("inf")])
def test_learning_rate_is_finite(rate: float) -> None:
    """The CPU op and every setter of a fused optimizer's learning rate reject non-finite values."""
    given = next(calls(UPDATE))
    before = given["weights"].clone()
    with pytest.raises(ValueError, match=f"^lr = {rate} must be finite"):
        overload_of(UPDATE)(**given | {"lr": torch.tensor(rate)})
    assert torch.equal(given["weights"], before)
    table = rk.EmbeddingBagConfig(4, 2, name="t", feature_names=["f"])
    collection = rk.EmbeddingBagCollection([table], optimizer=rk.SGD(lr=0.5))
    with pytest.raises(ValueError, match=f"^lr = {rate} must be at least 0, and finite as float32"):
        collection.fused_optimizer.param_groups[0]["lr"] = rate
    assert collection.fused_optimizer.param_groups[0]["lr"] == 0.5


def test_step_is_a_count() -> None:
    """A negative step, which seeds the noise of stochastic rounding, is rejected."""
    given = next(calls(UPDATE))
    with pytest.raises(ValueError, match=r"^step = -5 must be at least 0, the number of updates so far"):
        overload_of(UPDATE)(**given | {"step": torch.tensor(-5)})
