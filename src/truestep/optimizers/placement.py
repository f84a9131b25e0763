"""Who may run where, from what a probe measured and from what a backend hands to the optimizer. No list of names.

What is said here is the prior; the first checked step is the verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from truestep.optimizers.probe import Probe
from truestep.words.scope import Scope

Handed: TypeAlias = Literal["whole", "dtensor", "flat", "fused"]
Outcome: TypeAlias = Literal["exact", "exact or raises", "ends elsewhere", "random", "not run"]

HANDED: Final[Mapping[str, Handed]] = {
    "single": "whole",
    "ddp": "whole",
    "zero0": "whole",
    "fsdp2": "dtensor",
    "fsdp1": "flat",
    "zero1": "fused",
    "zero2": "fused",
    "zero3": "fused",
    "accelerate-ddp": "whole",
    "accelerate-fsdp2": "dtensor",
    "accelerate-zero2": "fused",
}
# An engine hands a zero gradient where there is none: no fault while every param gets one in every window.
GIVES_ZEROS: Final = frozenset(backend for backend in HANDED if "zero" in backend or backend == "fsdp1")
GIVEN: Final = frozenset({"2d"})  # of what a class may need: a plain loop over matrices gives this much


@dataclass(frozen=True)
class Prediction:
    """What is to be expected of an optimizer on a backend.

    Attributes:
        outcome: ``exact``; ``exact or raises`` (it runs exactly, or says that it cannot); ``ends elsewhere`` (it runs, and ends
            where one process does not); ``random``; ``not run``.
        why: In words.
    """

    outcome: Outcome
    why: str


def predicted(probe: Probe, backend: str) -> Prediction:
    """Return what a probe lets expect of its optimizer on a backend: in a plain loop, over params that all get gradients."""
    handed = HANDED[backend]
    if not probe.checked:
        return Prediction("not run", f"the probe could not measure it: {probe.why}")
    if missing := sorted(set(probe.needs) - GIVEN):
        return Prediction("not run", f"it needs {', '.join(missing)}, which a plain loop does not give")
    if probe.draws:
        return Prediction("random", "it draws random numbers: replicas agree only where their generators do")
    if handed == "whole":
        return Prediction("exact", "the optimizer gets whole plain tensors")
    if handed == "dtensor":
        return Prediction("exact or raises", "DTensor keeps the meaning of every torch operation, or raises")
    if probe.scope != Scope.ELEMENT.value:
        return Prediction("ends elsewhere", f"its scope is {probe.scope}, and it gets pieces as plain 1-D tensors")
    if probe.shape_sensitive:
        return Prediction("ends elsewhere", "a reshape changes its updates, and it gets pieces as plain 1-D tensors")
    return Prediction("exact", "its scope is element: a piece is stepped as it is in the whole")


def caveat(probe: Probe, backend: str) -> str:
    """Return what the prediction leaves out, or nothing."""
    if backend in GIVES_ZEROS and probe.none_sensitive:
        return "not where a param gets no gradient: it is handed a zero one, and an absent gradient is not a zero one here"
    return ""
