"""Compiles a model for C++ with AOTInductor: embedding lookups, the dot interaction, two layers.

    python examples/cpp/export.py model.pt2 inputs.pt

serve.cpp runs it; docs/cpp.md has the commands. Its scores equal those printed here, bit for bit.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config

import rec_kernels as rk

KEYS = ["user", "item", "shop"]
DENSE, WIDTH = 13, 16


class Model(nn.Module):
    """A small DLRM for inference, with tables in two formats and no optimizer or gradients."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            rk.EmbeddingBagConfig(1000, WIDTH, name="people", feature_names=["user"]),
            rk.EmbeddingBagConfig(500, WIDTH, name="things", feature_names=["item", "shop"], format="int8"),
        ]
        self.tables = rk.EmbeddingBagCollection(tables, optimizer=rk.RowwiseAdagrad(lr=0.1)).for_serving()
        self.bottom = nn.Sequential(nn.Linear(DENSE, WIDTH), nn.ReLU())
        self.top = nn.Linear(WIDTH + 6, 1)  # 6 pairs of 4 vectors

    def forward(self, dense: Tensor, values: Tensor, offsets: Tensor) -> Tensor:
        """Scores [B] of dense features [B, 13] and bags of ids: values [N] and offsets [3 * B + 1], grouped by key."""
        bags = rk.KeyedJaggedTensor(KEYS, values, offsets=offsets)
        embedded = self.tables(bags).values().view(dense.size(0), len(KEYS), WIDTH)
        return self.top(rk.dot_interaction(self.bottom(dense), embedded)).squeeze(1)


def batch(size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Dense features, ids and offsets of bags of 0 to 4 ids."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, (len(KEYS) * size,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    values = torch.randint(500, (int(offsets[-1]),), generator=generator)
    return torch.randn(size, DENSE, generator=generator), values, offsets


def compile_model(model: nn.Module, path: str) -> None:
    """Compiles the model for any batch size; without the option, torch treats sizes of 0 and 1 as constants."""
    any_size = {0: torch.export.Dim.DYNAMIC}
    with torch.no_grad(), _config.patch(backed_size_oblivious=True):
        program = torch.export.export(model.eval(), batch(8, 0), dynamic_shapes=(any_size, any_size, any_size))
    torch._inductor.aoti_compile_and_package(program, package_path=path)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the .pt2 file to write")
    parser.add_argument("inputs", help="the file to write a batch to")
    options = parser.parse_args()
    torch.manual_seed(0)
    model, inputs = Model(), batch(5, 1)
    compile_model(model, options.model)
    torch.save(inputs, options.inputs)
    with torch.no_grad():
        print("scores in Python:", *(f"{score:.9g}" for score in model(*inputs)))


if __name__ == "__main__":
    main()
