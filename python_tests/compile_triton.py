"""Compiles every Triton kernel for NVIDIA and AMD GPUs, without a GPU.

test_triton.py runs this file in a subprocess; on the command line, names of ops restrict it to them. The functions of
rec_kernels.triton are called as usual, but a launch compiles the kernel for its arguments instead of running it, for
the targets of ``architectures``. Prints Triton's version, then one line per kernel and target: the architecture, the
kernel (with its row format, or precision and dtype), the numbers of PTX instructions that fuse a multiplication and an
addition, divide exactly, round to BF16, approximate or flush denormals, and multiply tiles of TF32 and of half
precision; and the bytes of shared memory per program.
"""

from __future__ import annotations

import re
import sys

import torch
import triton
from embedding_bag_cases import make_case
from layout_calls import ListOps
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

import rec_kernels as rk
import rec_kernels.triton as kernels
from rec_kernels.triton import dot_interaction, factorization_machine, grouped_projection
from rec_kernels.triton.fake_quantize import fake_quantize

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),  # large tiles use other matrix instructions
    "sm_100": GPUTarget("cuda", 100, 32),  # large tiles use other matrix instructions
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
COUNTED = [
    *(r"fma\.rn\.f32", r"div\.rn\.f32", r"cvt\.rn\.bf16", r"\.(approx|full|ftz)\."),
    r"mma(?:\.sync|_async).*\.tf32\.tf32|tcgen05\.mma.*kind::tf32",
    r"mma(?:\.sync|_async).*\.(?:b?f16)\.(?:b?f16)|tcgen05\.mma.*kind::f16",
]
OPS = ("embedding_bag", "expand", "fake_quantize", "grouped_projection", "dot_interaction", "factorization_machine")
_seen: set[tuple] = set()
_kernels: set[str] = set()


