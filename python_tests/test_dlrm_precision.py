"""The model and the trainer with a bfloat16 dense part and quantized activations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_lines import main
from dlrm_cases import PLAIN, flags_of, plain_config
from tiers import full
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, linear

import rec_kernels as rk
from rec_kernels.dlrm import DLRM, Batch, Feature, train
from rec_kernels.dlrm.synthetic import Synthetic
from rec_kernels.reference import row_formats
from rec_kernels.reference.dot_interaction import interaction_reference
from rec_kernels.testing import same_bits

FEATURES = [Feature(f"f{i}", 40 + i) for i in range(5)]
STEPS, ROWS, DENSE, D = 200, 64, 5, 20
TABLE_LR, DENSE_LR = 0.3, 0.01
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def batches(steps: int = STEPS) -> list[Batch]:
    """Rows with a label that depends on a product of two features' secrets and on the dense columns."""
    torch.manual_seed(0)
    secrets, found = torch.randn(len(FEATURES), 50), []
    for _ in range(steps):
        dense, ids = torch.randn(ROWS, DENSE), torch.randint(40, (len(FEATURES), ROWS))
        signal = secrets[0][ids[0]] * secrets[1][ids[1]] + dense[:, 0]
        features = rk.KeyedJaggedTensor(
            [f.name for f in FEATURES], ids.flatten(), offsets=torch.arange(ids.numel() + 1)
        )
        found.append(Batch(dense, features, (signal > 0).float()))
    return found


def make_model(precision: str = "fp32", activations: str = "fp32", **options) -> DLRM:
    """Makes a model, with the same initial weights every time."""
    options = {"bottom": (16,), "top": (24, 8), "optimizer": rk.SGD(lr=TABLE_LR)} | options
    return DLRM(FEATURES, DENSE, D, precision=precision, activations=activations, **options)


class Plain(nn.Module):
    """The model in plain torch: float32 parameters with explicit casts and roundings."""

    def __init__(self, model: DLRM, precision: str, activations: str) -> None:
        super().__init__()
        self.dtype, self.format = DTYPES[precision], activations
        bags = model.embeddings.embedding_bags
        self.tables = nn.ParameterList(bags[f.name].weight.detach().clone() for f in FEATURES)
        self.bottom, self.top = (
            nn.ParameterList(p.detach().clone() for p in mlp.parameters()) for mlp in (model.bottom, model.top)
        )

    def forward(self, batch: Batch) -> Tensor:
        """Logits, float32."""
        dense = self._mlp(self.bottom, batch.dense).relu()
        ids = batch.features.values().view(len(FEATURES), -1)
        sparse = torch.stack([table[rows] for table, rows in zip(self.tables, ids, strict=True)], 1).to(self.dtype)
        # Products of bfloat16 are summed in float32, gradients too.
        vectors = (self._rounded(t).float() for t in (dense, sparse))
        return self._mlp(self.top, interaction_reference(*vectors).to(self.dtype)).squeeze(1).float()

    def _mlp(self, parameters: nn.ParameterList, x: Tensor) -> Tensor:
        pairs = list(zip(parameters[::2], parameters[1::2], strict=True))
        for number, (weight, bias) in enumerate(pairs):
            x = linear(self._rounded(x).to(self.dtype), weight.to(self.dtype), bias.to(self.dtype))
            x = x if number == len(pairs) - 1 else x.relu()
        return x

    def _rounded(self, x: Tensor) -> Tensor:
        """Rounds with the formats' reference; the gradient passes unchanged."""
        if self.format == "fp32":
            return x
        rows = x.detach().flatten(0, -2)
        encoded = row_formats.quantize_rows(rows, self.format)
        found = row_formats.dequantize_rows(encoded, self.format, x.shape[-1]).to(x.dtype).view(x.shape)
        return x + (found - x).detach()


