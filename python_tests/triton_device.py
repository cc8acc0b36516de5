"""Device of the Triton tests: a GPU, or CPU tensors in Triton's interpreter; otherwise their file is skipped.

The interpreter must be selected before Triton is imported: test_triton.py runs all test_<op>_triton.py in a subprocess.
By hand: ``TRITON_INTERPRET=1 pytest python_tests/test_expand_triton.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from rec_kernels._triton_versions import UnsupportedTritonError

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def _patch_once_a_launch() -> None:
    """Patches triton.language with the interpreter's functions once per launch and module.

    The interpreter itself repeats this at every call of a device function, which took a third of the tests' time.
    """
    from triton.runtime import interpreter

    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def patch_lang(function: Callable) -> object:
        if function.__module__ in patched:
            return None
        patched.add(function.__module__)
        return patch(function)

    def call(self: object, *args: object, **kwargs: object) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_lang, call


if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("test_triton.py runs this file in Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton")
pytest.importorskip("rec_kernels.triton", exc_type=UnsupportedTritonError)
if INTERPRETED:
    _patch_once_a_launch()
