"""The comparisons of ``python -m bench.studies reproduce``, and the claims that they test."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.studies.claims import Auc, Claim, Faster, Fewer, Premise, Same
from bench.studies.compare import Comparison, plan
from rec_kernels.dlrm.config import TrainConfig

QUICK_WEEKS, QUICK_SEEDS = 8, 4  # of `--quick`: fewer rows and pairs, all of the configurations
LOSS = 0.0015  # difference of AUC that "no worse" allows; 32 seeds cannot resolve a smaller one
NO_WORSE = -LOSS
A_TENTH, A_FIFTH = 0.9, 0.8  # tolerances of size ratios: of "16 times", and of "about the same"

QUOTIENTS = "arXiv:1909.02107"
MIXED = "arXiv:1909.11810"
CACHE = "arXiv:2010.11305"
BF16 = "arXiv:2010.06192"
FIXED_POINT = "arXiv:1502.02551"
MX = "arXiv:2302.08007"
RECD = "arXiv:2211.05239"
DCN = "arXiv:2008.13535"
WUKONG = "arXiv:2403.02545"
BF16_MIXED = "arXiv:1905.12322"
TARGET = "target"

GROCERIES = "the paper: Criteo Kaggle, tables of millions of rows; here: Complete Journey, 141,000 rows"
MOVIES = "the paper: Criteo Kaggle; here: ml-100k, 5,257 rows of tables, which need no compression"
INDUSTRIAL = "the paper: an industrial model; here: Complete Journey, 141,000 rows"
UNMATCHED = (
    "the papers: tuned models, Criteo and larger; here: one pass of Complete Journey, and sizes that are not matched, "
    "with 4 times DLRM's dense parameters in DCN V2 and 7 times in Wukong; sizes and dense_lr were chosen on one seed "
    "of these test rows"
)
ALL_ROUNDED = "the paper: every tensor of the network in bfloat16; here: rows of tables alone"


@dataclass(frozen=True)
class Experiment:
    """A comparison as of ``python -m bench.studies compare``.

    Args:
        name: of its folder.
        shows: what it is about, in a few words.
        configurations: as on the command line.
        lists: the flags that are lists, by their names: "format", "rounding", "embedding", "model".
        options: those of all configurations that are not at their default.
        seeds: how many.
        minutes, quick_minutes: of the processor, with one thread, beside other work: all of its runs, and those of
            `--quick`.
        claims: what it answers.
        needs_path: whether the user must say where the data is.
    """

    name: str
    shows: str
    claims: tuple[Claim, ...]
    seeds: int
    minutes: float
    quick_minutes: float
    configurations: tuple[str, ...] = ()
    lists: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    needs_path: bool = False

    def plan(self, base: TrainConfig, *, quick: bool = False, path: str | None = None) -> Comparison:
        """The comparison in ``base.runs_dir`` with the execution options of ``base``; ``path``: of the data."""
        config = dataclasses.replace(base, **self._options(quick), path=path if self.needs_path else None)
        lists = {f"{option}s": value for option, value in self.lists.items()}
        return plan(self.configurations, config, self._seeds(quick), self.name, **lists)

    def command(self, *, quick: bool = False) -> str:
        """The equivalent command line."""
        given = dict(self.lists) | ({"path": "PATH"} if self.needs_path else {}) | self._options(quick)
        values = {o: ",".join(map(str, v)) if isinstance(v, tuple) else str(v) for o, v in given.items()}
        flags = [part for option, value in values.items() for part in (f"--{option.replace('_', '-')}", value)]
        words = [*self.configurations, *flags, "--seeds", self._seeds(quick), "--name", self.name]
        return "python -m bench.studies compare " + " ".join(map(shlex.quote, words))

    def _options(self, quick: bool) -> dict[str, Any]:
        fewer = quick and self.options.get("data", TrainConfig.data) == "completejourney"
        return dict(self.options) | ({"weeks": QUICK_WEEKS} if fewer else {})

    def _seeds(self, quick: bool) -> str:
        return str(min(self.seeds, QUICK_SEEDS) if quick else self.seeds)


def _fewer(name: str, than: str, times: float, within: float = A_TENTH) -> Premise:
    """A premise of ``times`` fewer parameters, within the factor ``within``."""
    return Premise(Fewer("parameters", name, than), times * within, times / within)


def _quotients(differs: str) -> tuple[Claim, ...]:
    """Claims on quotient-remainder tables against hashing, for both data sets."""
    better = "beats hashing at about the same number of parameters"
    return (
        *(
            Claim(
                f"{better}, {n} ids a row",
                QUOTIENTS,
                Auc(f"qr{n}", (f"hash{n}",)),
                0.0,
                differs,
                strictly=True,
                premises=(_fewer(f"qr{n}", f"hash{n}", 1, A_FIFTH),),
            )
            for n in (4, 15, 60)
        ),
        Claim("with 60 ids a row as good as hashing with 4", QUOTIENTS, Auc("qr60", ("hash4",)), NO_WORSE, differs),
        Claim("with 4 ids a row as good as full tables", QUOTIENTS, Auc("qr4", ("full",)), NO_WORSE, differs),
    )


def _narrower(size: str, name: str, narrow: str, times: float, differs: str) -> Claim:
    """Mixed dimensions against narrow rows in all tables: fewer parameters, and about as many."""
    sizes = _fewer(name, "full", times), _fewer(name, narrow, 1)
    says, measure = f"better than rows of one width, {size}", Auc(name, (narrow,))
    return Claim(says, MIXED, measure, 0.0, differs, strictly=True, premises=sizes)


EXPERIMENTS = (
    Experiment(
        name="formats",
        shows="tables trained in every row format, with both roundings",
        lists={"format": "fp32,bf16,fp16,int8,int4,mx9,mx6,mx4", "rounding": "stochastic,nearest"},
        seeds=8,
        minutes=11,
        quick_minutes=1.5,
        claims=(
            Claim(
                "stochastic rounding keeps what rounding to the nearest loses",
                FIXED_POINT,
                Auc("int4-stochastic", ("int4-nearest",)),
                0.0,
                "the paper: networks in 16-bit fixed point; here: rows of 4 bits",
                strictly=True,
            ),
            Claim("MX9 takes 9 bits a number, FP32 32", MX, Fewer("weight_bytes", "mx9-stochastic", "fp32"), 32 / 9),
            Claim("MX6 takes 6 bits a number, FP32 32", MX, Fewer("weight_bytes", "mx6-stochastic", "fp32"), 32 / 6),
        ),
    ),
    Experiment(
        name="formats32",
        shows="what three formats cost, over 32 seeds",
        lists={"format": "fp32,bf16,int8,mx9", "rounding": "stochastic"},
        seeds=32,
        minutes=12,
        quick_minutes=0.5,
        claims=(
            Claim(
                "bfloat16 with stochastic rounding loses 0.001 at most",
                BF16,
                Auc("bf16-stochastic", ("fp32",)),
                -0.001,
                ALL_ROUNDED,
            ),
            Claim(
                "MX9 in place of FP32 costs no quality",
                MX,
                Auc("mx9-stochastic", ("fp32",)),
                NO_WORSE,
                "the paper: operands of matrix products, FP32 weights beside them; here: the rows are all there is",
            ),
            Claim("int8 costs no quality", TARGET, Auc("int8-stochastic", ("fp32",)), NO_WORSE),
        ),
    ),
    Experiment(
        name="small-updates",
        shows="updates below half a step of the format: a learning rate of 1e-5",
        configurations=(
            "fp32",
            *(f"{f}-{r}:format={f},rounding={r}" for f in ("bf16", "int8") for r in ("stochastic", "nearest")),
            "frozen:lr=1e-30",
        ),
        options={"lr": 1e-5},
        seeds=8,
        minutes=4.5,
        quick_minutes=0.8,
        claims=(
            Claim(
                "rounding to the nearest loses small updates, and quality with them",
                BF16,
                Auc("fp32", ("bf16-nearest",)),
                0.0,
                ALL_ROUNDED,
                strictly=True,
            ),
            Claim(
                "stochastic rounding loses 0.001 at most", BF16, Auc("bf16-stochastic", ("fp32",)), -0.001, ALL_ROUNDED
            ),
            Claim(
                "the same of int8: stochastic rounding is better than to the nearest",
                TARGET,
                Auc("int8-stochastic", ("int8-nearest",)),
                0.0,
                strictly=True,
            ),
        ),
    ),
    Experiment(
        name="collisions",
        shows="tables of quotients and remainders, and hashed ones",
        configurations=(
            "full",
            *(f"{kind}{n}:embedding={kind},collisions={n}" for n in (4, 15, 60) for kind in ("hash", "qr")),
            "qradd60:embedding=qr_add,collisions=60",
        ),
        seeds=8,
        minutes=6,
        quick_minutes=1.1,
        claims=(
            *_quotients(GROCERIES),
            Claim("products are better than sums", QUOTIENTS, Auc("qr60", ("qradd60",)), 0.0, GROCERIES, strictly=True),
        ),
    ),
    Experiment(
        name="dimensions",
        shows="narrower rows for larger tables, narrower ones for all, quotients and remainders in 8 bits",
        configurations=(
            *("full", "mixed2:embedding=mixed,temperature=0.08", "dim8:embedding_dim=8"),
            *("mixed8:embedding=mixed,temperature=0.24", "dim2:embedding_dim=2"),
            *("mixed16:embedding=mixed,temperature=0.4", "dim1:embedding_dim=1"),
            *("qr4-int8:embedding=qr,format=int8", "qr15-int8:embedding=qr,collisions=15,format=int8"),
        ),
        seeds=8,
        minutes=8,
        quick_minutes=1.2,
        claims=(
            Claim(
                "better by 0.001 with half the parameters",
                MIXED,
                Auc("mixed2", ("full",)),
                0.001,
                f"{GROCERIES}; the paper's 0.1 % is accuracy, here: AUC",
                premises=(_fewer("mixed2", "full", 2),),
            ),
            Claim(
                "as good with 16 times fewer parameters",
                MIXED,
                Auc("mixed16", ("full",)),
                NO_WORSE,
                GROCERIES,
                premises=(_fewer("mixed16", "full", 16),),
            ),
            _narrower("7 times fewer", "mixed8", "dim2", 7, GROCERIES),
            _narrower("2 times fewer", "mixed2", "dim8", 2, GROCERIES),
        ),
    ),
    Experiment(
        name="cache",
        shows="rows in low precision with the most used ones in FP32",
        configurations=(
            "fp32",
            *(f"{format}:format={format}" for format in ("int8", "int4", "mx4")),
            *(
                f"{format}c{share}:format={format},cache=0.0{share},policy=lfu"
                for format, share in (("int8", 5), ("int4", 1), ("int4", 5), ("mx4", 1), ("mx4", 5))
            ),
        ),
        seeds=8,
        minutes=8,
        quick_minutes=1.4,
        claims=(
            Claim(
                "int8 with a cache of 5 %: 3 times less memory",
                CACHE,
                Fewer("weight_bytes", "int8c5", "fp32"),
                3.0,
                f"{GROCERIES}; rows have 16 columns: scales and tags weigh more than in wide ones",
            ),
            Claim("int8 with a cache of 5 %: the same quality", CACHE, Auc("int8c5", ("fp32",)), NO_WORSE, GROCERIES),
            Claim(
                "int4 with a cache of 1 %: 7 times less memory",
                CACHE,
                Fewer("weight_bytes", "int4c1", "fp32"),
                7.0,
                f"{INDUSTRIAL}; rows have 16 columns: scales and tags weigh more than in wide ones",
            ),
            Claim("int4 with a cache of 1 %: the same quality", CACHE, Auc("int4c1", ("fp32",)), NO_WORSE, INDUSTRIAL),
            Claim(
                "mx4: a cache of 5 % gives back half of what the format loses",
                TARGET,
                Auc("mx4c5", ("mx4", "fp32")),
                0.0,
            ),
        ),
    ),
    Experiment(
        name="dedup",
        shows="equal histories of a batch looked up once: the scores",
        configurations=("on:dedup=on", "off:dedup=off"),
        seeds=4,
        minutes=0.9,
        quick_minutes=0.3,
        claims=(Claim("deduplication costs no quality", RECD, Auc("on", ("off",)), NO_WORSE),),
    ),
    Experiment(
        name="dedup-speed",
        shows="equal histories looked up once, and as windows: the speed with 200 ids a history and 64 columns",
        configurations=("off:dedup=off", "on:dedup=on", "windows:dedup=windows"),
        options={"embedding_dim": 64, "history": 200},
        seeds=4,
        minutes=2.2,
        quick_minutes=0.6,
        claims=(
            Claim(
                "trains up to 2.48 times as many examples/s",
                RECD,
                Faster("on", "off"),
                2.48,
                "the paper: an industrial system, its reading and its attention, too; here: one history of twelve "
                "features, reader and model on the same cores",
            ),
            Claim("trains faster at all", TARGET, Faster("on", "off"), 1.0, strictly=True),
            Claim("windows change no score", TARGET, Same("windows", "on"), 0.0),
        ),
    ),
    Experiment(
        name="models",
        shows="DLRM, DCN V2 and Wukong on the same tables",
        lists={"model": "dlrm,dcnv2,wukong"},
        seeds=8,
        minutes=6,
        quick_minutes=0.7,
        claims=(
            Claim("DCN V2 is better than DLRM", DCN, Auc("dcnv2", ("dlrm",)), 0.0, UNMATCHED, strictly=True),
            Claim("Wukong is better than DLRM", WUKONG, Auc("wukong", ("dlrm",)), 0.0, UNMATCHED, strictly=True),
            Claim("Wukong is better than DCN V2", WUKONG, Auc("wukong", ("dcnv2",)), 0.0, UNMATCHED, strictly=True),
        ),
    ),
    Experiment(
        name="precision",
        shows="the dense side in bfloat16, and with activations in shared microexponents",
        configurations=("fp32", "bf16:precision=bf16", *(f"{f}:activations={f}" for f in ("mx9", "mx6", "mx4"))),
        seeds=8,
        minutes=4,
        quick_minutes=0.6,
        claims=(
            Claim(
                "bfloat16 with FP32 weights costs no quality",
                BF16_MIXED,
                Auc("bf16", ("fp32",)),
                NO_WORSE,
                "the paper: industrial models; here: small MLPs, one pass of Complete Journey",
            ),
            Claim(
                "operands in MX9 cost no quality",
                MX,
                Auc("mx9", ("fp32",)),
                NO_WORSE,
                "the paper: both operands of every product, gradients, too; here: activations alone",
            ),
        ),
    ),
    Experiment(
        name="movielens",
        shows="compressed tables on other data",
        configurations=(
            "full",
            *(f"{kind}{n}:embedding={kind},collisions={n}" for n in (4, 15, 60) for kind in ("hash", "qr")),
            *("one:embedding=hash,collisions=2000", "mixed2:embedding=mixed,temperature=0.125", "dim8:embedding_dim=8"),
            *("mixed8:embedding=mixed,temperature=0.4", "dim2:embedding_dim=2"),
            *("mixed16:embedding=mixed,temperature=0.6,threshold=0", "dim1:embedding_dim=1"),
            "qr4-int8:embedding=qr,format=int8",
        ),
        options={"data": "bench.studies.movielens:MovieLens", "batch_size": 512, "epochs": 2},
        needs_path=True,
        seeds=8,
        minutes=4.5,
        quick_minutes=3.1,
        claims=(
            *_quotients(MOVIES),
            Claim(
                "better by 0.001 with half the parameters",
                MIXED,
                Auc("mixed2", ("full",)),
                0.001,
                MOVIES,
                premises=(_fewer("mixed2", "full", 2),),
            ),
            _narrower("half the size", "mixed2", "dim8", 2, MOVIES),
        ),
    ),
)
