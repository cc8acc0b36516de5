"""States that are loaded into a collection: what is checked, converted and allocated before a table is written."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from rec_kernels.nn.tables.config import BAG_FORMATS, StoredTable
from rec_kernels.nn.tables.rows import convert as convert_rows
from rec_kernels.ops.row_formats import FLOAT_DTYPES, row_bytes

_ASSIGN = "assign_to_params_buffers"  # torch's own name for it, in every module's metadata


def assigns(local_metadata: dict) -> bool:
    """True if a state's tensors are to take the place of a module's."""
    return local_metadata.get(_ASSIGN, False)


def copied(local_metadata: dict) -> dict:
    """The metadata of a module whose tensors are copied into: an optimizer and other modules hold them, too."""
    return {**local_metadata, _ASSIGN: False}


def allocate(module: nn.Module, state: dict[str, Tensor | None], prefix: str) -> None:
    """Gives a collection on the meta device memory on the device of a state that is to be assigned to it.

    Args:
        state: what the state has for each name of the collection's; None: nothing. If it has no numbers at all,
            the collection stays as it is.

    Raises:
        RuntimeError: some are missing. They have no start, and could not stay on the meta device beside the others.
    """
    real = {name: t for name, t in state.items() if isinstance(t, Tensor) and not t.is_meta}
    # The name of a format says nothing that the collection does not know.
    missing = [prefix + name for name in state if name not in real and not name.endswith(".format")]
    if not real:
        return
    if missing:
        raise RuntimeError(
            f"{', '.join(missing)}: not in the state, and this collection is on the meta device, where "
            "load_state_dict(assign=True) needs all of its state; or give it memory with to_empty() first; none of its "
            "tables was changed"
        )
    # Tables in host memory go with a step on the GPU.
    module.to_empty(device=real.get("step", next(iter(real.values()))).device)


def check_tensors(state_dict: dict, prefix: str, own: Mapping[str, Tensor]) -> None:
    """Raises RuntimeError if a tensor of a state cannot be copied into the collection's, ``own``.

    A shape must be the collection's. Floats must be given as real floats, of any precision, and tensors have numbers;
    the count of updates and the powers of betas are such as training makes.
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
                f"{prefix}{name}: the state has {given.dtype} {where}, this collection has {tensor.dtype}, which can "
                "be copied from strided numbers of its kind; none of its tables was changed"
            )
        if not given.is_meta and not isinstance(given, FakeTensor):
            _check_numbers(name, given, prefix)


def _check_numbers(name: str, given: Tensor, prefix: str) -> None:
    """Raises RuntimeError if a state's count of updates, or its powers of betas, are numbers that no training makes."""
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
    """Raises RuntimeError, as a strict ``torch.nn.Module.load_state_dict`` does, if a list has names of a state."""
    kinds = {"Missing": missing, "Unexpected": unexpected}
    if told := [f"{kind} key(s) in state_dict: {', '.join(names)}" for kind, names in kinds.items() if names]:
        raise RuntimeError("; ".join([*told, "none of the collection's tables was changed"]))


def rename(state_dict: dict, before: str, after: str) -> None:
    """Gives tensors of a state whose names begin with ``before`` names that begin with ``after``."""
    for name in [name for name in state_dict if name.startswith(before)]:
        state_dict[after + name.removeprefix(before)] = state_dict.pop(name)


def begin_without_step(state_dict: dict, prefix: str, own: Mapping[str, Tensor]) -> None:
    """Adds a ``step`` of 0 to a state that has everything of the collection's, ``own``, but its ``step``.

    Other packages' states have none. A state that lacks more is left as it is, for torch to name what is missing.
    """
    missing = [name for name in own if prefix + name not in state_dict]
    if missing == ["step"]:
        beside = next(state_dict[prefix + name] for name in own if name != "step")
        state_dict[f"{prefix}step"] = torch.zeros((), dtype=own["step"].dtype, device=beside.device)


def format_tensor(name: str, device: torch.device | None = None) -> Tensor:
    """A format's name as a tensor, its characters' codes: a state has tensors only."""
    return torch.tensor(list(name.encode()), dtype=torch.uint8, device=device)


def fit_formats(state: dict, prefix: str, tables: list[StoredTable], *, convert: bool) -> None:
    """Replaces, in a state, tables whose rows are in another format than those of ``tables``.

    Args:
        state: names to tensors, those of a collection's tables behind ``prefix``. Missing ones are not looked at.
        convert: whether tables in another format are converted.

    Raises:
        RuntimeError: a table is in another format and ``convert`` is False, or in one that tables cannot have, or its
            rows are not of the width that its format and the table's columns ask for.
    """
    fitting: dict[str, Tensor | None] = {}
    for table in tables:
        name = f"{prefix}{table.name}"
        rows = state.get(f"{name}.weight")
        found = format_of_state(rows, state.get(f"{name}.format"), table)
        if found in (None, table.format):
            continue
        if found not in BAG_FORMATS:
            raise RuntimeError(
                f"{name}.format must name the rows of {name}.weight, as one of {', '.join(BAG_FORMATS)}, got "
                f"{found!r}; no table of the collection was changed"
            )
        if not convert:
            raise RuntimeError(
                f"{name}.weight has rows of format {found}, this collection's are {table.format}: "
                "load_state_dict(..., convert=True) of the collection converts them, or its convert_formats() around "
                "that of a model; none of its tables was changed"
            )
        width = table.embedding_dim if found in FLOAT_DTYPES else row_bytes(found, table.embedding_dim)
        if rows.dim() != 2 or rows.shape[1] != width:
            raise RuntimeError(
                f"size mismatch for {name}.weight: {list(rows.shape)} with rows of format {found}, which are {width} "
                f"wide for {table.embedding_dim} columns; no table of the collection was changed"
            )
        fitting[f"{name}.weight"] = convert_rows(rows, found, table.format, table.embedding_dim)
        fitting[f"{name}.format"] = None if table.format in FLOAT_DTYPES else format_tensor(table.format)
    state.update(fitting)
    for name in [name for name, value in fitting.items() if value is None]:
        del state[name]


def format_of_state(rows: object, name: object, table: StoredTable) -> str | None:
    """None: nothing that could be told, or floats that torch casts to the table's own. "": bytes of no named format."""
    if not isinstance(rows, Tensor):
        return None
    for format, dtype in FLOAT_DTYPES.items():
        if rows.dtype == dtype:
            return format
    if rows.dtype != torch.uint8:
        return None if table.format in FLOAT_DTYPES else "fp32"
    if isinstance(name, FakeTensor):
        return None
    if not isinstance(name, Tensor) or name.dtype != torch.uint8 or name.dim() != 1:
        return ""  # two formats may have rows of one width
    return bytes(name.tolist()).decode(errors="replace")
