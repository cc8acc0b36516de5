"""Table parameters as views of the flat tensor that lookups read, and checks that they still are."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from rec_kernels.nn.tables.feature_map import FeatureMap
from rec_kernels.nn.tables.load_state import format_tensor
from rec_kernels.nn.tables.parameters import RequiresGrad, Tables

_weight, _data_ptr = itemgetter("weight"), Tensor.data_ptr


class Tied(NamedTuple):
    """The flat tensor, and each table's name, parameter dict, byte offset and address.

    ``written``: name -> the parameter's version counter, for tables in a file, to detect writes to the parameter.
    """

    flat: Tensor
    names: list[str]
    parameters: list[Mapping[str, Tensor | None]]
    offsets: list[int]
    addresses: list[int]
    written: dict[str, int]

    def note_written(self) -> None:
        """Records the current version counters of tables in a file."""
        for name in self.written:
            self.written[name] = self._weight(name)._version

    def _weight(self, name: str) -> Tensor:
        return self.parameters[self.names.index(name)]["weight"]

    def add(self, name: str, parameters: Mapping[str, Tensor | None], view: Tensor) -> None:
        """Adds a table, unless it has no memory."""
        address = _address(view)
        if address:
            self.names.append(name)
            self.parameters.append(parameters)
            self.offsets.append(address - _address(self.flat))
            self.addresses.append(address)


def tie_tables(
    tables: Tables, features: FeatureMap, weights: Tensor, buffers: Mapping[str, Tensor], *, is_fused: bool
) -> Tied:
    """Makes the parameters of ``tables`` views of the flat tensors, and registers format and state buffers.

    Args:
        weights: the flat tensor of all rows. buffers: the collection's buffers, with optimizer state as ``_<kind>``.
        is_fused: True if a fused optimizer trains the tables.
    """
    tied = Tied(weights, [], [], [], [], {})
    for i, table in enumerate(features.stored):
        holder, view = tables[table.name], features.storage.view(weights, i)
        if holder.in_file:  # a separate version counter, which lookups and updates do not advance
            view = view.data
            tied.written[table.name] = 0
        grad = holder.weight.grad
        if torch._has_compatible_shallow_copy_type(holder.weight, view):
            show(holder.weight, view, is_fused=is_fused)
        else:
            before = holder.weight
            holder.weight = nn.Parameter(view, requires_grad=before.requires_grad)
            RequiresGrad.copy_to(before, holder.weight)
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
    """Makes a table's parameter a view of the flat tensor.

    With a fused optimizer it also shares the flat tensor's version counter, so that autograd detects updates of a saved
    parameter. Assigning ``.data`` would keep the old counter.
    """
    if is_fused or not parameter.requires_grad:
        counted = nn.Parameter(view, requires_grad=parameter.requires_grad)
        counted.__dict__.update(parameter.__dict__)
        try:
            torch.utils.swap_tensors(parameter, counted)
            hooks = parameter._post_accumulate_grad_hooks
            if hooks is not None:
                parameter._post_accumulate_grad_hooks = hooks  # swap_tensors leaves them on the other tensor
            return
        except RuntimeError:  # weak references to the parameter exist
            pass
    parameter.data = view


def pickled_members(collection: Any, protocol: int) -> dict[str, Any]:
    """The members of a collection that are pickled in another form, by name.

    pickle writes the whole storage for every view, so views are dropped. torch.save (protocol 2) writes a storage once,
    and refuses views of several dtypes, so views of one may stay. They must stay if an optimizer of torch may be
    pickled together with the collection, because it must refer to the same parameters afterwards; bytes under views of
    a dtype are dropped then.
    """
    storage, is_saved = collection._features.storage, protocol <= 2
    if collection._trained_by_torch and not (is_saved and storage.is_mixed):
        return {"_weights": None} if storage.is_bytes else {}
    if is_saved and not storage.is_bytes:
        return {}
    return {"_modules": {**collection._modules, collection._holder: collection._tables.without_rows()}}


def refuse_written(tied: Tied) -> None:
    """Raises RuntimeError if the parameter of a table in a file was written."""
    for name, version in tied.written.items():
        if tied._weight(name)._version != version:
            raise RuntimeError(
                f"the weight of table {name!r} was written, but the table is in a file: only the rows loaded "
                "last are in memory, and other writes may be lost. close() the collection, which keeps the "
                "rows of the last flush(), and reopen the file; a new table starts with the rows that its "
                "config's init writes"
            )


def refuse_replaced(tied: Tied) -> None:
    """Raises RuntimeError if a table's parameter was replaced, moved to other memory, or written in a file.

    Tensors without memory pass, because torch traces with them.
    """
    if tied.written:
        refuse_written(tied)
    # Fast path: a small lookup takes about 50 us, and this 2 us for 26 tables.
    try:
        # Within a dispatch mode tensors may be fake, whose data_ptr() warns.
        if not is_in_torch_dispatch_mode() and list(map(_data_ptr, map(_weight, tied.parameters))) == tied.addresses:
            return
    except (KeyError, TypeError, RuntimeError):  # no parameter, None, or no memory: handled below
        pass
    # The flat tensor itself may have moved: torch.multiprocessing moves tensors to shared memory.
    base = _address(tied.flat)
    tied.addresses[:] = [base + offset for offset in tied.offsets]
    for name, parameters, address in zip(tied.names, tied.parameters, tied.addresses, strict=True):
        weight = parameters.get("weight")
        if weight is None or _is_transformed(weight) or _address(weight) not in (address, 0):
            raise RuntimeError(
                f"the weight of table {name!r} has been replaced, but lookups still read the memory that it was "
                "a view of: write it in place, with load_state_dict(), or with copy_() or torch.nn.init under "
                "torch.no_grad(). Assignments, .data, torch.func.functional_call, vector_to_parameters, "
                "parametrizations and fully_shard without ignored_params= replace it"
            )


def _is_transformed(t: Tensor) -> bool:
    """True if torch.func's vmap or grad has wrapped the tensor."""
    return torch._C._functorch.is_batchedtensor(t) or torch._C._functorch.is_gradtrackingtensor(t)


def _address(t: Tensor) -> int:
    """Address of the first element; 0 without memory, as on the meta device and under tracers and transforms."""
    if isinstance(t, FakeTensor):
        return 0
    try:
        return t.data_ptr() if t.untyped_storage().data_ptr() else 0
    except RuntimeError:
        return 0
