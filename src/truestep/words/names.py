"""Names of params: the qualified name in the unwrapped model, whatever wraps it now."""

from __future__ import annotations

import re
from typing import Final

WRAPPERS: Final = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_ANYWHERE: Final = re.compile(rf"(?:(?<=\.)|^)(?:{'|'.join(WRAPPERS[1:])})\.")


def clean(name: str) -> str:
    """Return `name` without the parts that compiling, FSDP1 and checkpoint wrappers add at any depth.

    ``module.`` is not removed here: a model may have a child of that name. The backend that wraps with one starts from the inner
    module instead.

    >>> clean("_orig_mod.layers.0._checkpoint_wrapped_module.weight")
    'layers.0.weight'
    """
    return _ANYWHERE.sub("", name)


def group_slot(label: str) -> str:
    """Return the slot name of a param group: ``@group/LABEL``."""
    return f"@group/{label}"


OPTIMIZER_SLOT: Final = "@optimizer"


def labelled(label: str | None, name: str) -> str:
    """Return `name` under the label of its model or optimizer, where there are several.

    >>> labelled("generator", "0.weight"), labelled(None, "0.weight")
    ('generator.0.weight', '0.weight')
    """
    return name if label is None else f"{label}.{name}"