def losses(model: nn.Module, dense: list[Tensor], tables: list[Tensor], steps: list[Batch]) -> Tensor:
    """Loss of each step; ``tables`` are those without a fused update."""
    groups = [torch.optim.Adam(dense, lr=DENSE_LR)]
    if tables:
        groups.append(torch.optim.SGD(tables, lr=TABLE_LR))
    found = []
    for batch in steps:
        loss = binary_cross_entropy_with_logits(model(batch), batch.label)
        model.zero_grad()
        loss.backward()
        for optimizer in groups:
            optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


def fused_losses(model: DLRM, steps: list[Batch]) -> Tensor:
    """Losses of a model with fused updates."""
    return losses(model, model.dense_parameters(), [], steps)


@pytest.mark.parametrize(
    ("precision", "activations"),
    [("fp32", "fp32"), ("bf16", "mx6"), *full(("bf16", "fp32"), ("fp32", "mx9"), ("fp32", "mx6"), ("bf16", "mx9"))],
)
def test_losses_are_those_of_plain_torch(precision: str, activations: str) -> None:
    """Losses equal plain torch's at every step while they fall."""
    steps, fused = batches(), make_model(precision, activations)
    plain = Plain(fused, precision, activations)
    expected = losses(plain, [*plain.bottom, *plain.top], list(plain.tables), steps)
    found = fused_losses(fused, steps)
    whole = (precision, activations) == ("fp32", "fp32")
    # A float32 sum in another order may round differently.
    torch.testing.assert_close(found, expected, rtol=1e-5 if whole else 1e-3, atol=0)
    assert found[-10:].mean() < 0.9 * found[:10].mean()
    if not whole:
        unrounded = fused_losses(make_model(), steps)
        assert (found - expected).abs().mean() < 0.2 * (found - unrounded).abs().mean()


def test_what_is_bfloat16_and_what_is_not() -> None:
    """Activations and gradients are bfloat16 from the lookup to the last layer; stored state is float32."""
    model, (batch,), seen = make_model("bf16"), batches(1), {}
    outputs = {"embeddings": model.embeddings, "interaction": model.interaction}
    outputs |= {f"{n}.{i}": m for n in ("bottom", "top") for i, m in enumerate(getattr(model, n))}
    for name, module in outputs.items():
        module.register_forward_hook(lambda _m, _i, out, name=name: seen.setdefault(name, out))
    logits = model(batch)
    outs = {name: out.values() if name == "embeddings" else out for name, out in seen.items()}
    assert {name for name, out in outs.items() if out.dtype != torch.bfloat16} == set()
    assert len(outs) == len(outputs)
    pooled = outs["embeddings"]
    assert torch.autograd.grad(logits.sum(), pooled, retain_graph=True)[0].dtype == torch.bfloat16
    loss = binary_cross_entropy_with_logits(logits, batch.label)
    assert {logits.dtype, loss.dtype} == {torch.float32}
    optimizer = torch.optim.Adam(model.dense_parameters())
    loss.backward()
    optimizer.step()
    kept = [*model.parameters(), *(p.grad for p in model.dense_parameters())]
    kept += [t for state in optimizer.state.values() for t in state.values()]
    assert {t.dtype for t in kept} == {torch.float32}


def test_pooled_embeddings_are_rounded_once() -> None:
    """Pooled embeddings are float32 sums rounded once to the nearest bfloat16."""
    (batch,) = batches(1)
    full, half = (make_model(precision).pooled(batch) for precision in DTYPES)
    assert same_bits(half, full.bfloat16())


