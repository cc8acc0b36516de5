"""FBGEMM's training tables, ``SplitTableBatchedEmbeddingBagsCodegen``, with their fused optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from rec_kernels.convert.external_tables import (
    FAMILIES,
    ExternalTables,
    Family,
    TableTensors,
    check_state,
    check_weight,
    refuse_options,
)
from rec_kernels.nn.tables.config import EmbeddingBagConfig, EmbeddingConfig
from rec_kernels.nn.tables.optimizers import Optimizer

#: FBGEMM's optimizer -> this package's op name and state names, in the order of ``split_optimizer_states()``.
OPTIMIZERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "EXACT_SGD": ("sgd", ()),
    "EXACT_ADAGRAD": ("adagrad", ("sum",)),
    "EXACT_ROWWISE_ADAGRAD": ("rowwise_adagrad", ("sum",)),
    "ADAM": ("adam", ("exp_avg", "exp_avg_sq")),
    "PARTIAL_ROWWISE_ADAM": ("rowwise_adam", ("exp_avg", "exp_avg_sq")),
    "LAMB": ("lamb", ("exp_avg", "exp_avg_sq")),
}
#: FBGEMM's ``SparseType`` code -> output dtype, for the dtypes supported here.
_OUTPUT_DTYPES = {0: torch.float32, 1: torch.float16, 5: torch.bfloat16}


def output_dtype_of(module: Any) -> torch.dtype:
    """The output dtype of lookups; raises ValueError if they are quantized."""
    if int(module.output_dtype) not in _OUTPUT_DTYPES:
        raise ValueError(f"theirs: output_dtype must be FP32, FP16 or BF16, got number {int(module.output_dtype)}")
    return _OUTPUT_DTYPES[int(module.output_dtype)]


class FbgemmTables(ExternalTables):
    """Tables of one ``SplitTableBatchedEmbeddingBagsCodegen``, of FBGEMM 1.8.

    Args:
        module: the FBGEMM module, on any device and memory location; its cache is flushed before rows are read.
        rows_only: True to ignore the optimizer.
        names: names of the tables, from a TorchRec collection. None: tables are matched by position.

    Raises:
        ValueError: the optimizer or the rows' precision has no equivalent here.
    """

    def __init__(self, module: Any, *, rows_only: bool = False, names: Sequence[str] | None = None) -> None:
        self._module, self._names = module, names
        self._kinds: tuple[str, ...] = ()
        self.has_names = names is not None
        self._described = f"FBGEMM's {module.optimizer.name}"
        if module.weights_precision.name not in ("FP32", "FP16", "BF16"):
            raise ValueError(
                f"theirs: weights_precision must be FP32, FP16 or BF16, got {module.weights_precision.name}, "
                "whose rows have FBGEMM's own scales"
            )
        for table, weight in zip(self.names(), self.weights(), strict=True):
            check_weight(table, weight)
        if not rows_only:
            self._read_optimizer()

    def _read_optimizer(self) -> None:
        module, name = self._module, self._module.optimizer.name
        if name not in OPTIMIZERS:
            raise ValueError(f"theirs: {self._described} has no counterpart here, only {', '.join(OPTIMIZERS)}")
        mode = module.weight_decay_mode.name
        if mode not in ("NONE", "L2", "DECOUPLE") or module.use_rowwise_bias_correction:
            raise ValueError(
                f"theirs: {self._described} counts the uses of rows, which no optimizer here does: "
                f"weight_decay_mode = {mode}, use_rowwise_bias_correction = {module.use_rowwise_bias_correction}"
            )
        family, self._kinds = OPTIMIZERS[name]
        self.families = [Family(family, self._described)] * len(self.names())

    def names(self) -> list[str]:
        """``names`` of the constructor, else FBGEMM's ``table_names``, else t0, t1 ..."""
        names = self._names or self._module.table_names
        return list(names) if names else [f"t{i}" for i in range(len(self._module.embedding_specs))]

    def weights(self) -> list[Tensor]:
        return self._module.split_embedding_weights()

    def read(self) -> list[TableTensors]:
        """Flushes FBGEMM's cache, then reads rows and state of the tables."""
        self._module.flush()
        if not self.families:
            return [TableTensors(name, weight) for name, weight in zip(self.names(), self.weights(), strict=True)]
        step, found = int(self._module.iter.item()), []
        family = self.families[0]
        for name, weight, state in zip(self.names(), self.weights(), self._states(), strict=True):
            check_state(name, family.name, weight, state)
            found.append(TableTensors(name, weight, state, step, family))
        return found

    def _states(self) -> list[dict[str, Tensor]]:
        if not self._kinds:
            return [{} for _ in self.names()]
        states = self._module.split_optimizer_states()
        return [dict(zip(self._kinds, state, strict=True)) for state in states]

    def write(self, tables: Sequence[TableTensors]) -> None:
        """Copies into the module's memory, and resets FBGEMM's cache, whose rows are stale then."""
        self._module.flush()
        for weight, state, given in zip(self.weights(), self._states(), tables, strict=True):
            weight.copy_(given.weight)
            for kind, values in given.state.items():
                state[kind].copy_(values)
        if tables and tables[0].step is not None:
            self._module.set_optimizer_step(tables[0].step)
            self._module.iter_cpu.fill_(tables[0].step)  # FBGEMM syncs it from ``iter`` only while it is 0
        self._module.reset_cache_states()

    def counterparts(self) -> list[Optimizer]:
        module, options = self._module, self._module.optimizer_args
        wrong = {name: getattr(options, name) for name in ("gradient_clipping", "max_norm", "weight_decay")}
        wrong = {name: value for name, value in wrong.items() if value}
        refuse_options(self._described, wrong, "FBGEMM's kernels disagree about their meaning")
        numbers: dict[str, Any] = {"lr": float(str(numpy.float32(module.get_learning_rate())))}  # decimal, as 0.05
        if self._kinds:
            numbers["eps"] = float(options.eps)
        if "exp_avg" in self._kinds:
            numbers["betas"] = float(options.beta1), float(options.beta2)
        return [FAMILIES[family.name](**numbers) for family in self.families]


def configs_of(
    module: Any, names: Sequence[str], sizes: Iterable[Sequence[int]], formats: Iterable[str], **options: Any
) -> list[EmbeddingConfig]:
    """Configurations of the tables of FBGEMM's module, for training or inference; ``options``: of each.

    Their features are f0, f1 ..., numbered in the order of the module's input.
    """
    kind: type[EmbeddingConfig] = EmbeddingConfig
    if module.pooling_mode.name != "NONE":
        kind, options["pooling"] = EmbeddingBagConfig, module.pooling_mode.name.lower()
    table_of, made = list(module.feature_table_map), []
    for i, (name, size, format) in enumerate(zip(names, sizes, formats, strict=True)):
        features = [f"f{f}" for f, table in enumerate(table_of) if table == i]
        made.append(kind(*size, name=name, feature_names=features, format=format, **options))
    return made
