"""Autograd registration of the package's ops, and refusal of derivatives that do not exist.

``register_autograd`` replaces ``torch.library.register_autograd``, whose traversal of schema and arguments takes
83 microseconds per call with 17 arguments and 294 with 35 if a gradient is required. It also refuses forward-mode
tangents: below autograd they would be dropped, and the derivative would be zero.
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
_has_torch_function = torch._C._has_torch_function  # whether a tensor subclass or a mode overrides the call

#: Ops registered by ``register_autograd``, keyed by id() of their overload, whose hash is slow.
_differentiable: dict[int, Differentiable] = {}
#: Backward ops without a derivative.
REFUSED: set[str] = set()


def overload_of(op: str) -> torch._ops.OpOverload:
    """Returns the default overload of an op ("scale_rows"), or a named one ("embedding_bag.layout")."""
    name, _, overload = op.partition(".")
    return getattr(getattr(_ops, name), overload or "default")


@functools.cache
def signature_of(op: str) -> dict[str, object]:
    """Maps name -> default of the arguments of ``rec_kernels::<op>``, in schema order."""
    return {a.name: a.default_value for a in overload_of(op)._schema.arguments}


@functools.cache
def positions_of(op: str) -> dict[str, int]:
    """Maps name -> position of the arguments of ``rec_kernels::<op>``."""
    return {name: i for i, name in enumerate(signature_of(op))}


def arguments_of(op: str, inputs: tuple, given: dict | None = None) -> dict:
    """Maps the passed arguments of a call to their names in the schema."""
    arguments = dict(zip(signature_of(op), inputs, strict=False))
    return arguments | given if given else arguments


def call(overload: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a differentiable op without the dispatcher, whose overhead dominates a small call.

    The op's autograd kernel, a Python function, is called directly. The dispatcher is needed while torch compiles, for
    tangents, under autocast, inside transforms of torch.func and torch.vmap, whose tensors do not report that they
    require a gradient, and where a TorchFunctionMode or a ``__torch_function__`` overrides the call.
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
            _has_torch_function(inputs)
            or (op.list_position is not None and _has_torch_function(inputs[op.list_position]))
        ):
            return op(inputs)
    return overload(*args, **kwargs)


def register_autograd(op: str, backward: Callable, *, setup_context: Callable | None = None) -> None:
    """Registers the gradient of ``rec_kernels::<op>``.

    Args:
        op: name of the op. At most one argument may be a list of tensors; results are tensors.
        backward: ``backward(ctx, *grads)`` returns a gradient or None per argument of the schema, and a list of them
            for a list of tensors. With a single argument it may return the gradient alone. ``ctx.needs_input_grad``
            has the same structure.
        setup_context: ``setup_context(ctx, inputs, output)`` saves what ``backward`` needs. ``inputs`` are all
            arguments of the schema, including defaults.
    """
    differentiable = Differentiable(op, backward, setup_context)
    _differentiable[id(overload_of(op))] = differentiable

    def kernel(*inputs: Any) -> Any:
        refuse_tangents(op, inputs)
        return differentiable(inputs)

    _implementations.impl(op, kernel, "Autograd")


class Differentiable:
    """Autograd kernel of an op, as a callable.

    torch traverses the arguments of an ``autograd.Function``. To keep that short, the function takes the tensors that
    require gradients, and all arguments as one object.
    """

    def __init__(self, op: str, backward: Callable, setup_context: Callable | None) -> None:
        self._overload, self._defaults = overload_of(op), tuple(signature_of(op).values())
        self._count = len(self._defaults)
        self._positions = positions_of(op)
        types = [str(a.type) for a in self._overload._schema.arguments]
        tensors = [i for i, type_ in enumerate(types) if type_ in ("Tensor", "Optional[Tensor]")]
        # The dispatcher drops trailing arguments that equal their defaults.
        self._tensors = [[i for i in tensors if i < count] for count in range(len(types) + 1)]
        self.list_position = types.index("List[Tensor]") if "List[Tensor]" in types else None
        self._backward, self._setup_context = backward, setup_context
        # torch's compiled autograd accepts no bound method as a backward.
        backward_ = staticmethod(lambda *grads: self._gradients(*grads))
        methods = {"forward": staticmethod(self._forward), "backward": backward_}
        function = type(f"{op.replace('.', '_')}_autograd", (torch.autograd.Function,), methods)
        # Function.apply calls this if no transform of torch.func is active; a direct call takes half the time.
        self._apply: Any = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def inputs(self, args: Sequence, kwargs: dict[str, Any]) -> list:
        """Returns the arguments by position, up to the last one passed by keyword."""
        inputs, positions = self.completed(args), self._positions
        for name, given in kwargs.items():
            inputs[positions[name]] = given
        del inputs[max(map(positions.__getitem__, kwargs)) + 1 :]
        return inputs

    def completed(self, inputs: Sequence) -> list:
        """Returns all arguments by position: ``inputs``, then the defaults of the rest."""
        return [*inputs, *self._defaults[len(inputs) :]]

    def _requiring_grad(self, inputs: Sequence) -> list[int]:
        """Returns the positions of arguments that require gradients, including the list if a tensor in it does."""
        grad_positions = []  # filled by a loop, as other lists here: a comprehension's call would double the time
        for i in self._tensors[len(inputs)]:
            if (given := inputs[i]) is not None and getattr(given, "requires_grad", False):
                grad_positions.append(i)
        if self.list_position is not None and any(t.requires_grad for t in inputs[self.list_position]):
            grad_positions.append(self.list_position)
            grad_positions.sort()
        return grad_positions

    def __call__(self, inputs: Sequence) -> Any:
        grad_positions = self._requiring_grad(inputs) if torch.is_grad_enabled() else ()
        if not grad_positions:
            with torch._C._AutoDispatchBelowAutograd():
                return self._overload(*inputs)
        tensors: list[Tensor] = []
        for i in grad_positions:
            if i == self.list_position:
                tensors += inputs[i]
            else:
                tensors.append(inputs[i])
        if not torch._C._are_functorch_transforms_active():
            return self._apply((inputs, grad_positions), *tensors)
        with enable_single_level_autograd_function():  # a node of this level, as in torch's own ops
            return self._apply((inputs, grad_positions), *tensors)

    def _forward(self, ctx: Any, given: tuple[Sequence, list[int]], *_: Tensor) -> Any:
        inputs, grad_positions = given
        needs: list[Any] = [False] * self._count
        for i in grad_positions:
            needs[i] = True
        if self.list_position is not None:
            needs[self.list_position] = [t.requires_grad for t in inputs[self.list_position]]
        ctx.needs_input_grad, ctx.grad_positions = needs, grad_positions
        with torch._C._AutoDispatchBelowAutograd():
            if torch._C._are_functorch_transforms_active():
                with torch.enable_grad():  # outer transforms record their own nodes
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
        else:  # all None: the op called set_materialize_grads(False)
            needs: Any = ctx.needs_input_grad
            return None, *(None for i in ctx.grad_positions for _ in (needs[i] if i == self.list_position else (i,)))
        by_argument = self._backward(ctx, *grads)
        if isinstance(by_argument, Tensor):  # an op of one argument: do not iterate over rows
            by_argument = (by_argument,)
        gradients: list[Tensor | None] = [None]
        for i in ctx.grad_positions:
            if i == self.list_position:
                gradients += by_argument[i]
            else:
                gradients.append(by_argument[i])
        return tuple(gradients)


def node_of_op(output: Tensor) -> Any:
    """Returns the autograd node of the op that computed ``output``, or None, past the alias of a Tensor subclass."""
    node: Any = output.grad_fn
    if node is None or type(node).__weakrefoffset__:
        return node
    return node.next_functions[0][0]  # torch's own nodes have no weak references


def refuse_tangents(op: str, inputs: Iterable[object]) -> None:
    """Raises NotImplementedError if an argument of ``rec_kernels::<op>``, or a tensor in a list, has a tangent."""
    if forward_ad._current_level < 0:
        return
    for given in inputs:
        for t in given if isinstance(given, list | tuple) else (given,):
            if isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None:
                raise NotImplementedError(
                    f"rec_kernels::{op} has no forward-mode derivative (torch.func.jvp, "
                    "torch.autograd.forward_ad): use reverse mode (torch.autograd)"
                )


def refuse_second_derivative(op: str) -> None:
    """Makes second derivatives through ``rec_kernels::<op>``, a backward op, raise RuntimeError."""

    def backward(ctx, *_) -> NoReturn:
        _refuse(op)

    register_autograd(op, backward)
    REFUSED.add(op)


def differentiable_once(op: str, backward: Callable) -> Callable:
    """Wraps ``backward`` of ``rec_kernels::<op>`` so that differentiating its results raises RuntimeError.

    This suits backward ops for which an autograd registration would be too slow. Results depend on those incoming
    gradients and saved tensors that require gradients. ``torch.autograd.function.once_differentiable`` does not
    suffice: it raises only if the incoming gradient is differentiable, too, and otherwise (a sum's, for example)
    silently drops the derivative. It also depends on its own leaf: torch.autograd.grad would find its inputs unused.
    """

    @functools.wraps(backward)
    def refusing(ctx, *grads) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        ctx = _SavedOnceContext(ctx)
        tensors = (*grads, *ctx.saved_tensors)
        # Inside torch.func's transforms, a tensor may require a gradient at another level.
        any_level = torch._C._are_functorch_transforms_active()
        sources = [t for t in tensors if isinstance(t, Tensor) and (any_level or t.requires_grad)]
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not sources:
            return results
        return pytree.tree_map_only(Tensor, lambda result: _Refusal.apply(op, result, *sources), results)

    return refusing


class _SavedOnceContext:
    """Wrapper of a backward's ``ctx`` that reads saved tensors once, as activation checkpointing requires."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _Refusal(torch.autograd.Function):
    """Identity of a result that also depends on its sources; its backward raises."""

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
