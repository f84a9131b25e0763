"""A byte-level GPT on the source text of Python's own standard library: real text that is always there.

Micro-batch i of rank r is a run of windows of the text that no other rank or micro-batch reads (until the text is used up), in an
order fixed by the seed; the text follows the installed Python.
"""

from __future__ import annotations

import itertools
import math
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from truestep.verification.recipe import NamedParams, Recipe
from truestep.words.errors import VerifyError

BYTES: Final = 256
# Large modules that every Python since 3.10 has, sorted.
TEXTS: Final = (
    "argparse.py",
    "ast.py",
    "calendar.py",
    "datetime.py",
    "difflib.py",
    "enum.py",
    "inspect.py",
    "ipaddress.py",
    "optparse.py",
    "pickle.py",
    "statistics.py",
    "subprocess.py",
    "tarfile.py",
    "threading.py",
    "typing.py",
)


class Block(nn.Module):
    """A pre-norm transformer block: causal self-attention, then an MLP. Takes and returns (batch, tokens, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        x = x + self.attention_out(self.attention(self.norm_attention(x)))
        mlp: Tensor = self.mlp_out(functional.gelu(self.mlp_in(self.norm_mlp(x))))
        return x + mlp

    def attention(self, x: Tensor) -> Tensor:
        """Mix tokens causally, in plain operators: one kernel a step, the same on every run."""
        batch, tokens, width = x.shape
        split = self.attention_in(x).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        scores = query @ key.transpose(-2, -1) / math.sqrt(width // self.heads)
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
        mixed: Tensor = scores.masked_fill(later, -math.inf).softmax(-1) @ value
        return mixed.transpose(1, 2).reshape(batch, tokens, width)


class ByteGPT(nn.Module):
    """A GPT over bytes; the head is tied to the token embedding."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.position = nn.Parameter(torch.empty(context, width))
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.head.weight = self.embedding.weight
        for weight in (self.embedding.weight, self.position):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 (batch, tokens) to logits (batch, tokens, 256)."""
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@dataclass(frozen=True)
class BytesGPT:
    """The recipe by its sizes; the default has 0.83 M params.

    Attributes:
        width: Of the residual stream.
        layers: Blocks.
        heads: Of attention; divides `width`.
        context: Tokens of a sequence.
        batch: Sequences of a micro-batch.
        seed: Of the weights and of the order of the text.
    """

    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 64
    batch: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.width, self.layers, self.heads, self.context, self.batch) < 1 or self.width % self.heads:
            raise VerifyError(f"expected sizes of at least 1 and heads that divide width, found {self}.")

    def model(self) -> nn.Module:
        """Return the model with its seeded weights; draws nothing from the caller's generator."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return ByteGPT(self.width, self.layers, self.heads, self.context)

    def optimizer(self, named_params: NamedParams) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW([param for _, param in named_params], lr=1e-3)

    def batches(self, dp_rank: int, dp_size: int) -> Iterator[Tensor]:
        """Yield this rank's micro-batches without end: int64 (batch, context + 1)."""
        windows = text().unfold(0, self.context + 1, self.context + 1)
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(self.seed))
        for index in itertools.count():
            at = torch.arange(self.batch) + (index * dp_size + dp_rank) * self.batch
            yield windows[order[at % len(order)]].long()

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the cross entropy in float32, the mean over target tokens."""
        logits = model(batch[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def num_items(self, batch: Tensor) -> int:
        """Return the number of target tokens."""
        return batch[:, 1:].numel()


SIZES: Final = tuple(field.name for field in fields(BytesGPT))


@cache
def text() -> Tensor:
    """Return the text: uint8, 1-D.

    Raises:
        VerifyError: If this Python has no source of its standard library.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    present = [path for name in TEXTS if (path := folder / name).is_file()]
    if not present:
        raise VerifyError(
            f"the bytes-gpt recipe reads the source of Python's standard library, and {folder} has none. Use another recipe."
        )
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in present)), dtype=torch.uint8)


def sized(**sizes: int) -> Recipe:
    """Return the recipe with some of the sizes of `BytesGPT` changed."""
    return made(BytesGPT(**sizes), "bytes-gpt")


def made(pieces: BytesGPT, name: str) -> Recipe:
    """Return the recipe of these sizes under a built-in name; its spec holds the sizes that are not the default."""
    default = {field.name: field.default for field in fields(pieces)}
    changed = ",".join(f"{key}={value}" for key, value in asdict(pieces).items() if value != default[key])
    return Recipe(
        pieces.model,
        pieces.optimizer,
        pieces.batches,
        pieces.loss,
        num_items=pieces.num_items,
        name=name,
        source=type(pieces).__module__,
        spec=f"{name}:{changed}" if changed else name,
    )
