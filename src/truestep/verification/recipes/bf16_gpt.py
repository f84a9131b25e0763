"""The byte-level GPT with params in bf16: the dtype in which sums lose the most."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from truestep.verification.recipe import Recipe
from truestep.verification.recipes.bytes_gpt import SIZES, BytesGPT, made

__all__ = ["SIZES", "Bf16GPT", "sized"]


@dataclass(frozen=True)
class Bf16GPT(BytesGPT):
    """`BytesGPT` in bf16; the loss stays in float32."""

    def model(self) -> nn.Module:
        """Return the model of the same seed, rounded to bf16."""
        return super().model().to(torch.bfloat16)


def sized(**sizes: int) -> Recipe:
    """Return the recipe with some of the sizes of `BytesGPT` changed."""
    return made(Bf16GPT(**sizes), "bf16-gpt")
