"""An accelerate loop that accumulates: the accumulator's windows stand where ``accelerator.accumulate`` would.

    torchrun --nproc-per-node 2 examples/accumulate_accelerate.py                                   train
    truestep verify examples/accumulate_accelerate.py --backend accelerate-ddp --micro-batches 1,4  prove its step

``gather_for_metrics`` leaves the loader's padding out as ever, although windows draw ahead; the schedule advances once a window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import truestep as ts

MICRO_BATCHES, max_norm = 4, 100.0
Batch = tuple[Tensor, Tensor]


def model() -> nn.Module:
    """Return the model with its seeded weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 3))


def optimizer(named_params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return the optimizer over the params that it is given."""
    return torch.optim.AdamW([param for _, param in named_params], lr=0.01)


def rows(count: int, seed: int) -> list[Batch]:
    """Return inputs and targets, one pair an item."""
    x = torch.randn(count, 12, generator=torch.Generator().manual_seed(seed))
    return list(zip(x, x[:, :3].tanh(), strict=True))


def batches(dp_rank: int, dp_size: int) -> Iterator[Batch]:
    """Yield this rank's batches without end."""
    seed = dp_rank
    while True:
        x, y = zip(*rows(8, seed), strict=True)
        yield torch.stack(x), torch.stack(y)
        seed += dp_size


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over the items of one micro-batch, 0-d."""
    return functional.mse_loss(model(batch[0]), batch[1])


def train_step(model: nn.Module, optimizer: Any, batches: Iterable[Batch]) -> Tensor | None:
    """Take one step: what `truestep verify` judges."""
    acc = ts.Accumulator(model, optimizer, micro_batches=MICRO_BATCHES, max_norm=max_norm)
    return epoch(acc, model, batches)


def epoch(acc: ts.Accumulator, model: nn.Module, loader: Iterable[Batch]) -> Tensor | None:
    """Go through the loader once; return the loss of the last window."""
    last = None
    for window in acc.windows(loader):
        for batch in window:
            window.backward(loss(model, batch))
        window.step()
        last = window.loss
    return last


def main(epochs: int = 5) -> float:
    """Train; return the loss of the last window."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    plain = model()
    made = optimizer(plain.named_parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda window: 0.99**window)
    prepared = accelerator.prepare(plain, made, schedule, DataLoader(rows(150, 0), batch_size=4))
    ready, ready_optimizer, ready_schedule, loader = prepared
    acc = ts.Accumulator(ready, ready_optimizer, micro_batches=MICRO_BATCHES, max_norm=max_norm, scheduler=ready_schedule)
    last = None
    for _ in range(epochs):
        last = epoch(acc, ready, loader)
    assert last is not None
    assert schedule.last_epoch == acc.state_dict()["windows"]
    accelerator.print(f"loss of the last window {last.item():.4f} after {schedule.last_epoch} windows")
    return last.item()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
