"""The command lines of the trainer and of the studies as one."""

from __future__ import annotations


def main(argv: list[str]) -> int:
    """``compare`` and ``reproduce`` are commands of the studies, all others of the trainer."""
    from bench.studies.__main__ import main as studies
    from rec_kernels.dlrm.__main__ import main as trainer

    return (studies if argv[0] in ("compare", "reproduce") else trainer)(argv)
