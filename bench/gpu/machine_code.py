"""Reads the CUDA kernels' machine code: registers, spills, resident blocks, and the loop that reads rows.

``python -m bench.gpu.machine_code`` prints a row for every kernel of ``librec_kernels_cuda.so``; no GPU is needed, but
cuobjdump and nvdisasm (of the CUDA toolkit or of the triton package) are. In Python::

    kernels = machine_code.read()                          # all our kernels; None without the library or cuobjdump
    pool = machine_code.find(kernels, "pool_kernel<Affine<8>, 16, 2, false>")
    pool.registers, pool.blocks, pool.loop.instructions, pool.loop.first_wait_bytes

Names are those of the C++ sources without namespaces: ``pool_kernel<Format, lanes of a group, blocks of columns,
weighted>``.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import itertools
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import bench
import rec_kernels as rk

ARCHITECTURE = "sm_90"
THREADS = 256  # per block: kThreads of csrc/core/cuda/group.cuh; also assumed for updates, which have smaller blocks

# A multiprocessor of sm_90 (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"): registers
# are allocated to warps in units of 256, and each warp belongs to one of four partitions.
REGISTERS, REGISTER_UNIT, PARTITIONS, WARPS, BLOCKS = 65536, 256, 4, 64, 32
SHARED, SHARED_OF_SYSTEM = 228 * 1024, 1024  # bytes, and the bytes that each block needs in addition to its own
WARP = 32


@dataclass(frozen=True)
class Instruction:
    """One instruction. Its scoreboard fields are decoded from the machine code's control bits."""

    address: int
    text: str  # "@!P0 LDG.E.128 R4, desc[UR10][R2.64]"
    sets: int  # scoreboard that its result will clear, 0 .. 5; 7: none
    waits: int  # bit s: it waits until scoreboard s is clear

    @property
    def opcode(self) -> str:
        """``LDG.E.128``."""
        return re.sub(r"^@!?U?P\w+\s+", "", self.text).partition(" ")[0]

    @property
    def target(self) -> int | None:
        """The address that a branch goes to, if it is one."""
        match = re.search(r"\bBRA(?:\.\S+)? .*?0x([0-9a-f]+)", self.text)
        return int(match[1], 16) if match else None

    @property
    def ends_here(self) -> bool:
        """True if control never passes to the next instruction in memory."""
        return re.match(r"(?:BRA|EXIT|RET|BRX)\b(?!\.DIV|\.CONV|.*P\d)", self.text) is not None

    @property
    def loaded(self) -> int:
        """Bytes that a lane loads from global memory: 1 .. 16; 0 for other instructions."""
        if not self.opcode.startswith(("LDG", "LD.")):
            return 0
        widths = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
        return next((widths[part] for part in self.opcode.split(".") if part in widths), 4)


@dataclass(frozen=True)
class Loop:
    """One iteration of an innermost loop, which has one set of rows in flight."""

    instructions: int  # of all paths through it
    loads: int  # of global memory, on the path that loads the most bytes
    bytes: int  # of these loads, per lane; bytes shared by all lanes, such as a row's scale, count for each
    first_wait_bytes: int  # of them, the bytes a lane has requested before it waits for the first
    first_wait_loads: int


