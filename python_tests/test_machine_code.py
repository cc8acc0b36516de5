"""bench.gpu.machine_code on a synthetic listing; no compiled library is needed."""

from __future__ import annotations

from bench.gpu import machine_code

SYMBOL = (
    "_ZN11rec_kernels54_GLOBAL__N__b1ce0e09_21_embedding_bag_pool_cu_1b8a818411pool_kernel"
    "INS_4cuda6AffineILi8EEELi32ELi1ELb0EEEvNS_8PoolArgsE"
)


def listing(*instructions: tuple[str, int, int]) -> str:
    """cuobjdump's lines of (text, scoreboard that it sets, scoreboards that it waits for)."""
    lines = []
    for number, (text, sets, waits) in enumerate(instructions):
        high = (waits << 11 | 7 << 8 | sets << 5) << 41
        lines.append(f"        /*{16 * number:04x}*/                   {text} ;     /* 0x{0:016x} */")
        lines.append(f"                                                       /* 0x{high:016x} */")
    return "\n".join(lines) + "\n"


def test_names_are_those_of_the_sources() -> None:
    assert machine_code.kernel_name(SYMBOL) == "pool_kernel<Affine<8>, 32, 1, false>"
    assert machine_code.kernel_name("_ZN3cub11EmptyKernelIvEEvv") is None


def test_the_loop_of_rows_is_the_innermost_one_that_asks_for_most() -> None:
    code = machine_code.instructions_of(
        listing(
            ("LDG.E.64 R2, desc[UR10][R2.64]", 0, 0),  # 0x00: the outer loop's
            ("LDG.E.128 R4, desc[UR10][R8.64]", 0, 1),  # 0x10: the inner loop's two rows
            ("@!P0 LDG.E.U16 R12, desc[UR10][R8.64+0x10]", 1, 0),
            ("FADD R0, R0, R1", 7, 2),  # waits for the second row, the first may still be in flight
            ("LDG.E R13, desc[UR10][R8.64+0x20]", 2, 0),
            ("@P0 BRA 0x10", 7, 0),
            ("@P1 BRA !P2, 0x0", 7, 0),
            ("BRA 0x70", 7, 0),
        )
    )
    assert [i.loaded for i in code] == [8, 16, 2, 0, 4, 0, 0, 0]
    assert [len(loop) for loop in machine_code.innermost_loops(code)] == [5]
    assert machine_code.row_loop(code) == machine_code.Loop(
        instructions=5, loads=3, bytes=22, first_wait_bytes=18, first_wait_loads=2
    )
    assert machine_code.row_loop(code[-1:]) is None


def test_of_two_ways_to_load_a_row_one_is_taken() -> None:
    code = machine_code.instructions_of(
        listing(
            ("@!P0 BRA 0x30", 7, 0),
            ("LDG.E.128 R4, desc[UR10][R8.64]", 0, 0),
            ("BRA 0x60", 7, 0),
            ("LDG.E.64 R4, desc[UR10][R8.64]", 0, 0),
            ("BRA.DIV UR4, 0x100", 7, 0),  # the slow path of diverged lanes
            ("LDG.E.64 R6, desc[UR10][R8.64+0x8]", 0, 0),
            ("FADD R0, R0, R4", 7, 1),
            ("LDG.E R9, desc[UR10][R8.64]", 1, 0),
            ("@P1 BRA 0x0", 7, 0),
        )
    )
    assert machine_code.row_loop(code) == machine_code.Loop(
        9, loads=2, bytes=20, first_wait_bytes=16, first_wait_loads=1
    )


def test_resident_blocks() -> None:
    """Blocks agree with NVIDIA's occupancy tables for compute capability 9.0 and blocks of 256 threads."""

    def blocks(registers: int, shared: int = 0) -> int:
        return machine_code.Kernel("", registers, 0, 0, shared, 0, None).blocks

    assert [blocks(r) for r in (32, 40, 64, 65, 80, 81, 128, 129, 255)] == [8, 6, 4, 3, 3, 2, 2, 1, 1]
    assert [blocks(32, shared * 1024) for shared in (27, 48, 113)] == [8, 4, 2]
