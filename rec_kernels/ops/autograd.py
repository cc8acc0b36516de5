"""Autograd of the package's ops: one registration for all of them, and what ops have no derivative of.

``register_autograd`` has the meaning of ``torch.library.register_autograd``, whose walks over schema and arguments take
83 microseconds a call at 17 arguments and 294 at 35 where a gradient is required. It also refuses forward-mode
tangents, which would be dropped below autograd: the derivative would be zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

_ops = torch.ops.rec_kernels
_implementations = torch.library.Library("rec_kernels", "IMPL")
_any_requires_grad = torch._C._any_requires_grad  # looks into lists of tensors, too

#: Overload -> its autograd kernel, as a function of arguments by place and by name.
_differentiated: dict[Any, Callable[[tuple, dict[str, Any]], Any]] = {}
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


def arguments_of(op: str, inputs: tuple, given: dict | None = None) -> dict:
    """The arguments of a call by their names in the schema, as far as they were given."""
    return dict(zip(signature_of(op), inputs, strict=False)) | (given or {})


def call(overload: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls an op, past the ways of the dispatcher that a small call spends most of its time on.

    Where no gradient can be asked for, its autograd kernel, which is Python, is left out. Where one can, that kernel is
    called as a function. The dispatcher itself is needed while torch compiles, for tangents, inside transforms of
    torch.func and torch.vmap, whose tensors do not say that they require a gradient, and under autocast.
    """
    if (
        torch.compiler.is_compiling()
        or forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_any_autocast_enabled()
    ):
        return overload(*args, **kwargs)
    if torch.is_grad_enabled() and _any_requires_grad(*args, **kwargs):
        differentiated = _differentiated.get(overload)
        return differentiated(args, kwargs) if differentiated else overload(*args, **kwargs)
    with torch._C._AutoDispatchBelowAutograd():
        return overload(*args, **kwargs)


def call_eagerly_with(op: str, function: Callable[[tuple, dict[str, Any]], Any]) -> None:
    """Has ``call`` call another function than the autograd kernel of ``rec_kernels::<op>``, with the same gradients."""
    _differentiated[overload_of(op)] = function


def register_autograd(op: str, backward: Callable, *, setup_context: Callable | None = None) -> None:
    """Gives ``rec_kernels::<op>`` a gradient.

    Args:
        op: its name. At most one argument may be a list of tensors; results are tensors.
        backward: ``backward(ctx, *grads)`` returns a gradient, or None, for each argument of the schema; for a list of
            tensors, a list of them. ``ctx.needs_input_grad`` has an element, or a tuple of them, for each argument.
        setup_context: ``setup_context(ctx, inputs, output)`` keeps what ``backward`` needs. ``inputs`` are all
            arguments of the schema, defaults included.
    """
    overload, defaults = overload_of(op), tuple(signature_of(op).values())
    lists = [i for i, a in enumerate(overload._schema.arguments) if str(a.type) == "List[Tensor]"]
    place = lists[0] if lists else None

    def forward(ctx, *flat: Any) -> Any:
        inputs = flat if place is None else _nested(flat, place, len(defaults))
        with torch._C._AutoDispatchBelowAutograd():
            output = overload(*inputs)
        if setup_context is not None:
            setup_context(ctx, inputs, output)
        return output

    def flat_backward(ctx, *grads: Tensor | None) -> tuple:
        if place is None:
            return backward(ctx, *grads)
        wanted = ctx.needs_input_grad
        ctx.needs_input_grad = _nested(wanted, place, len(defaults))
        try:
            return _flat(backward(ctx, *grads), place)
        finally:
            ctx.needs_input_grad = wanted

    methods = {"forward": staticmethod(forward), "backward": staticmethod(flat_backward)}
    function: Any = type(f"{op.replace('.', '_')}_autograd", (torch.autograd.Function,), methods)
    # What Function.apply calls where no transform of torch.func is active: it costs half of apply.
    apply = super(torch.autograd.Function, function).apply

    def kernel(*inputs: Any) -> Any:
        refuse_tangents(op, inputs)
        if not (torch.is_grad_enabled() and _any_requires_grad(*inputs)):
            with torch._C._AutoDispatchBelowAutograd():
                return overload(*inputs)
        return differentiated(inputs, {})

    def differentiated(args: tuple, kwargs: dict[str, Any]) -> Any:
        inputs = [*args, *defaults[len(args) :]]  # the dispatcher drops trailing arguments that equal their defaults
        for name, given in kwargs.items():
            inputs[places[name]] = given
        flat = inputs if place is None else _flat(tuple(inputs), place)
        return function.apply(*flat) if torch._C._are_functorch_transforms_active() else apply(*flat)

    places = {name: i for i, name in enumerate(signature_of(op))}
    _differentiated[overload] = differentiated
    _implementations.impl(op, kernel, "Autograd")


def _flat(inputs: tuple, place: int) -> tuple:
    """The arguments with the elements of the list at ``place`` as arguments of their own."""
    return (*inputs[:place], *inputs[place], *inputs[place + 1 :])


def _nested(flat: tuple, place: int, count: int) -> tuple:
    """The ``count`` arguments that ``_flat`` made ``flat`` of."""
    end = len(flat) - (count - place - 1)
    return (*flat[:place], flat[place:end], *flat[end:])


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
        ctx = _LookedAt(ctx)
        given = (*grads, *ctx.saved_tensors)
        sources = [t for t in given if isinstance(t, Tensor) and t.requires_grad]
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not sources:
            return results
        return pytree.tree_map_only(Tensor, lambda result: _Refusal.apply(op, result, *sources), results)

    return refusing


class _LookedAt:
    """A backward's ``ctx`` whose saved tensors may be read twice; activation checkpointing allows it once."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _Refusal(torch.autograd.Function):
    """A tensor as it is, which depends on others; its derivative is refused."""

    @staticmethod
    def forward(ctx, op: str, result: Tensor, *_sources: Tensor) -> Tensor:
        ctx.op = op
        return result.detach()

    @staticmethod
    def backward(ctx, *_) -> NoReturn:
        _refuse(ctx.op)


def _refuse(op: str) -> NoReturn:
    raise RuntimeError(f"rec_kernels::{op} has no second derivative: its op is differentiable once")