@dataclass(frozen=True)
class Kernel:
    """One kernel of the library, as compiled for ARCHITECTURE."""

    name: str  # "pool_kernel<Fp32, 32, 1, false>"
    registers: int  # a thread's
    stack: int  # bytes of a thread
    spills: int  # instructions on local memory: for spilled registers, and arrays that a variable indexes
    shared: int  # static bytes per block, without dynamic shared memory
    instructions: int
    loop: Loop | None  # the one that requests the most bytes at once; None: no loop loads anything

    @property
    def blocks(self) -> int:
        """Resident blocks of THREADS per multiprocessor."""
        unit = REGISTER_UNIT
        of_warp = -(-self.registers * WARP // unit) * unit
        warps = min(WARPS, REGISTERS // of_warp // PARTITIONS * PARTITIONS)
        return min(BLOCKS, warps * WARP // THREADS, SHARED // (self.shared + SHARED_OF_SYSTEM))

    @property
    def bytes_in_flight(self) -> int:
        """Bytes in flight on a fully occupied multiprocessor when all warps wait for the first row of a round."""
        return self.loop.first_wait_bytes * self.blocks * THREADS if self.loop else 0


def tool(name: str) -> str | None:
    """Path of cuobjdump or nvdisasm, from the CUDA toolkit or the triton package."""
    found = shutil.which(name)
    spec = importlib.util.find_spec("triton")
    if found or spec is None or spec.origin is None:
        return found
    carried = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name
    return str(carried) if carried.exists() else None


def missing(library: str | None = None) -> str | None:
    """Explains why the library (default: the package's) cannot be read; None if it can."""
    if (library or rk.build_info()["cuda_library"]) is None:
        return "the CUDA library is not built"
    return None if tool("cuobjdump") else "no cuobjdump"


def dump(what: str, library: str) -> str:
    """Output of ``cuobjdump WHAT`` for the library's code for ARCHITECTURE; empty if it has none."""
    command = [str(tool("cuobjdump")), "-arch", ARCHITECTURE, what, library]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def demangled(symbol: str) -> str:
    """The C++ name of a linker symbol, demangled by torch's C++ runtime."""
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    address = demangle(symbol.encode(), None, None, ctypes.byref(status))
    if not address:
        return symbol
    name = ctypes.string_at(address).decode()
    libc = ctypes.CDLL(None)
    libc.free.argtypes = [ctypes.c_void_p]
    libc.free(address)
    return name


def kernel_name(symbol: str) -> str | None:
    """Short name of our kernel, such as ``pool_kernel<Fp32, 32, 1, false>``; None for other libraries' kernels."""
    name = re.sub(r"\(anonymous namespace\)::|rec_kernels::|cuda::", "", demangled(symbol))
    match = re.match(r"(?:void )?([a-z_]+_kernel(?:<.*>)?)\(", name)
    if not match or "11rec_kernels" not in symbol:
        return None
    return re.sub(r" +>", ">", match[1])


# An instruction is two lines: its address, text and low half, then the high half, which has the control bits.
INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]{4,6})\*/\s+(.*?) ?;\s+/\* 0x[0-9a-f]{16} \*/\n\s+/\* 0x([0-9a-f]{16}) \*/", re.MULTILINE
)


def instructions_of(code: str) -> list[Instruction]:
    """Parses the instructions of one function's listing."""
    out = []
    for match in INSTRUCTION.finditer(code):
        control = (
            int(match[3], 16) >> 41
        )  # stall 4 bits, yield 1, scoreboards set on writing and reading 3 each, waits 6
        out.append(Instruction(int(match[1], 16), match[2], control >> 5 & 7, control >> 11 & 63))
    return out


def loops(code: Sequence[Instruction], innermost: bool = False) -> Iterator[list[Instruction]]:
    """Ranges of instructions that a backward branch repeats; ``innermost``: those that contain no other.

    Behind a kernel's code are pieces for lanes that have diverged before a shuffle or vote (``ENDCOLLECTIVE``). These
    branch back to where the lanes left it, which is no loop.
    """
    apart = [i.address for i in code if i.opcode == "ENDCOLLECTIVE"]
    found = [(i.target, i.address) for i in code if i.target is not None and i.target < i.address]
    found = [(start, end) for start, end in found if not any(start <= address <= end for address in apart)]
    for start, end in found:
        if not innermost or not any(start <= s and e <= end and (s, e) != (start, end) for s, e in found):
            yield [i for i in code if start <= i.address <= end]


def innermost_loops(code: Sequence[Instruction]) -> Iterator[list[Instruction]]:
    """The ``loops`` that contain no other."""
    return loops(code, innermost=True)


