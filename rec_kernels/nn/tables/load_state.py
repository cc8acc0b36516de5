"""Checks, conversions and allocations on a state before it is loaded into a collection."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from rec_kernels.nn.tables.config import BAG_FORMATS, StoredTable
from rec_kernels.nn.tables.rows import convert as convert_rows
from rec_kernels.ops.row_formats import FLOAT_DTYPES, FLOAT_FORMATS, row_bytes

_ASSIGN = "assign_to_params_buffers"  # torch's key in every module's metadata


def assigns(local_metadata: dict) -> bool:
    """True if loading assigns the state's tensors instead of copying (``load_state_dict(assign=True)``)."""
    return local_metadata.get(_ASSIGN, False)


def copied(local_metadata: dict) -> dict:
    """The metadata with ``assign=False``, for tensors that optimizers and other modules also reference."""
    return {**local_metadata, _ASSIGN: False}


def allocate(module: nn.Module, state: dict[str, Tensor | None], prefix: str) -> None:
    """Allocates a collection on the meta device, on the device of the state that will be assigned to it.

    Args:
        state: the state's entry for each name of the collection; None: missing. If no entry has memory, the collection
            is unchanged.

    Raises:
        RuntimeError: only some entries have memory; the others would be undefined.
    """
    real = {name: t for name, t in state.items() if isinstance(t, Tensor) and not t.is_meta}
    # Format names are optional: the collection knows its formats.
    missing = [prefix + name for name in state if name not in real and not name.endswith(".format")]
    if not real:
        return
    if missing:
        raise RuntimeError(
            f"{', '.join(missing)}: not in the state. On the meta device, load_state_dict(assign=True) needs "
            "the collection's whole state; otherwise allocate its memory with to_empty() first; none of its "
            "tables was changed"
        )
    # ``step`` has the collection's device even if tables are in host memory.
    module.to_empty(device=real.get("step", next(iter(real.values()))).device)


def check_tensors(state_dict: dict, prefix: str, own: Mapping[str, Tensor]) -> None:
    """Raises RuntimeError if a tensor of a state cannot be copied into the collection's, ``own``.

    Shapes must be equal. Floats must be real, of any precision, and tensors must have memory. ``step`` and beta powers
    must have values that training can produce.
    """
    for name, tensor in own.items():
        given = state_dict.get(prefix + name, tensor)
        if not isinstance(given, Tensor) or given.shape != tensor.shape:
            found = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise RuntimeError(
                f"size mismatch for {prefix}{name}: the state has {found}, this collection has {list(tensor.shape)}; "
                "none of its tables was changed"
            )
        of_kind = given.dtype.is_floating_point or not (tensor.dtype.is_floating_point or given.dtype.is_complex)
        if not of_kind or given.layout != torch.strided or (given.is_meta and not tensor.is_meta):
            where = "on the meta device" if given.is_meta else f"of layout {given.layout}"
            raise RuntimeError(
                f"{prefix}{name}: the state has {given.dtype} {where}, this collection has {tensor.dtype}, "
                "which can only be copied from strided tensors of its kind; none of its tables was changed"
            )
        if not given.is_meta and not isinstance(given, FakeTensor):
            _check_numbers(name, given, prefix)


def _check_numbers(name: str, given: Tensor, prefix: str) -> None:
    """Raises RuntimeError if a state's ``step`` or beta powers have values that training cannot produce."""
    if name == "step":
        number = given.item()
        allowed, fits = "a whole number, at least 0 and below 2^63", 0 <= number < 2**63 and number == int(number)
    elif name.startswith("beta_powers"):
        allowed, fits = "numbers in [0, 1]", all(0 <= power <= 1 for power in given.tolist())
    else:
        return
    if not fits:
        raise RuntimeError(
            f"{prefix}{name} must be {allowed}, the state has {given.tolist()}; none of the collection's tables was "
            "changed"
        )


