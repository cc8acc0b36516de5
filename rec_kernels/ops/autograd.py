"""Autograd of the package's ops: one registration for all of them, and what ops have no derivative of.

``register_autograd`` has the meaning of ``torch.library.register_autograd``, whose walks over schema and arguments take
83 microseconds a call at 17 arguments and 294 at 35 where a gradient is required. It also refuses forward-mode
tangents, which would be dropped below autograd: the derivative would be zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

_ops = torch.ops.rec_kernels
_implementations = torch.library.Library("rec_kernels", "IMPL")
_has_torch_function = torch._C._has_torch_function  # the classes of some tensors, or a mode, want to see a call

#: Ops that ``register_autograd`` has given a gradient, by the id of their overload, whose hash is slow.
_differentiable: dict[int, Differentiable] = {}
#: Backward ops whose derivative is refused.
REFUSED: set[str] = set()


def overload_of(op: str) -> torch._ops.OpOverload:
    """The op called "scale_rows", or the overload of one called "embedding_bag.layout"."""
    name, _, overload = op.partition(".")
    return getattr(getattr(_ops, name), overload or "default")


@functools.cache
def signature_of(op: str) -> dict[str, object]:
    """Name -> default of the arguments of ``rec_kernels::<op>``, in schema order."""
    return {a.name: a.default_value for a in overload_of(op)._schema.arguments}


@functools.cache
def places_of(op: str) -> dict[str, int]:
    """Name -> place of the arguments of ``rec_kernels::<op>`` in its schema."""
    return {name: i for i, name in enumerate(signature_of(op))}


def arguments_of(op: str, inputs: tuple, given: dict | None = None) -> dict:
    """The arguments of a call by their names in the schema, as far as they were given."""
    arguments = dict(zip(signature_of(op), inputs, strict=False))
    return arguments | given if given else arguments


def call(overload: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls an op that has a gradient, past the ways of the dispatcher that a small call spends most of its time on.

    Its autograd kernel, which is Python, is called as a function. The dispatcher itself is needed while torch compiles,
    for tangents, inside transforms of torch.func and torch.vmap, whose tensors do not say that they require a gradient,
    under autocast, and where a TorchFunctionMode or tensors with a ``__torch_function__`` of their own see the call.
    """
    if not (
        torch.compiler.is_compiling()
        or forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_any_autocast_enabled()
    ):
        op = _differentiable[id(overload)]
        inputs = op.inputs(args, kwargs) if kwargs else args
        if not (
            _has_torch_function(inputs) or (op.list_place is not None and _has_torch_function(inputs[op.list_place]))
        ):
            return op(inputs)
    return overload(*args, **kwargs)


def register_autograd(op: str, backward: Callable, *, setup_context: Callable | None = None) -> None:
    """Gives ``rec_kernels::<op>`` a gradient.

    Args:
        op: its name. At most one argument may be a list of tensors; results are tensors.
        backward: ``backward(ctx, *grads)`` returns a gradient, or None, for each argument of the schema (of a single
            argument, also the gradient alone); for a list of tensors, a list of them. ``ctx.needs_input_grad`` has an
            element, or a list of them, for each argument.
        setup_context: ``setup_context(ctx, inputs, output)`` keeps what ``backward`` needs. ``inputs`` are all
            arguments of the schema, defaults included.
    """
    differentiable = Differentiable(op, backward, setup_context)
    _differentiable[id(overload_of(op))] = differentiable

    def kernel(*inputs: Any) -> Any:
        refuse_tangents(op, inputs)
        return differentiable(inputs)

    _implementations.impl(op, kernel, "Autograd")