def most_asked(body: Sequence[Instruction], until_wait: bool) -> tuple[int, int]:
    """(bytes, loads) of the path through a loop body that loads most, in all or until it waits for the first load."""
    here: dict[int, dict[int, tuple[int, int]]] = {body[0].address: {0: (0, 0)}}  # by address: by scoreboards to come
    best = (0, 0)
    inside = {i.address for i in body}
    for number, i in enumerate(body):
        for coming, (asked, loads) in here.pop(i.address, {}).items():
            best = max(best, (asked, loads))
            if until_wait and i.waits & coming:
                continue
            if i.loaded:
                asked, loads = asked + i.loaded, loads - 1  # prefers fewer loads of equal bytes
                coming |= 1 << i.sets if i.sets < 6 else 0
            best = max(best, (asked, loads))
            for following in (i.target, None if i.ends_here else body[min(number + 1, len(body) - 1)].address):
                if following is None or following not in inside or following <= i.address:
                    continue
                states = here.setdefault(following, {})
                states[coming] = max(states.get(coming, (0, 0)), (asked, loads))
    return best[0], -best[1]


def measured(body: Sequence[Instruction]) -> Loop:
    """The figures of a loop's body."""
    every, before_wait = most_asked(body, until_wait=False), most_asked(body, until_wait=True)
    return Loop(len(body), every[1], every[0], *before_wait)


def row_loop(code: Sequence[Instruction]) -> Loop | None:
    """The innermost loop that reads rows: the shortest that loads more than half of the most bytes per round."""
    reading = [loop for loop in map(measured, innermost_loops(code)) if loop.loads]
    most = max((loop.bytes for loop in reading), default=0)
    return min((loop for loop in reading if 2 * loop.bytes > most), key=lambda loop: loop.instructions, default=None)


def compiled(symbol: str, usage: str, listing: str) -> Kernel | None:
    """Makes a Kernel from cuobjdump's resource usage of a symbol, "REG:72 STACK:0 ...", and its instructions."""
    name = kernel_name(symbol)
    if name is None:
        return None
    resources = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", usage)}
    code = instructions_of(listing)
    spills = sum(i.opcode.startswith(("LDL", "STL")) for i in code)
    return Kernel(name, resources["REG"], resources["STACK"], spills, resources["SHARED"], len(code), row_loop(code))


def read(library: str | None = None) -> list[Kernel] | None:
    """All our kernels in the library (default: the package's), or None if it cannot be read."""
    library = library or rk.build_info()["cuda_library"]
    if missing(library) is not None:
        return None
    usage = dict(re.findall(r"Function (\S+):\s+(REG:.*)", dump("-res-usage", library)))
    parts = re.split(r"\n[ \t]*Function : (\S+)\n", dump("-sass", library))
    both = ((s, usage[s], listing) for s, listing in zip(parts[1::2], parts[2::2], strict=True) if s in usage)
    found = [kernel for kernel in itertools.starmap(compiled, both) if kernel]
    return sorted(found, key=lambda kernel: kernel.name)


def find(kernels: Sequence[Kernel], name: str) -> Kernel:
    """The kernel of this name; KeyError if there is none."""
    for kernel in kernels:
        if kernel.name == name:
            return kernel
    raise KeyError(f"no kernel {name}")


def table(kernels: Sequence[Kernel]) -> str:
    """A row for each kernel, as Markdown."""
    heads = ["kernel", "registers", "stack", "spills", "shared", "blocks an SM", "loop: instructions", "loads"]
    lines = []
    for k in kernels:
        loop = k.loop
        of_loop = (loop.instructions, loop.loads, loop.bytes, loop.first_wait_bytes) if loop else ("",) * 4
        sizes = (k.registers, k.stack, k.spills, k.shared, k.blocks)
        lines.append((k.name, *sizes, *of_loop, f"{k.bytes_in_flight / 1024:.0f}"))
    return bench.table([*heads, "bytes a lane", "before the first wait", "KiB in flight an SM"], lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.machine_code", description=__doc__)
    parser.add_argument("--library", help="a library or object file (default: the package's librec_kernels_cuda.so)")
    parser.add_argument("--kernel", default="", help="only kernels whose name contains this")
    args = parser.parse_args()
    kernels = read(args.library)
    if kernels is None:
        parser.error(f"nothing to read: {missing(args.library)}")
    print(table([kernel for kernel in kernels if args.kernel in kernel.name]))


if __name__ == "__main__":
    main()