def refuse_names(missing: list[str], unexpected: list[str]) -> None:
    """Raises RuntimeError for missing or unexpected keys, like a strict ``torch.nn.Module.load_state_dict``."""
    kinds = {"Missing": missing, "Unexpected": unexpected}
    if errors := [f"{kind} key(s) in state_dict: {', '.join(names)}" for kind, names in kinds.items() if names]:
        raise RuntimeError("; ".join([*errors, "none of the collection's tables was changed"]))


def rename(state_dict: dict, before: str, after: str) -> None:
    """Replaces the prefix ``before`` of names in a state by ``after``."""
    for name in [name for name in state_dict if name.startswith(before)]:
        state_dict[after + name.removeprefix(before)] = state_dict.pop(name)


def begin_without_step(state_dict: dict, prefix: str, own: Mapping[str, Tensor]) -> None:
    """Adds ``step`` = 0 to a state that lacks only ``step`` of the collection's names, ``own``.

    Other packages' states have no ``step``. A state that lacks more is unchanged, and torch reports the missing keys.
    """
    missing = [name for name in own if prefix + name not in state_dict]
    if missing == ["step"]:
        beside = next(state_dict[prefix + name] for name in own if name != "step")
        state_dict[f"{prefix}step"] = torch.zeros((), dtype=own["step"].dtype, device=beside.device)


def format_tensor(name: str, device: torch.device | None = None) -> Tensor:
    """Encodes a format's name as a uint8 tensor of its characters, because a state has only tensors."""
    return torch.tensor(list(name.encode()), dtype=torch.uint8, device=device)


def fit_formats(state: dict, prefix: str, tables: list[StoredTable], *, convert: bool) -> None:
    """Converts, in a state, the rows of tables whose format differs from that of ``tables``. It may raise half-way.

    Args:
        state: name -> tensor; names of the collection's tables start with ``prefix``. Missing tables are ignored.
        convert: True to convert tables in other formats.

    Raises:
        RuntimeError: a table is in another format and ``convert`` is False, or its format is not supported, or its row
            width does not fit its format and the table's columns.
    """
    for table in tables:
        name = f"{prefix}{table.name}"
        rows = state.get(f"{name}.weight")
        found = format_of_state(rows, state.get(f"{name}.format"), table)
        if found in (None, table.format):
            continue
        if found not in BAG_FORMATS:
            raise RuntimeError(
                f"{name}.format must be the row format of {name}.weight, one of {', '.join(BAG_FORMATS)}, got "
                f"{found!r}; no table of the collection was changed"
            )
        if not convert:
            raise RuntimeError(
                f"{name}.weight has rows of format {found}, this collection's are {table.format}: pass "
                "convert=True to the collection's load_state_dict(), or call a model's inside the collection's "
                "convert_formats(); none of its tables was changed"
            )
        width = table.embedding_dim if found in FLOAT_DTYPES else row_bytes(found, table.embedding_dim)
        if rows.dim() != 2 or rows.shape[1] != width:
            raise RuntimeError(
                f"size mismatch for {name}.weight: {list(rows.shape)}, but rows of format {found} are {width} "
                f"wide for {table.embedding_dim} columns; no table of the collection was changed"
            )
        state[f"{name}.weight"] = convert_rows(rows, found, table.format, table.embedding_dim)
        state.pop(f"{name}.format", None)
        if table.format not in FLOAT_DTYPES:
            state[f"{name}.format"] = format_tensor(table.format)


def format_of_state(rows: object, name: object, table: StoredTable) -> str | None:
    """The format of rows in a state. None: unknown, or floats that torch casts. "": bytes without a format name."""
    if not isinstance(rows, Tensor):
        return None
    if rows.dtype in FLOAT_FORMATS:
        return FLOAT_FORMATS[rows.dtype]
    if rows.dtype != torch.uint8:
        return None if table.format in FLOAT_DTYPES else "fp32"
    if isinstance(name, FakeTensor):
        return None
    if not isinstance(name, Tensor) or name.dtype != torch.uint8 or name.dim() != 1:
        return ""  # two formats may have rows of one width
    return bytes(name.tolist()).decode(errors="replace")
