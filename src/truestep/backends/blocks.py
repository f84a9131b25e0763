"""Which modules to shard apart, where nobody says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from torch import nn


def blocks(root: nn.Module) -> list[nn.Module]:
    """Return the elements of module lists whose params belong to them alone: FSDP refuses a param in two groups."""
    uses = _uses(root)
    found = dict.fromkeys(block for block in _elements(root) if any(True for _ in block.parameters()))
    return [block for block in found if all(uses[key] == count for key, count in _uses(block).items())]


def _elements(module: nn.Module) -> Iterator[nn.Module]:
    """Yield what stands in module lists, lists of lists too; not what is inside of an element."""
    for child in module.children():
        if isinstance(module, nn.ModuleList) and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield child
        else:
            yield from _elements(child)


def _uses(module: nn.Module) -> Mapping[int, int]:
    """Return ``id(param) -> places`` where it is registered in this module."""
    return Counter(id(param) for part in module.modules() for param in part._parameters.values() if param is not None)