@pytest.mark.parametrize("activations", ["mx9", "mx6", "mx4"])
@pytest.mark.parametrize("precision", DTYPES)
def test_what_is_rounded(precision: str, activations: str) -> None:
    """Inputs of the interaction and of every linear layer are in the format; parameters are not."""
    model, (batch,), entered = make_model(precision, activations), batches(1), {}
    before = {name: t.clone() for name, t in model.state_dict().items()}
    modules = {"interaction": model.interaction}
    modules |= {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    for name, module in modules.items():
        module.register_forward_pre_hook(lambda _m, inputs, name=name: entered.update({name: inputs}))
    model(batch)
    assert {name: len(inputs) for name, inputs in entered.items()} == {"interaction": 2} | dict.fromkeys(
        ("bottom.0", "bottom.2", "top.0", "top.2", "top.4"), 1
    )
    for inputs in entered.values():
        for x in inputs:
            assert same_bits(x, rk.fake_quantize(x, activations))
    assert not same_bits(batch.dense, entered["bottom.0"][0])
    assert all(same_bits(t, before[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"activations": "mx6"}], ids=str)
def test_compressed_tables_and_others_begin_with_the_same_weights(options: dict) -> None:
    """Neither option changes initial weights; narrow rows are projected in float32, then rounded to bfloat16."""
    compressions = {"f0": rk.MixedDimension(4), "f1": rk.QuotientRemainder(4), "f2": rk.Hash(9)}
    (batch,) = batches(1)
    given, plain = make_model(compressions=compressions, **options), make_model(compressions=compressions)
    for (name, t), other in zip(given.state_dict().items(), plain.state_dict().values(), strict=True):
        assert same_bits(t, other), name
    assert same_bits(given.pooled(batch), plain.pooled(batch).to(DTYPES[options.get("precision", "fp32")]))
    fused_losses(given, [batch])
    assert all(p.grad.any() for p in given.dense_parameters() if p.dim() > 1)


def test_a_data_set_without_dense_columns() -> None:
    """A model without dense columns trains."""
    (batch,) = batches(1)
    batch = Batch(torch.empty(ROWS, 0), batch.features, batch.label)
    model = DLRM(FEATURES, 0, D, activations="mx9")
    assert model(batch).isfinite().all()


def test_wrong_names_of_a_model() -> None:
    """Unknown names are rejected at construction."""
    with pytest.raises(ValueError, match="precision is 'fp16', allowed is fp32 or bf16"):
        make_model("fp16")
    with pytest.raises(ValueError, match='"mx5"'):
        make_model(activations="mx5")


FLAGS = flags_of(PLAIN)


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    "options",
    [
        {"dedup": "on"},
        {"dedup": "windows"},
        {"embedding": "mixed"},
        {"cache": 0.1},
        {"model": "dcnv2"},
        {"model": "wukong"},
    ],
    ids=str,
)
def test_beside_other_options(options: dict, data: Synthetic, tmp_path: Path) -> None:
    """Precision works with shared bags, windows, compressed tables, a row cache, and other models."""
    options = options | {"precision": "bf16", "activations": "mx9"}
    assert train(plain_config(tmp_path, **options), data, progress=False)["log_loss"] < 0.7


@pytest.mark.usefixtures("no_pictures")
def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Run names and comparison configurations have the precision."""
    more = ["--precision", "bf16", "--activations", "mx6"]
    assert main(["train", *FLAGS, *more, "--runs-dir", str(tmp_path / "one")]) == 0
    (run,) = (tmp_path / "one").iterdir()
    assert run.name.endswith("-d16-densebf16-actmx6-b500-seed0")
    recorded = json.loads((run / "config.json").read_text())["config"]
    assert (recorded["precision"], recorded["activations"]) == ("bf16", "mx6")
    given = ["fp32", "bf16:precision=bf16", "mx9:activations=mx9"]
    assert main(["compare", *given, *FLAGS, "--seeds", "1", "--runs-dir", str(tmp_path), "--name", "c"]) == 0
    result = json.loads((tmp_path / "c" / "compare.json").read_text())
    found = {c["name"]: c["options"] for c in result["configurations"]}
    assert found["bf16"] == found["fp32"] | {"precision": "bf16"}
    assert found["mx9"] == found["fp32"] | {"activations": "mx9"}
    assert len(found) == 3
