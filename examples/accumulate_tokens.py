"""A language model on documents of unequal lengths: the loss is the mean over the tokens of the window, on all ranks.

    torchrun --nproc-per-node 2 examples/accumulate_tokens.py                        train
    truestep verify examples/accumulate_tokens.py --backend ddp --micro-batches 1,4  prove its step

A mean of the micro-batches' means would weigh a token of a short document more. The ranks may hold unequally many documents: one
that runs out replays its last batch, which adds nothing, so that the others do not wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import truestep as ts

MICRO_BATCHES = 4
PADDING = -100
TEXT = b"To accumulate is to wait. A window has many micro-batches, and one step. Every token counts once. " * 8


class NextByte(nn.Module):
    """Bytes (batch, length) in, logits of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 24)
        self.memory = nn.GRU(24, 32, batch_first=True)
        self.head = nn.Linear(32, 256)

    def forward(self, tokens: Tensor) -> Any:
        """Map int64 (batch, length) to (batch, length, 256)."""
        return self.head(self.memory(self.embedding(tokens))[0])


def model() -> nn.Module:
    """Return the model with its seeded weights."""
    torch.manual_seed(0)
    return NextByte()


def optimizer(named_params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return the optimizer over the params that it is given."""
    return torch.optim.AdamW([param for _, param in named_params], lr=0.01)


def batches(dp_rank: int, dp_size: int) -> Iterator[Tensor]:
    """Yield int64 (3, 25): documents of 2 to 25 bytes, padded."""
    draw = torch.Generator().manual_seed(dp_rank)
    text = torch.tensor(list(TEXT))
    while True:
        starts = torch.randint(len(TEXT) - 25, (3, 1), generator=draw)
        lengths = torch.randint(2, 26, (3, 1), generator=draw)
        places = torch.arange(25)
        yield torch.where(places < lengths, text[starts + places], PADDING)


def num_items(batch: Tensor) -> int:
    """Return over how many tokens the loss of a batch is."""
    return int((batch[:, 1:] != PADDING).sum())


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean over the items of one micro-batch, 0-d."""
    logits = model(batch[:, :-1].clamp(min=0))
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=PADDING)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Iterable[Tensor]) -> Tensor | None:
    """Train until the loader ends; return the loss of the last window."""
    acc = ts.Accumulator(model, optimizer, micro_batches=MICRO_BATCHES, max_norm=max_norm)
    last = None
    for window in acc.windows(loader, num_items=num_items):
        for batch in window:
            window.backward(loss(model, batch))
        window.step()
        last = window.loss
    return last


train_step, max_norm = train, 0.5


def main(documents: int = 160) -> float:
    """Train; return the loss of the last window."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    replicated = DistributedDataParallel(model())
    stream = batches(dist.get_rank(), dist.get_world_size())
    loader = [next(stream) for _ in range(documents - 5 * dist.get_rank())]  # unequally many
    last = train(replicated, optimizer(replicated.named_parameters()), loader)
    assert last is not None
    if dist.get_rank() == 0:
        print(f"loss of the last window {last.item():.4f} nats a byte")
    return last.item()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