def even(argument: object) -> bool:
    """True if an address or a size is a multiple of 16."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr() % 16 == 0
    return type(argument) is int and argument % 16 == 0


def architectures(kernel: str, has_products: bool) -> list[str]:
    """Returns the targets for which a launch of a kernel is compiled; the first launch of a kernel has more.

    The installed Triton compiles every launch for sm_90. The other targets, and Triton 3.6, compile the first launch of
    each kernel; therefore calls below begin with full tiles, with noise and with every option of an update. Kernels
    without products have the same PTX on all NVIDIA GPUs, except two conversions; those with products are compiled for
    sm_80 and sm_100 in float32 with the most passes and in float16. Triton 3.6 supports only NVIDIA GPUs here.
    """
    oldest, is_first = triton.__version__.startswith("3.6."), kernel not in _kernels
    _kernels.add(kernel)
    everywhere = has_products and kernel.endswith(("-tf32x3-fp32", "-fp16"))
    selected = {
        "sm_80": is_first and everywhere,
        "sm_90": is_first or not oldest,
        "sm_100": is_first and everywhere,
        "gfx942": is_first and not oldest,
    }
    return [name for name in TARGETS if selected[name]]


def compile_instead(self: JITFunction, *args, grid, warmup, **kwargs) -> None:
    """Replaces ``JITFunction.run``: compiles instead of launching."""
    options = {name: kwargs.pop(name) for name in list(kwargs) if name not in self.arg_names}
    given = dict(zip(self.arg_names, args, strict=False)) | kwargs
    # Triton 3.9 warns without this option; its default changes in 3.10.
    assert "enable_fp_fusion" in options, self.fn.__name__
    special = {p.name for p in self.params if not p.do_not_specialize}
    ones = {name for name in special if type(given[name]) is int and given[name] == 1}
    fixed = {p.name for p in self.params if p.is_constexpr or given[p.name] is None} | ones
    signature = {name: "constexpr" if name in fixed else mangle_type(given[name]) for name in self.arg_names}
    places = dict(enumerate(self.arg_names))
    constants = {(i,): given[name] for i, name in places.items() if name in fixed}
    # Triton specializes on divisibility of addresses and sizes: loads become wider and are pipelined.
    known = {
        (i,): [["tt.divisibility", 16]] for i, name in places.items() if name in special - fixed and even(given[name])
    }
    key = (self.fn.__name__, *signature.values(), *constants.values(), *known)
    if key in _seen:
        return
    _seen.add(key)
    label = [given[name] for name in ("FORMAT", "PRECISION") if name in given]
    label += [signature[self.arg_names[0]].removeprefix("*")] if "PRECISION" in given else []
    # The functions choose these options if torch targets AMD GPUs without the interpreter.
    chosen = {"hip": {"PRECISION": "ieee", "WIDEN": False}, "cuda": {"WIDEN": False}}
    kernel = "-".join([self.fn.__name__, *label])
    for architecture in architectures(kernel, "PRECISION" in given):
        target = TARGETS[architecture]
        for name in chosen[target.backend].keys() & given.keys():
            constants[(self.arg_names.index(name),)] = chosen[target.backend][name]
        source = ASTSource(self, signature, constants, known)
        compiled = triton.compile(source, target=target, options=options)
        ptx, shared = compiled.asm.get("ptx", ""), compiled.metadata.shared
        print(architecture, kernel, *(len(re.findall(text, ptx)) for text in COUNTED), shared)


def compile_embedding_bag() -> None:
    """Calls every function on a BF16 table, FP32 tables with and without a layout, and an FP16 table."""
    ops = ListOps(kernels)
    values, offsets = torch.tensor([1, 2]).int(), torch.tensor([0, 2]).int()
    table, grad = torch.zeros(4, 20, dtype=torch.bfloat16), torch.zeros(1, 20)
    state = (torch.zeros(4), torch.tensor(0), torch.tensor(0.1))
    ops.embedding_bag_backward_fused_(table, *state, grad, values, offsets, rounding="nearest")
    case = make_case([(5, 18), (3, 130)], [0, 1], [2, 0, 3, 1], weighted=True)
    shape = list(case.weights.shape)
    ops.embedding_bag(case.weights, *case.jagged, **case.layout)
    ops.embedding_bag_backward_dense(case.grad, shape, *case.jagged, **case.layout)
    ops.embedding_bag_backward_per_sample_weights(case.grad, case.weights, *case.jagged[:2], **case.layout)
    for optimizer in ("sgd", "rowwise_adagrad"):
        case.update(optimizer, ops)
        one = torch.tensor(1.0)
        case.update(optimizer, ops, grad_scale=one, found_inf=one, status=torch.tensor([2**63 - 1, 0]))
    ops.embedding_bag(table, values, offsets, bounds_check="none")
    ops.embedding_bag_backward_sparse(grad, [4, 20], values, offsets)
    ops.embedding_bag(torch.zeros(4, 1, dtype=torch.float16), values.long(), offsets.long())


def compile_expand() -> None:
    """Calls expand with every element width, and with rows."""
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for columns in (1, 18, 3000):
            kernels.expand(torch.zeros(4, columns, dtype=dtype), torch.tensor([3, 0]))
    kernels.expand(torch.zeros(4, 16), torch.tensor([3, 0], dtype=torch.int32))
    kernels.expand_backward(torch.zeros(2, 5), torch.tensor([3, 0]), 4)


def compile_fake_quantize() -> None:
    """Calls fake_quantize with every format, rounding, dtype and scale rule, and with long integer rows."""
    seed = torch.tensor(1)
    for format in rk.ROW_FORMATS:
        fake_quantize(torch.zeros(4, 100, dtype=torch.bfloat16), format, "stochastic", seed, seed)
        fake_quantize(torch.zeros(4, 100), format)
    for format in ("int8", "int4", "int2"):
        fake_quantize(torch.zeros(4, 5000, dtype=torch.float16), format, "stochastic", None, seed)


def compile_grouped_projection() -> None:
    """Calls the op and its gradients with wide and narrow columns."""
    for in_dims, out_dims in (([70, 40], [130, 40]), ([3, 2], [4, 4])):
        x, grad = torch.zeros(100, sum(in_dims)), torch.zeros(100, sum(out_dims))
        dims = (in_dims, out_dims, [0, 1])
        weights = grouped_projection.grouped_projection_backward_weights(grad, x, *dims)
        grouped_projection.grouped_projection(x, weights, *dims)
        grouped_projection.grouped_projection_backward_input(grad, weights, *dims)


KINDS = [(torch.float32, "ieee"), (torch.float32, "tf32"), (torch.float16, "ieee"), (torch.bfloat16, "ieee")]


def compile_dot_interaction() -> None:
    """Calls the op and its gradient in every precision, with more vectors than a tile, few, and one column."""
    for vectors, columns, self_interaction in ((80, 128, False), (3, 10, True), (2, 1, False)):
        for dtype, precision in KINDS[: 1 if columns == 1 else None]:
            dense, sparse = torch.zeros(2, columns, dtype=dtype), torch.zeros(2, vectors, columns, dtype=dtype)
            grad = dot_interaction.dot_interaction(dense, sparse, self_interaction, precision)
            dot_interaction.dot_interaction_backward(grad, dense, sparse, self_interaction, precision)


def compile_factorization_machine() -> None:
    """Calls the op and its gradient in every precision with one tile of vectors, with two, and with a small tile."""
    for (vectors, columns, factors), kinds in (((27, 64, 24), KINDS), ((40, 64, 24), KINDS), ((3, 10, 4), KINDS[:1])):
        for dtype, precision in kinds:
            x, y = torch.zeros(2, vectors, columns, dtype=dtype), torch.zeros(vectors, factors, dtype=dtype)
            grad = factorization_machine.factorization_machine(x, y, precision)
            factorization_machine.factorization_machine_backward(grad, x, y, precision)


if __name__ == "__main__":
    print("triton", triton.__version__)
    JITFunction.run = compile_instead
    for op in sys.argv[1:] or OPS:
        globals()[f"compile_{op}"]()
