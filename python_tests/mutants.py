"""Plants bugs one at a time into a copy of the sources, and checks that the default tier of tests finds each.

    python python_tests/mutants.py                 # all of them, an hour on two cores; runs/mutants.txt has the outcome
    python python_tests/mutants.py 0 7 --tier full # some, with the full tier for bugs that the default tier misses

The copy is build/mutants, of the last commit; its build is kept for the next run. The exit status is 1 if no test finds
a bug.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / "build" / "mutants"


class Mutant(NamedTuple):
    """One bug: a unique text of a file, its replacement, and the tests that should find it."""

    file: str
    old: str
    new: str
    tests: str  # stems of python_tests/test_*.py; "a/b": only the tests of a whose names have b


MUTANTS = [
    # CPU kernels.
    Mutant(
        "csrc/dense/cpu/scale_rows_kernels.cpp", "    if (c < columns) {", "    if (c + 1 < columns) {", "scale_rows"
    ),
    Mutant(
        "csrc/embedding_bag/cpu/pool.h",
        "kKind != BagKind::kOneId && k.mean && counted > 1",
        "kKind != BagKind::kOneId && k.mean && counted > 2",
        "embedding_bag embedding_bag_torch",
    ),
    Mutant(
        "csrc/embedding_bag/cpu/sort.cpp",
        "counted += bags.counts(id, f, padding);",
        "counted += bags.in_range(id, f);",
        "embedding_bag embedding_bag_fused embedding_bag_bounds embedding_bag_torch",
    ),
    Mutant(
        "csrc/jagged/cpu/jagged_permute.cpp",
        "if (weights) std::copy(weights + first, weights + last, new_weights + place);",
        "if (weights) std::copy(weights + first, weights + last, new_weights + values[f]);",
        "jagged_permute",
    ),
    Mutant(
        "csrc/jagged/cpu/jagged_bucketize.cpp",
        "rows * buckets <= INT32_MAX",
        "rows * buckets <= INT64_MAX",
        "jagged_bucketize",
    ),
    Mutant(
        "csrc/jagged/cpu/jagged_bucketize.cpp",
        '" for each of the "',
        '" for all of the "',
        "jagged_bucketize jagged_checks",
    ),
    Mutant(
        "csrc/jagged/cpu/jagged_dedup.cpp",
        "else if (slot.hash != hash || !group.same(slot.sample, b)) continue;",
        "else if (slot.hash != hash) continue;",
        "jagged_dedup",
    ),
    Mutant(
        "csrc/embedding_bag/cpu/slot_finder.h",
        "return cache_.ways <= kWaysAtOnce ? -1 : cache_.slot_of(place_, row);",
        "return -1;",
        "row_cache row_cache_reference",
    ),
    Mutant(
        "csrc/row_cache/cpu/plan.cpp",
        "clock % policy.decay_every == 0;",
        "clock % policy.decay_every == 1;",
        "row_cache_plan",
    ),
    Mutant(
        "csrc/dense/cpu/grouped_projection.cpp",
        "if (!g.identity()) g.weights += g.in_dim * g.out_dim;",
        "g.weights += g.in_dim * g.out_dim;",
        "grouped_projection",
    ),
    Mutant(
        "csrc/rows/cpu/row_formats.cpp",
        "how, {rows.get(), options.first_row + n, nullptr});",
        "how, {rows.get(), options.first_row + begin, nullptr});",
        "fake_quantize row_formats",
    ),
    Mutant(
        "csrc/embedding_bag/cpu/shared_rows.cpp",
        "if (!out.empty() && out.back().group == group && ",
        "if (!out.empty() && ",
        "embedding_bag_shared inverse_jagged",
    ),
    # Headers that the CPU and CUDA share.
    Mutant(
        "csrc/rows/optimizers/clipping_and_decay.h",
        "return norm_known && step.adds_decay();",
        "return step.adds_decay();",
        "embedding_bag_gradient_step",
    ),
    Mutant(
        "csrc/rows/formats/affine_integers.h",
        "kStochastic ? half_below(low) : Fp16::encode<false>(low, 0u);",
        "Fp16::encode<false>(low, 0u);",
        "row_formats",
    ),
    Mutant(
        "csrc/rows/optimizers/adagrad_adam_lamb.h",
        "weight == 0.0f || direction == 0.0f ? 1.0f",
        "weight == 0.0f ? 1.0f",
        "embedding_bag_moments embedding_bag_optimizers",
    ),
    # CUDA kernels, emulated.
    Mutant(
        "csrc/dense/cuda/expand.cu",
        "static_cast<uint64_t>(a.rows)) note_left_out(a.status, b);",
        "static_cast<uint64_t>(a.rows)) note_left_out(a.status, b + 1);",
        "expand",
    ),
    Mutant(
        "csrc/jagged/cuda/jagged_permute.cu",
        "if (!total && names_each_once(permute, strides.size())) total",
        "if (!total && permute.size() == strides.size()) total",
        "jagged_permute",
    ),
    Mutant(
        "csrc/jagged/cuda/jagged_bucketize.cu",
        "counted = begin > r.start ? static_cast<int64_t>(*count) : 0;",
        "counted = begin > r.start + G ? static_cast<int64_t>(*count) : 0;",
        "jagged_bucketize",
    ),
    Mutant(
        "csrc/embedding_bag/cuda/pool.cuh",
        "add_count(status + 1, count_bits(found));",
        "add_count(status + 1, 1);",
        "embedding_bag_fuzz embedding_bag_bounds",
    ),
    Mutant(
        "csrc/embedding_bag/cuda/shared_rows.cu",
        "note_bad(a.status, kBadLayout + 1 + a.bags.num_offsets + i);",
        "note_bad(a.status, kBadLayout + 1 + i);",
        "embedding_bag_shared",
    ),
    Mutant(
        "csrc/row_cache/cuda/row_cache.cuh",
        "how.noise.stream = kEvictionStream;",
        "how.noise.stream = kEvictionStream + 1;",
        "row_cache",
    ),
    # Argument checks.
    Mutant("csrc/dense/expand.cpp", 'check_value(rows >= 0, "rows = "', 'check_value(rows >= -1, "rows = "', "expand"),
    Mutant("csrc/dense/dot_interaction.cpp", ".columns()}).dtype(dense.scalar_type())", ".columns()})", "products"),
    Mutant(
        "csrc/embedding_bag/embedding_bag.cpp",
        "check_value(groups[f] >= -1 &&",
        "check_value(groups[f] >= -2 &&",
        "embedding_bag_shared",
    ),
    Mutant(
        "csrc/rows/row_formats.cpp",
        "first_row <= kMaxNoisyRows - rows",
        "first_row <= kMaxNoisyRows",
        "row_formats_bad_input fake_quantize",
    ),
    # Python.
    Mutant(
        "rec_kernels/ops/scale_rows.py",
        "grad_b = torch.ops.rec_kernels.scale_rows(a, grad)",
        "grad_b = torch.ops.rec_kernels.scale_rows(b, grad)",
        "scale_rows second_derivatives",
    ),
    Mutant(
        "rec_kernels/ops/version_counters.py",
        "        increment_version(tensors)  # not before",
        "        increment_version(tensors[:1])  # not before",
        "version_counters",
    ),
    Mutant(
        "rec_kernels/nn/deduplicated.py",
        "        _check_row_count(x.offsets().shape[0] - 1, rows)\n",
        "",
        "deduplicated",
    ),
    Mutant(
        "rec_kernels/dlrm/config.py",
        "1 - (step - self.decay_start + 1) / self.decay_steps",
        "1 - (step - self.decay_start) / self.decay_steps",
        "dlrm_train",
    ),
    Mutant(
        "rec_kernels/triton/expand.py",
        "tl.atomic_add(status + 1, left_out)",
        "tl.atomic_add(status + 1, 1)",
        "triton/interpreter",
    ),
]


def run(*command: object) -> subprocess.CompletedProcess:
    """Runs a command in the copy, with stdout and stderr combined."""
    environment = os.environ | {"PYTHONPATH": str(COPY), "REC_KERNELS_CUDA": "0"}
    return subprocess.run(
        [str(c) for c in command],
        cwd=COPY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def copy_sources() -> None:
    """Extracts the last commit; unchanged commits keep modification times, hence the build."""
    COPY.mkdir(parents=True, exist_ok=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "-x", "-C", COPY], input=archive, check=True)


def build() -> str | None:
    """Builds the CPU library, and returns the compiler's output if it fails; the tests build the emulated one."""
    done = run(sys.executable, "setup.py", "-q", "build_ext", "--inplace")
    return done.stdout[-2000:] if done.returncode else None


