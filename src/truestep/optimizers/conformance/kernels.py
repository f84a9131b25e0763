"""Checks of kernels: foreach, fused and plain ones are one rule, in each dtype."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch

from truestep.optimizers.conformance.bench import Bench, Slots
from truestep.optimizers.conformance.compare import demand_same
from truestep.optimizers.conformance.given import start
from truestep.optimizers.conformance.problem import NotApplicable, first_line
from truestep.optimizers.conformance.reference import SMALL, Textbook, demand_agreement, walked
from truestep.optimizers.conformance.subject import Case, Subject
from truestep.optimizers.probe.build import arguments

STEPS: Final = 3
KERNELS: Final[tuple[str, ...]] = ("foreach", "fused")
_REFUSING: Final = (*KERNELS, "support", "implement", "require", "dtype", "half", "bfloat16", "float16")
# Sizes of full vector blocks with a rest: bodies and tails round differently, and one of torch's kernels forgets the bodies.
_SIZES: Final = {0: (), 1: (1003,), 2: (37, 29), 4: (5, 7, 6, 5)}


def agree(dtype: torch.dtype, case: Case) -> str:
    """Run each kernel that it has, in one dtype, against the textbook, or against the plain kernel."""
    subject, reference = case.subject, case.reference
    accepted = arguments(subject.target) or {}
    flags = [flag for flag in KERNELS if flag in accepted]
    if not flags:
        raise NotApplicable("it has one kernel")
    plain: dict[str, bool] = dict.fromkeys(flags, False)
    variants: dict[str, dict[str, bool]] = {"plain": plain, **{flag: {**plain, flag: True} for flag in flags}}
    told, refused = {}, {}
    for name, flags_by_name in variants.items():
        try:
            _bench(subject, dtype, flags_by_name).run(0, 1)
        except Exception as error:  # whatever a class says to a kernel
            refused[name] = refusal(error)
            continue
        told[name] = _judged(case, dtype, name, flags_by_name, plain)
    if "plain" in refused:
        raise NotApplicable(f"it refuses {dtype}: {refused['plain']}")
    if not set(told) - {"plain"}:
        raise NotApplicable(f"its other kernels refuse {dtype} here: {refused.popitem()[1]}")
    against = reference.name if isinstance(reference, Textbook) else "the plain kernel"
    return f"{', '.join(told)} against {against}" + (f"; {', '.join(refused)} refused" if refused else "")


def refusal(error: Exception) -> str:
    """Return what an error says if it refuses a kernel or dtype by name, as torch's do; raise it if it is another."""
    told = first_line(error)
    if any(word in told.lower() for word in _REFUSING):
        return told
    raise error


def _judged(case: Case, dtype: torch.dtype, name: str, flags: dict[str, bool], plain: dict[str, bool]) -> str:
    subject, reference = case.subject, case.reference
    if isinstance(reference, Textbook):
        walk = walked(subject, _bench(subject, dtype, flags), STEPS)
        return demand_agreement(reference, walk, f"the update, by the {name} kernel in {dtype},", f"Set {name}=False.")
    if name == "plain":
        return ""

    def plainly() -> Slots:
        return _bench(subject, dtype, plain).run(0, STEPS).state()

    mine = _bench(subject, dtype, flags).run(0, STEPS).state()
    return demand_same(
        mine, plainly(), f"the plain kernel's, by the {name} kernel in {dtype}", again=plainly, fix=f"Set {name}=False."
    )


def _bench(subject: Subject, dtype: torch.dtype, flags: Mapping[str, Any]) -> Bench:
    shapes = {f"kernels.{ndim}d": _SIZES[ndim] for ndim in {len(shape) for shape in subject.shapes.values()} if ndim in _SIZES}
    if not shapes:
        raise NotApplicable("it takes no params of 0, 1, 2 or 4 dims")
    return subject.bench(start(shapes, dtype=dtype, size=SMALL), **flags)


in_float32 = partial(agree, torch.float32)
in_float64 = partial(agree, torch.float64)
in_bfloat16 = partial(agree, torch.bfloat16)
in_float16 = partial(agree, torch.float16)
