"""What one warp executes in the kernels that the model of time needs: the shortest way through their machine code."""

from __future__ import annotations

import dataclasses
import heapq
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import rec_kernels as rk
from bench.gpu import machine_code
from bench.gpu.machine_code import Instruction

#: The kernels that are read: those that read, sum or update rows.
KERNELS = r"(pool\w*|finish_short|sum_chunks)_kernel<"


@dataclass(frozen=True)
class Paths:
    """Of one kernel. "The loop" asks for several rows, then uses them; an iteration of it is a round."""

    registers: int
    blocks: int  # of 256 threads that a multiprocessor holds
    before: int  # instructions from the start, or from the end of a bag or run, to the loop: at the least
    round: int  # instructions of a round, all paths of the aligned code together
    rows: int  # that a round asks for
    after: int  # instructions from the loop to the end, past a store: at the least


def successors(code: Sequence[Instruction]) -> list[list[int]]:
    """Of each instruction, which may be next: numbers in ``code``. Calls are taken to return at once."""
    place = {i.address: number for number, i in enumerate(code)}
    barriers: dict[str, int] = {}
    found = []
    for number, i in enumerate(code):
        always = not i.text.startswith("@") and re.search(r"\b!?U?P\d", i.text) is None
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
    """Instructions from one to every other that can be reached."""
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


def row_loop(code: Sequence[Instruction]) -> list[Instruction] | None:
    """The shortest loop that passes the places of rows from lane to lane, and loads: that of aligned rows."""
    loops = [
        body
        for body in machine_code.innermost_loops(code)
        if any(i.opcode.startswith("SHFL") for i in body) and any(i.loaded for i in body)
    ]
    return min(loops, key=len, default=None)


def paths_of(name: str, registers: int, shared: int, code: Sequence[Instruction]) -> Paths | None:
    """The paths of one kernel; None: it has no such loop."""
    body = row_loop(code)
    if body is None:
        return None
    place = {i.address: number for number, i in enumerate(code)}
    following = successors(code)
    ends = [number for number, i in enumerate(code) if i.opcode.startswith("EXIT")]
    behind = distances(following, place[body[-1].address])
    after = []
    for number in (n for n, i in enumerate(code) if i.opcode.startswith("STG") and n in behind):
        on = distances(following, number)
        after += [behind[number] + on[end] for end in ends if end in on]
    # The place of a row is two registers, and a factor a third: of an update always, if there is one or not.
    passed = 2 if name.startswith("pool") and not name.endswith("true>") else 3
    shuffles = sum(i.opcode.startswith("SHFL") for i in body)
    blocks = machine_code.Kernel(name, registers, 0, 0, shared, len(code), None).blocks
    before = distances(following, 0).get(place[body[0].address], 0)
    return Paths(registers, blocks, before, len(body), max(1, shuffles // passed), min(after, default=0))


def read_file(library: str) -> dict[str, Paths]:
    """Kernel -> paths, of one library or object file."""
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
    """Kernel -> paths, of all of these (default: the package's library); None where one cannot be read."""
    libraries = libraries or [str(rk.build_info()["cuda_library"] or "")]
    if any(machine_code.missing(library or None) is not None for library in libraries):
        return None
    return {name: paths for library in libraries for name, paths in read_file(library).items()}


def as_json(paths: dict[str, Paths], names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Those of ``names`` for a JSON file."""
    return {name: dataclasses.asdict(paths[name]) for name in sorted(names)}
