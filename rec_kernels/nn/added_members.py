"""Parameters, buffers and submodules that a subclass adds to a module of this package."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from torch import nn


@contextlib.contextmanager
def only_added(
    module: nn.Module,
    *,
    parameters: Collection[str] = (),
    buffers: Collection[str] = (),
    modules: Collection[str] = (),
) -> Iterator[None]:
    """Hides the named members within the block, so that a method of nn.Module sees only the members a subclass added.

    On exit, ``module`` has all members again, in their original order.
    """
    hidden = {"_parameters": parameters, "_buffers": buffers, "_modules": modules}
    before = {kind: module.__dict__[kind] for kind in hidden}
    for kind, names in hidden.items():
        module.__dict__[kind] = {name: member for name, member in before[kind].items() if name not in names}
    try:
        yield
    finally:
        for kind, members in before.items():
            members.update(module.__dict__[kind])
            module.__dict__[kind] = members