def found_by(mutant: Mutant, tier: str) -> str | None:
    """Returns the first failing test of a tier."""
    for name in mutant.tests.split():
        stem, _, chosen = name.partition("/")
        test = f"python_tests/test_{stem}.py"
        chosen = ["-k", chosen] if chosen else []
        done = run(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", tier, test, *chosen)
        if done.returncode not in (0, 5):
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
            return failed[1] if failed else f"{test}: {done.stdout[-200:]}"
    return None


def outcome(mutant: Mutant, tiers: list[str]) -> str:
    """Plants a bug, builds, runs the tests, and restores the file; returns the outcome."""
    path = COPY / mutant.file
    before = path.read_text()
    assert before.count(mutant.old) == 1, f"{mutant.file} has {mutant.old!r} {before.count(mutant.old)} times"
    path.write_text(before.replace(mutant.old, mutant.new))
    try:
        if mutant.file.startswith("csrc/") and (message := build()):
            return f"not compiled: {message}"
        for tier in tiers:
            if test := found_by(mutant, tier):
                return f"found by the {'default' if tier.startswith('not') else 'full'} tier: {test}"
        return "NOT FOUND"
    finally:
        path.write_text(before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, help="of the table; all without any")
    parser.add_argument("--tier", choices=("default", "full"), default="default")
    given = parser.parse_args()
    copy_sources()
    if message := build():
        print(message)
        return 1
    tiers, missed = ["not full", "full"][: 1 + (given.tier == "full")], 0
    for number in given.numbers or range(len(MUTANTS)):
        message = outcome(MUTANTS[number], tiers)
        missed += message == "NOT FOUND"
        print(f"{number:2} {MUTANTS[number].file}: {message}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
