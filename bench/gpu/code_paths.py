"""Counts a warp's instructions on the shortest path through a kernel's machine code, for the time model."""

from __future__ import annotations

import dataclasses
import heapq
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import rec_kernels as rk
from bench.gpu import machine_code
from bench.gpu.machine_code import Instruction

#: The analyzed kernels: those that read, sum or update rows.
KERNELS = r"(pool\w*|finish|sum_chunks)_kernel<"


@dataclass(frozen=True)
class Paths:
    """Instruction counts of one kernel. Its loop loads several rows, then uses them; a round is one iteration."""

    registers: int
    blocks: int  # of 256 threads that a multiprocessor holds
    before: int  # instructions from the start, or from the end of a bag or run, to the loop: at the least
    round: int  # instructions of a round, over all paths of the aligned code
    rows: int  # loaded per round
    after: int  # instructions from the loop to the end, past a store: at the least
    ahead: int = 0  # additional ones on the path past the search for several runs, for all of these


def successors(code: Sequence[Instruction]) -> list[list[int]]:
    """Possible successors of each instruction, as indices into ``code``. Calls are assumed to return at once."""
    place = {i.address: number for number, i in enumerate(code)}
    barriers: dict[str, int] = {}
    found = []
    for number, i in enumerate(code):
        # BRA.DIV and BRA.CONV test whether lanes have diverged.
        always = not i.text.startswith("@") and re.search(r"\b!?U?P\d|\.(DIV|CONV)\b", i.text) is None
        behind = [number + 1] if number + 1 < len(code) else []
        target = place.get(i.target) if i.target is not None else None
        name = i.opcode.partition(".")[0]
        if name == "BSSY" and (match := re.search(r"(B\d+), .*?0x([0-9a-f]+)", i.text)):
            barriers[match[1]] = int(match[2], 16)
        if name == "BSYNC" and (match := re.search(r"B\d+", i.text)) and barriers.get(match[0]) in place:
            found.append([place[barriers[match[0]]]])
        elif name == "BRA" and target is not None:
            found.append([target] if always else [target, *behind])
        else:
            found.append([] if name in ("EXIT", "RET") and always else behind)
    return found


def distances(following: Sequence[Sequence[int]], start: int) -> dict[int, int]:
    """Number of instructions from one to every other reachable one."""
    found, queue = {start: 0}, [(0, start)]
    while queue:
        far, number = heapq.heappop(queue)
        if far > found[number]:
            continue
        for other in following[number]:
            if far + 1 < found.get(other, far + 2):
                found[other] = far + 1
                heapq.heappush(queue, (far + 1, other))
    return found


def row_loop(code: Sequence[Instruction], stores: bool = False) -> list[Instruction] | None:
    """The shortest loop that shuffles row addresses between lanes and loads: the loop over aligned rows.

    Args:
        code: of a kernel.
        stores: whether the loop also stores sums, the rare ones in loops within it; else it is an innermost one.
    """
    wanted = ["SHFL", "STG"] if stores else ["SHFL"]
    found = [
        body
        for body in machine_code.loops(code, innermost=not stores)
        if any(i.loaded for i in body) and all(any(i.opcode.startswith(w) for i in body) for w in wanted)
    ]
    return min(found, key=len, default=None)


def round_with_stores(body: Sequence[Instruction], following: Sequence[Sequence[int]], start: int) -> int:
    """Instructions on the shortest path through a loop that passes the last 16-byte store outside its inner loops."""
    inner = {i.address for loop in machine_code.loops(body) if len(loop) < len(body) for i in loop}
    last = max(n for n, i in enumerate(body) if re.match(r"STG\S*\.128", i.opcode) and i.address not in inner)
    return distances(following, start)[start + last] + distances(following, start + last)[start + len(body) - 1] + 1


def look_ahead(code: Sequence[Instruction], following: Sequence[Sequence[int]], start: int) -> int:
    """Additional instructions of the path from the first one to ``start`` that passes the first integer division.

    An entry finds its feature with it.
    """
    far = distances(following, 0)
    divisions = [n for n, i in enumerate(code) if i.opcode.startswith("I2F.U32.RP") and n in far]
    ways = (far[n] + distances(following, n).get(start, 0) for n in divisions[:1])
    return max((way - far[start] for way in ways), default=0)


def paths_of(name: str, registers: int, shared: int, code: Sequence[Instruction]) -> Paths | None:
    """The paths of one kernel; None if it has no such loop."""
    several = name.startswith("pool_short")  # bags are stored where their last row is added
    body = row_loop(code, stores=several)
    if body is None:
        return None
    place = {i.address: number for number, i in enumerate(code)}
    following = successors(code)
    first = place[body[0].address]
    ends = [number for number, i in enumerate(code) if i.opcode.startswith("EXIT")]
    behind = distances(following, place[body[-1].address])
    after = []
    for number in (n for n, i in enumerate(code) if i.opcode.startswith("STG") and n in behind):
        on = distances(following, number)
        after += [behind[number] + on[end] for end in ends if end in on]
    if several:
        after = [behind[end] for end in ends if end in behind]
    # A row's address takes two registers and a factor a third; updates always have the latter.
    passed = 2 if name.startswith("pool") and not name.endswith("true>") else 3
    shuffles = sum(i.opcode.startswith("SHFL") for i in body)
    blocks = machine_code.Kernel(name, registers, 0, 0, shared, len(code), None).blocks
    before = distances(following, 0).get(first, 0)
    size, rows = len(body), max(1, shuffles // passed)
    if several:
        size, rows = round_with_stores(body, following, first), sum(i.loaded > 4 for i in body)
    ahead = look_ahead(code, following, first) if name.startswith("finish") else 0
    return Paths(registers, blocks, before, size, rows, min(after, default=0), ahead)


def read_file(library: str) -> dict[str, Paths]:
    """Returns kernel -> paths for one library or object file."""
    usage = dict(re.findall(r"Function (\S+):\s+(REG:.*)", machine_code.dump("-res-usage", library)))
    parts = re.split(r"\n[ \t]*Function : (\S+)\n", machine_code.dump("-sass", library))
    found = {}
    for symbol, listing in zip(parts[1::2], parts[2::2], strict=True):
        name = machine_code.kernel_name(symbol)
        if name is None or symbol not in usage or not re.match(KERNELS, name):
            continue
        numbers = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", usage[symbol])}
        code = machine_code.instructions_of(listing)
        paths = paths_of(name, numbers["REG"], numbers["SHARED"], code)
        if paths is not None:
            found[name] = paths
    return found


def read(libraries: Sequence[str] = ()) -> dict[str, Paths] | None:
    """Returns kernel -> paths for these files (default: the package's library); None if one cannot be read."""
    libraries = libraries or [str(rk.build_info()["cuda_library"] or "")]
    if any(machine_code.missing(library or None) is not None for library in libraries):
        return None
    return {name: paths for library in libraries for name, paths in read_file(library).items()}


def as_json(paths: dict[str, Paths], names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Paths of ``names`` for a JSON file."""
    return {name: dataclasses.asdict(paths[name]) for name in sorted(names)}
