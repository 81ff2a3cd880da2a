"""Training with DDP as the PyTorch tutorials write it: what benchmarks/startup.py compares
launch.py with.

    torchrun --nproc_per_node=2 benchmarks/bare_ddp.py [--data sklearn|file] [--device cpu|cuda]
    [--steps N]

It imports nothing of ddp_train. The layers are those of conf/model/cnn.yaml on 8 x 8 images, the
data set is the digits, the batch has 96 samples over all processes. Rank 0 prints `FIRST_STEP
<seconds since the epoch>` after its first optimizer step.

--data sklearn   `sklearn.datasets.load_digits`, as people write it: importing scikit-learn takes a
                 good second
--data file      scikit-learn's file, read with numpy as ddp_train reads it
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

GLOBAL_BATCH_SIZE = 96


def read_digits(how: str) -> TensorDataset:
    """All 1,797 images [n, 1, 8, 8] from -1 to 1, and their labels."""
    if how == "sklearn":
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = digits.images
        labels = digits.target
    else:
        spec = importlib.util.find_spec("sklearn")
        assert spec and spec.submodule_search_locations, "scikit-learn ships the digits"
        table = np.loadtxt(
            Path(spec.submodule_search_locations[0], "datasets/data/digits.csv.gz"), delimiter=","
        )
        images = table[:, :64]
        labels = table[:, 64]
    return TensorDataset(
        torch.tensor(images).float().view(-1, 1, 8, 8) / 8 - 1, torch.tensor(labels).long()
    )


def build_model() -> nn.Module:
    """The layers of ddp_train/conf/model/cnn.yaml."""

    def convolution(channels_in: int, channels: int) -> list[nn.Module]:
        return [
            nn.Conv2d(channels_in, channels, 3, padding=1, bias=False),
            nn.GroupNorm(8, channels),
            nn.ReLU(inplace=True),
        ]

    return nn.Sequential(
        *convolution(1, 32),
        *convolution(32, 32),
        nn.MaxPool2d(2),
        *convolution(32, 64),
        *convolution(64, 64),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4, 10),
    )


def main() -> None:
    """Trains for some steps."""
    parser = argparse.ArgumentParser(description="Plain DDP training on the digits.")
    parser.add_argument("--data", choices=["sklearn", "file"], default="sklearn")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=1)
    arguments = parser.parse_args()

    on_gpu = arguments.device == "cuda"
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    else:
        device = torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)
    data = read_digits(arguments.data)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, shuffle=True)
    loader = DataLoader(
        data, batch_size=GLOBAL_BATCH_SIZE // dist.get_world_size(), sampler=sampler
    )
    model = DDP(build_model().to(device), device_ids=[device] if on_gpu else None)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = epoch = 0
    while step < arguments.steps:
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = criterion(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step == 1 and dist.get_rank() == 0:
                if on_gpu:
                    torch.cuda.synchronize()
                print(f"FIRST_STEP {time.time():.6f}", flush=True)
            if step == arguments.steps:
                break
        epoch += 1
    del model, optimizer, loss
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
