"""Parameters of tables, which are views of the flat tensor that lookups read: whether they still are."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from rec_kernels.nn.tables.feature_map import FeatureMap
from rec_kernels.nn.tables.load_state import format_tensor
from rec_kernels.nn.tables.parameters import RequiresGrad, Tables

_weight, _data_ptr = itemgetter("weight"), Tensor.data_ptr


class Tied(NamedTuple):
    """The flat tensor; of its tables names, the dicts that hold parameters, bytes before them, and their addresses.

    ``written``: name -> version counter of the parameter, of tables in a file: whoever writes it has other memory.
    """

    flat: Tensor
    names: list[str]
    parameters: list[Mapping[str, Tensor | None]]
    offsets: list[int]
    addresses: list[int]
    written: dict[str, int]

    def note_written(self) -> None:
        """Takes the parameters of tables in a file as they are."""
        for name in self.written:
            self.written[name] = self._weight(name)._version

    def _weight(self, name: str) -> Tensor:
        return self.parameters[self.names.index(name)]["weight"]

    def add(self, name: str, parameters: Mapping[str, Tensor | None], view: Tensor) -> None:
        """A table, unless it has no memory."""
        address = _address(view)
        if address:
            self.names.append(name)
            self.parameters.append(parameters)
            self.offsets.append(address - _address(self.flat))
            self.addresses.append(address)


def tie_tables(
    tables: Tables, features: FeatureMap, weights: Tensor, buffers: Mapping[str, Tensor | None], *, is_fused: bool
) -> Tied:
    """Makes the parameters of ``tables`` views of the flat tensors, and names formats beside them.

    Args:
        weights: the flat tensor of all rows. buffers: with those of the optimizer's state, as ``_<kind>``.
        is_fused: whether a fused optimizer trains the tables.
    """
    tied = Tied(weights, [], [], [], [], {})
    for i, table in enumerate(features.stored):
        holder, view = tables[table.name], features.storage.view(weights, i)
        if holder.in_file:  # a counter of its own, which lookups and updates do not move
            view = view.data
            tied.written[table.name] = 0
        grad = holder.weight.grad
        if torch._has_compatible_shallow_copy_type(holder.weight, view):
            show(holder.weight, view, is_fused=is_fused)
        else:
            before = holder.weight
            holder.weight = nn.Parameter(view, requires_grad=before.requires_grad)
            RequiresGrad.hand_on(before, holder.weight)
        if grad is not None and grad.device != view.device:
            holder.weight.grad = torch.empty_like(grad, device=view.device) if grad.is_meta else grad.to(view.device)
        if view.dtype == torch.uint8:
            holder.register_buffer("format", format_tensor(table.format, view.device))
            holder.weight.__dict__.setdefault("requires_grad_", RequiresGrad())
        state = features.state_of(i)
        for kind in state.kinds:
            flat = buffers[features.state_name(kind, features.number_of(i))]
            holder.register_buffer(kind, state.view(kind, flat, i))
        tied.add(table.name, holder._parameters, view)
    tied.note_written()
    return tied


def show(parameter: nn.Parameter, view: Tensor, *, is_fused: bool) -> None:
    """Has a table's parameter be a view of the flat tensor.

    Where a fused optimizer trains it, it has the flat tensor's version counter, too, so that autograd knows of updates
    when it has saved the parameter. ``.data`` leaves a parameter the counter that it has.
    """
    if is_fused or not parameter.requires_grad:
        counted = nn.Parameter(view, requires_grad=parameter.requires_grad)
        counted.__dict__.update(parameter.__dict__)
        try:
            torch.utils.swap_tensors(parameter, counted)
            hooks = parameter._post_accumulate_grad_hooks
            if hooks is not None:
                parameter._post_accumulate_grad_hooks = hooks  # torch leaves them with what was swapped away
            return
        except RuntimeError:  # somebody has a weak reference
            pass
    parameter.data = view


def refuse_written(tied: Tied) -> None:
    """Raises RuntimeError if somebody has written the parameter of a table in a file."""
    for name, version in tied.written.items():
        if tied._weight(name)._version != version:
            raise RuntimeError(
                f"the weight of table {name!r} was written, and the table is in a file: the weight has memory for the "
                "rows that were loaded last, and what is written to it may or may not be lost. close() the collection, "
                "which keeps the rows of the last flush(), and open the file anew; a new table begins with the rows "
                "that its config's init writes"
            )


def refuse_replaced(tied: Tied) -> None:
    """Raises RuntimeError if a table has another parameter, or its parameter other memory or numbers that are lost.

    Tensors without memory pass: torch traces with them.
    """
    if tied.written:
        refuse_written(tied)
    # First in as few steps as Python has: a small lookup takes some 50 us, and of 26 tables this 2.
    try:
        # Within a mode, tensors may be fake, which warn of this.
        if not is_in_torch_dispatch_mode() and list(map(_data_ptr, map(_weight, tied.parameters))) == tied.addresses:
            return
    except (KeyError, TypeError, RuntimeError):  # no parameter, None, or no memory: see below
        pass
    # All of them may be elsewhere: torch.multiprocessing moves what it sends into shared memory.
    base = _address(tied.flat)
    tied.addresses[:] = [base + offset for offset in tied.offsets]
    for name, parameters, address in zip(tied.names, tied.parameters, tied.addresses, strict=True):
        weight = parameters.get("weight")
        if weight is None or _is_transformed(weight) or _address(weight) not in (address, 0):
            raise RuntimeError(
                f"the weight of table {name!r} has been replaced, and lookups read the memory that it was a view of: "
                "write it in place, with load_state_dict(), or with copy_() or torch.nn.init under torch.no_grad(); "
                "assignments, .data, torch.func.functional_call, vector_to_parameters, parametrizations and "
                "fully_shard without ignored_params= do not"
            )


def _is_transformed(t: Tensor) -> bool:
    """True of a tensor that vmap or grad of torch.func has put in the place of another one."""
    return torch._C._functorch.is_batchedtensor(t) or torch._C._functorch.is_gradtrackingtensor(t)


def _address(t: Tensor) -> int:
    """Address of its first element; 0: it has none, as on the meta device and under torch's tracers and transforms."""
    if isinstance(t, FakeTensor):
        return 0
    try:
        return t.data_ptr() if t.untyped_storage().data_ptr() else 0
    except RuntimeError:
        return 0
