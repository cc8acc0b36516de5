"""Replays recorded runs of modules: builds a module, performs the steps, and compares with the recording.

A run is data: expressions ``{"new": class, "with": arguments}`` of public classes, and steps by name. Runs use only the
public API, so that any later module of the same class can replay them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from replay import differences
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import rec_kernels as rk
from rec_kernels.nn.tables.load_state import rename

#: Names that an expression may use.
CLASSES = (
    *("EmbeddingBagCollection", "EmbeddingBagConfig", "EmbeddingCollection", "EmbeddingConfig", "RowCache"),
    *("SGD", "Adagrad", "RowwiseAdagrad", "Adam", "RowwiseAdam", "LAMB"),
    *("Hash", "QuotientRemainder", "Partitions", "MixedDimension"),
    *("KeyedJaggedTensor", "InverseKeyedJaggedTensor", "KeyedJaggedWindows", "JaggedTensor"),
    *("Deduplicated", "PathEmbeddingBag", "MixedDimensionEmbeddingBag", "LowRankCrossNet", "Wukong"),
)
#: Placeholder for a folder of the run, in strings of expressions.
FOLDER = "<folder>/"
#: Fields of a table's report other than sizes of internal data structures.
REPORTED = (
    *("name", "num_embeddings", "embedding_dim", "format", "weight_bytes", "state_bytes", "cached_rows", "dirty_rows"),
    *("lookups", "hits", "hit_rate", "inserted", "evicted", "written", "left_out"),
)


def made(expression: object, folder: Path) -> object:
    """Builds the objects that recorded expressions describe; returns other values unchanged."""
    if isinstance(expression, str) and expression.startswith(FOLDER):
        return folder / expression.removeprefix(FOLDER)
    if isinstance(expression, list):
        return [made(e, folder) for e in expression]
    if not isinstance(expression, dict):
        return expression
    if "new" not in expression:
        return {name: made(e, folder) for name, e in expression.items()}
    if expression["new"] not in CLASSES:
        raise ValueError(f"a recording names {expression['new']!r}, which it may not")
    return getattr(rk, expression["new"])(**{name: made(e, folder) for name, e in expression["with"].items()})


def features_of(expression: dict) -> object:
    """Jagged features with the expression's own weight tensor, for its gradient."""
    return made(expression, Path())


def plain(output: object) -> object:
    """The tensors of a module's output, in lists and dictionaries."""
    if isinstance(output, rk.KeyedTensor):
        return {"keys": output.keys(), "dims": output.length_per_key(), "values": output.values()}
    if isinstance(output, rk.JaggedTensor):
        return {"values": output.values(), "offsets": output.offsets()}
    if isinstance(output, dict):
        return {name: plain(value) for name, value in output.items()}
    return output


