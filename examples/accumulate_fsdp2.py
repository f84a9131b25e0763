"""A hand-written FSDP2 loop that accumulates: bf16 params, gradients added up in float32, a tail that counts by its own length.

torchrun --nproc-per-node 2 examples/accumulate_fsdp2.py                            train
truestep verify examples/accumulate_fsdp2.py --backend fsdp2 --micro-batches 1,4    prove its step
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import truestep as ts

MICRO_BATCHES = 4
Batch = tuple[Tensor, Tensor]


def model() -> nn.Module:
    """Return the model with its seeded weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 24), nn.GELU(), nn.Linear(24, 3)).bfloat16()


def optimizer(named_params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return the optimizer over the params that it is given."""
    return torch.optim.SGD([param for _, param in named_params], lr=0.05, momentum=0.9)


def batches(dp_rank: int, dp_size: int) -> Iterator[Batch]:
    """Yield this rank's batches without end."""
    draw = torch.Generator().manual_seed(dp_rank)
    while True:
        x = torch.randn(8, 12, generator=draw)
        yield x.bfloat16(), x[:, :3].tanh().bfloat16()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over the items of one micro-batch, 0-d."""
    x, y = batch
    return functional.mse_loss(model(x).float(), y.float())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Iterable[Batch]) -> Tensor | None:
    """Train until the loader ends; return the loss of the last window."""
    acc = ts.Accumulator(model, optimizer, micro_batches=MICRO_BATCHES, grad_dtype=torch.float32)
    last = None
    for window in acc.windows(loader):
        for batch in window:
            window.backward(loss(model, batch))
        window.step()
        last = window.loss
    return last


train_step = train  # what `truestep verify` judges, a window at a time


def main(windows: int = 20) -> float:
    """Train; return the loss of the last window."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    sharded = fully_shard(model())
    stream = batches(dist.get_rank(), dist.get_world_size())
    loader = [next(stream) for _ in range(windows * MICRO_BATCHES + 1)]  # one more: the last window is a tail
    last = train(sharded, optimizer(sharded.named_parameters()), loader)
    assert last is not None
    if dist.get_rank() == 0:
        print(f"loss of the last window {last.item():.4f}")
    return last.item()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
