"""Built-in recipes: what `truestep verify NAME` runs. Each module has `SIZES` and `sized(**sizes)`, its recipe."""

from __future__ import annotations

from typing import Final

# Name -> module of this package. A module is imported when its recipe is asked for: they need torch.
BUILT_IN: Final = {
    "bytes-gpt": "bytes_gpt",
    "bf16-gpt": "bf16_gpt",
    "embedding-net": "embedding_net",
    "accumulation-by-hand": "accumulation_by_hand",
    "three-linears": "three_linears",
}