def recorded_names(module: nn.Module, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A module's tensors under the names of recordings, which name the tables of both kinds of collections equally."""
    found = dict(found)
    for path, collection in module.named_modules():
        if isinstance(collection, rk.EmbeddingCollection):
            prefix = f"{path}." if path else ""
            rename(found, f"{prefix}embeddings.", f"{prefix}embedding_bags.")
    return found


def build(run: dict, folder: Path) -> nn.Module:
    """The module of a run, newly initialized."""
    for name, content in run.get("files", {}).items():
        (folder / name).write_bytes(content.numpy().tobytes())
    torch.manual_seed(0)
    return made(run["module"], folder)


class Player:
    """Performs the steps of a run on its module."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.scaler = module, None

    def play(self, step: dict) -> object:
        """Result of a step: a lookup's outputs and gradients, a state, an error, or nothing."""
        do: Callable[[dict], object] = getattr(self, f"_do_{step['do']}")
        if not step.get("raises"):
            return do(step)
        try:
            do(step)
        except Exception as error:
            return {"type": type(error).__name__, "message": self._recorded(str(error))}
        return "no error"

    def _recorded(self, message: str) -> str:
        """A message with the recordings' numbers of features instead of names."""
        names = getattr(self.module, "feature_names", [])
        return re.sub(r"[(]feature '(.+?)', ", lambda found: f"(feature {names.index(found[1])}, ", message)

    def _do_lookup(self, step: dict) -> dict[str, object]:
        features = features_of(step["features"])
        output = plain(getattr(self.module, step.get("method", "forward"))(features))
        gradients: dict[str, object] = {}
        if step.get("backward"):
            self._backward(step, [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad])
            gradients = self._gradients(step)
        return {"outputs": output, "gradients": gradients}

    def _backward(self, step: dict, outputs: list[Tensor]) -> None:
        if self.scaler is None:
            torch.autograd.backward(outputs, step["grads"])
            return
        products = [(o.float() * g).sum() for o, g in zip(outputs, step["grads"], strict=True)]
        self.scaler.scale(sum(products)).backward()
        self.scaler.step(self.module.fused_optimizer)
        self.scaler.update()

    def _gradients(self, step: dict) -> dict[str, object]:
        grads: dict[str, Tensor] = {}
        for name, t in (*self.module.named_parameters(), *inputs_of(step["features"])):
            if t.grad is not None:
                grads[name], t.grad = t.grad, None
        found: dict[str, object] = {**recorded_names(self.module, grads)}
        if self.scaler is not None:
            found["scale"] = self.scaler.get_scale()
        return found

    def _do_accumulate(self, step: dict) -> list[object]:
        with self.module.accumulate():
            return [self.play(lookup) for lookup in step["steps"]]

    def _do_serve(self, step: dict) -> object:
        with torch.no_grad():
            return plain(self.module.for_serving()(features_of(step["features"])))

    def _do_read(self, step: dict) -> object:
        """Looks up without training."""
        was = self.module.training
        with torch.no_grad():
            output = plain(self.module.eval()(features_of(step["features"])))
        self.module.train(was)
        return output

    def _do_call(self, step: dict) -> None:
        given = [features_of(a) if isinstance(a, dict) else a for a in step.get("given", [])]
        getattr(self.module, step["method"])(*given)

    def _do_rate(self, step: dict) -> None:
        self.module.fused_optimizer.param_groups[0]["lr"] = step["lr"]

    def _do_scaler(self, step: dict) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=step["scale"], growth_interval=2)
        self.module.set_grad_scaler(self.scaler)

    def _do_load(self, step: dict) -> None:
        self.module.load_state_dict(step["state"], **step.get("options", {}))

    def _do_state(self, step: dict) -> dict[str, object]:
        """Returns the saved and the reported state."""
        state = recorded_names(self.module, self.module.state_dict())
        found: dict[str, object] = {"state": {n: t.clone() for n, t in state.items()}}
        if getattr(self.module, "optimizer", None) is not None:
            found["rate"] = self.module.fused_optimizer.param_groups[0]["lr"]
        if hasattr(self.module, "memory_report"):
            reports = self.module.memory_report()
            found["report"] = [{k: v for k, v in report.items() if k in REPORTED} for report in reports]
        return found


def inputs_of(expression: object, name: str = "features") -> Iterable[tuple[str, Tensor]]:
    """The leaves of an expression that require a gradient, by name."""
    if isinstance(expression, dict):
        for key, value in expression.items():
            yield from inputs_of(value, f"{name}.{key}")
    elif isinstance(expression, Tensor) and expression.requires_grad:
        yield name, expression


def dequantized(expected: dict, got: dict) -> tuple[dict, dict]:
    """Decodes int8 rows of two states, and replaces values of the second one quantization step off by the first's.

    Sums that differ in the last bit change a row's range, on which all its bytes depend, and can change the rounding.
    """
    states = [dict(each["state"]) for each in (expected, got)]
    for name, rows in expected["state"].items():
        found = got["state"].get(name)
        if rows.dtype == torch.uint8 and rows.dim() == 2 and found is not None and found.shape == rows.shape:
            columns = rows.shape[1] - rk.row_bytes("int8", 1) + 1
            a, b = (rk.dequantize_rows(t, "int8", columns) for t in (rows, found))
            step = (a.amax(1, keepdim=True) - a.amin(1, keepdim=True)) / 255
            states[0][name], states[1][name] = a, torch.where((a - b).abs() <= 1.01 * step, a, b)
    return expected | {"state": states[0]}, got | {"state": states[1]}


def replay(run: dict, folder: Path) -> list[str]:
    """Repeats a recorded run.

    Args:
        run: the decoded recording.
        folder: an empty one, for files.

    Returns:
        The differences and their positions, for instance step 3's output.
    """
    module = build(run, folder)
    found = differences(run["initial"], recorded_names(module, module.state_dict()), "first state", exact=run["exact"])
    module.load_state_dict(run["initial"])
    player = Player(module)
    with contextlib.closing(module) if hasattr(module, "close") else contextlib.nullcontext():
        for number, (step, expected) in enumerate(zip(run["steps"], run["results"], strict=True)):
            got, place = player.play(step), f"step {number}, {step['do']}"
            if not run["exact"] and step["do"] == "state":
                expected, got = dequantized(expected, got)
            found += differences(expected, got, place, exact=run["exact"])
    return found
