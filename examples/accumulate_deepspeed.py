"""A DeepSpeed engine loop that accumulates: windows of any length, whatever the config's ``gradient_accumulation_steps``.

    torchrun --nproc-per-node 2 examples/accumulate_deepspeed.py                                       train
    truestep verify examples/accumulate_deepspeed.py --backend zero1,zero2,zero3 --micro-batches 1,3   prove its step

The config leaves accumulation and clipping out: both are the accumulator's. The window grows from 1 to 4 micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import truestep as ts

Batch = tuple[Tensor, Tensor]
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": 10**9,
}
max_norm = 1.0
LENGTHS = (1, 1, 2, 2, 4, 4, 4, 4)


def model() -> nn.Module:
    """Return the model with its seeded weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 3))


def optimizer(named_params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return the optimizer over the params that it is given."""
    return torch.optim.AdamW([param for _, param in named_params], lr=0.02)


def batches(dp_rank: int, dp_size: int) -> Iterator[Batch]:
    """Yield this rank's batches without end."""
    draw = torch.Generator().manual_seed(dp_rank)
    while True:
        x = torch.randn(8, 12, generator=draw)
        yield x, x[:, :3].tanh()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over the items of one micro-batch, 0-d."""
    return functional.mse_loss(model(batch[0]), batch[1])


def train_step(engine: Any, optimizer: Any, batches: Sequence[Batch]) -> Tensor | None:
    """Take one step: what `truestep verify` judges."""
    acc = ts.Accumulator(engine, optimizer, micro_batches=len(batches), max_norm=max_norm)
    return one_window(acc, engine, batches)


def one_window(acc: ts.Accumulator, engine: Any, batches: Sequence[Batch]) -> Tensor | None:
    """Take one step over these micro-batches; return the loss of the window."""
    with acc.open(len(batches)) as window:
        for batch in batches:
            window.backward(loss(engine, batch))
        window.step()
    return window.loss


def main() -> float:
    """Train; return the loss of the last window."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    import deepspeed

    plain = model()
    made = optimizer(plain.named_parameters())
    engine, engine_optimizer, _, _ = deepspeed.initialize(model=plain, optimizer=made, config=CONFIG)
    acc = ts.Accumulator(engine, engine_optimizer, micro_batches=max(LENGTHS), max_norm=max_norm)
    stream = batches(dist.get_rank(), dist.get_world_size())
    last = None
    for length in LENGTHS:
        last = one_window(acc, engine, [next(stream) for _ in range(length)])
    assert last is not None
    if dist.get_rank() == 0:
        print(f"loss of the last window {last.item():.4f}")
    engine.destroy()
    return last.item()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