class Differentiable:
    """An op with a gradient: calling it is what its autograd kernel does.

    torch walks over the arguments of an ``autograd.Function``: it is given those that require gradients, and all
    arguments as one object.
    """

    def __init__(self, op: str, backward: Callable, setup_context: Callable | None) -> None:
        self._overload, self._defaults = overload_of(op), tuple(signature_of(op).values())
        self._count = len(self._defaults)
        self._places = places_of(op)
        types = [str(a.type) for a in self._overload._schema.arguments]
        tensors = [i for i, type_ in enumerate(types) if type_ in ("Tensor", "Optional[Tensor]")]
        # The dispatcher drops trailing arguments that equal their defaults.
        self._tensors = [[i for i in tensors if i < count] for count in range(len(types) + 1)]
        self.list_place = types.index("List[Tensor]") if "List[Tensor]" in types else None
        self._backward, self._setup_context = backward, setup_context
        # torch's compiled autograd takes no bound method as a backward.
        backward_ = staticmethod(lambda *grads: self._gradients(*grads))
        methods = {"forward": staticmethod(self._forward), "backward": backward_}
        function = type(f"{op.replace('.', '_')}_autograd", (torch.autograd.Function,), methods)
        # Function.apply calls this where no transform of torch.func is active; a direct call takes half the time.
        self._apply: Any = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def inputs(self, args: Sequence, kwargs: dict[str, Any]) -> list:
        """The arguments by place, up to the last one by name."""
        inputs, places = self.completed(args), self._places
        for name, given in kwargs.items():
            inputs[places[name]] = given
        del inputs[max(map(places.__getitem__, kwargs)) + 1 :]
        return inputs

    def completed(self, inputs: Sequence) -> list:
        """All arguments by place: ``inputs``, and the defaults of those behind them."""
        return [*inputs, *self._defaults[len(inputs) :]]

    def _require_grad(self, inputs: Sequence) -> list[int]:
        """Places of the arguments that require gradients, and of the list if a tensor in it does."""
        wanted = []  # filled by a loop, as other lists here: a comprehension is a call, whose time is that of the rest
        for i in self._tensors[len(inputs)]:
            if (given := inputs[i]) is not None and getattr(given, "requires_grad", False):
                wanted.append(i)
        if self.list_place is not None and any(t.requires_grad for t in inputs[self.list_place]):
            wanted.append(self.list_place)
            wanted.sort()
        return wanted

    def __call__(self, inputs: Sequence) -> Any:
        wanted = self._require_grad(inputs) if torch.is_grad_enabled() else ()
        if not wanted:
            with torch._C._AutoDispatchBelowAutograd():
                return self._overload(*inputs)
        tensors: list[Tensor] = []
        for i in wanted:
            if i == self.list_place:
                tensors += inputs[i]
            else:
                tensors.append(inputs[i])
        if not torch._C._are_functorch_transforms_active():
            return self._apply((inputs, wanted), *tensors)
        with enable_single_level_autograd_function():  # a node of this level, as kernels of torch's own ops make them
            return self._apply((inputs, wanted), *tensors)

    def _forward(self, ctx: Any, given: tuple[Sequence, list[int]], *_: Tensor) -> Any:
        inputs, wanted = given
        needs: list[Any] = [False] * self._count
        for i in wanted:
            needs[i] = True
        if self.list_place is not None:
            needs[self.list_place] = [t.requires_grad for t in inputs[self.list_place]]
        ctx.needs_input_grad, ctx.wanted = needs, wanted
        with torch._C._AutoDispatchBelowAutograd():
            if torch._C._are_functorch_transforms_active():
                with torch.enable_grad():  # the transforms outside have nodes of their own
                    output = self._overload(*inputs)
            else:
                output = self._overload(*inputs)
        if self._setup_context is not None:
            self._setup_context(ctx, inputs if len(inputs) == self._count else self.completed(inputs), output)
        return output

    def _gradients(self, ctx: Any, *grads: Tensor | None) -> tuple:
        for grad in grads:
            if grad is not None:
                break
        else:  # of ops that have set_materialize_grads(False)
            found: Any = ctx.needs_input_grad
            return None, *(None for i in ctx.wanted for _ in (found[i] if i == self.list_place else (i,)))
        found = self._backward(ctx, *grads)
        if isinstance(found, Tensor):  # an op of one argument: not a tuple of its rows
            found = (found,)
        gradients: list[Tensor | None] = [None]
        for i in ctx.wanted:
            if i == self.list_place:
                gradients += found[i]
            else:
                gradients.append(found[i])
        return tuple(gradients)


def node_of_op(output: Tensor) -> Any:
    """The node of the op that an output is of, or None. Ids of a subclass of Tensor make it an alias of that."""
    node: Any = output.grad_fn
    if node is None or type(node).__weakrefoffset__:
        return node
    return node.next_functions[0][0]  # torch's own nodes have no references


def refuse_tangents(op: str, inputs: Iterable[object]) -> None:
    """Raises NotImplementedError if an argument of ``rec_kernels::<op>``, or a tensor in a list, has a tangent."""
    if forward_ad._current_level < 0:
        return
    for given in inputs:
        for t in given if isinstance(given, list | tuple) else (given,):
            if isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None:
                raise NotImplementedError(
                    f"rec_kernels::{op} has no forward-mode derivative (torch.func.jvp, torch.autograd.forward_ad): "
                    "take it in reverse mode (torch.autograd)"
                )


def refuse_second(op: str) -> None:
    """Has the second derivative through ``rec_kernels::<op>``, a backward op, raise RuntimeError."""

    def backward(ctx, *_) -> NoReturn:
        _refuse(op)

    register_autograd(op, backward)
    REFUSED.add(op)


def differentiable_once(op: str, backward: Callable) -> Callable:
    """``backward`` of ``rec_kernels::<op>``, whose results raise RuntimeError where they are differentiated.

    For backward ops that cannot afford an autograd of their own. Results depend on the gradients that come in and on
    the saved tensors, as far as these require gradients. (``torch.autograd.function.once_differentiable`` refuses only
    where the gradient that comes in is differentiable, too; where it is not, of a sum, say, the derivative is silently
    left out. It also depends on a leaf of its own: torch.autograd.grad would find its inputs unused.)
    """

    @functools.wraps(backward)
    def refusing(ctx, *grads) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        ctx = _RereadableContext(ctx)
        given = (*grads, *ctx.saved_tensors)
        # Inside of torch.func's transforms, a tensor may require a gradient of another level.
        any_level = torch._C._are_functorch_transforms_active()
        sources = [t for t in given if isinstance(t, Tensor) and (any_level or t.requires_grad)]
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not sources:
            return results
        return pytree.tree_map_only(Tensor, lambda result: _Refusal.apply(op, result, *sources), results)

    return refusing


class _RereadableContext:
    """A backward's ``ctx`` whose saved tensors may be read twice; activation checkpointing allows it once."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _Refusal(torch.autograd.Function):
    """A tensor as it is, which depends on others; its derivative is refused."""

    generate_vmap_rule = True

    @staticmethod
    def forward(op: str, result: Tensor, *_sources: Tensor) -> Tensor:
        return result.detach()

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:
        ctx.op = inputs[0]

    @staticmethod
    def backward(ctx, *_) -> NoReturn:
        _refuse(ctx.op)


def _refuse(op: str) -> NoReturn:
    raise RuntimeError(f"rec_kernels::{op} has no second derivative: its op is differentiable once")
