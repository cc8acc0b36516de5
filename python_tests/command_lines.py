"""One entry point for the command lines of the trainer and of the studies."""

from __future__ import annotations


def main(argv: list[str]) -> int:
    """Runs ``compare`` and ``reproduce`` with the studies' parser, all other commands with the trainer's."""
    from bench.studies.__main__ import main as studies
    from rec_kernels.dlrm.__main__ import main as trainer

    return (studies if argv[0] in ("compare", "reproduce") else trainer)(argv)
