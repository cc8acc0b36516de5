"""``load_state_dict(assign=True)`` of tables: what the flat tensors and ``for_serving()`` share stays where it is."""

from __future__ import annotations

from torch import Tensor, nn

_ASSIGN = "assign_to_params_buffers"  # torch's own name for it, in every module's metadata


def assigns(local_metadata: dict) -> bool:
    """Whether a state's tensors are to take the place of a module's."""
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
