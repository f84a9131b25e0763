"""Checks of a run that goes on elsewhere: saved and loaded, copied, moved."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from truestep.optimizers.conformance.bench import Bench, Slots, dtypes
from truestep.optimizers.conformance.compare import demand_same
from truestep.optimizers.conformance.problem import Failed, NotApplicable, Problem, first_line
from truestep.optimizers.conformance.subject import Case, Subject

BEFORE: Final = 5  # steps before the run goes on elsewhere
AFTER: Final = 9  # steps in all
_FIX: Final = "Keep all state in optimizer.state and param_groups, and load each entry as it was saved."


def loaded(case: Case) -> str:
    """Saving, loading and continuing is bitwise the same run."""
    return _continued(case, copy.deepcopy, "the run that was not interrupted")


def loaded_over(case: Case) -> str:
    """Loading replaces the state that was there."""
    subject = case.subject
    saved = subject.bench().run(0, case.subject.short(BEFORE))
    used = subject.bench().run(AFTER, AFTER + 1)
    _resume(subject, used, saved, copy.deepcopy)
    return demand_same(
        used.slots(), subject.bench().run(0, case.subject.short(AFTER)).slots(), "nothing of the state before the load", fix=_FIX
    )


def pickled(case: Case) -> str:
    """The same through pickle."""
    return _continued(case, _through_pickle, "the run that was not pickled")


def _through_pickle(states: Any) -> Any:
    try:
        return pickle.loads(pickle.dumps(states))
    except Exception as error:  # AttributeError, TypeError, PicklingError: by what is in the way
        found = f"{type(error).__name__}: {first_line(error)}"
        raise Failed(Problem("state that can be pickled", found, fix="Keep no functions in the state.")) from error


def through_cpu(case: Case) -> str:
    """The same with the saved state moved to the CPU, from where params are."""
    device = _device()
    told = _continued(case, partial(_moved, device=torch.device("cpu")), "the run whose state was not moved", device)
    return f"{told}, params on {device.type}"


def weights_only(case: Case) -> str:
    """What is saved can be read by `torch.load` as it is by default."""
    buffer = io.BytesIO()
    torch.save(case.subject.bench().run(0, case.subject.short(BEFORE)).state_dicts(), buffer)
    buffer.seek(0)
    try:
        torch.load(buffer)
    except pickle.UnpicklingError as error:
        said = next((line for line in str(error).splitlines() if "Unsupported" in line or "GLOBAL" in line), first_line(error))
        raise Failed(
            Problem(
                "state of tensors, numbers and containers", f"torch.load: {said.strip()}", fix="Keep no objects in the state."
            )
        ) from error
    return "torch.load reads it"


def copied(case: Case) -> str:
    """A deep copy of params and optimizer goes on as the original does."""
    subject = case.subject
    original = subject.bench().run(0, case.subject.short(BEFORE))
    optimizers, params = copy.deepcopy((original.optimizers, original.params))
    twin = copy.copy(original)
    twin.optimizers, twin.params = optimizers, params
    twin.run(*_rest(case.subject))
    original.run(*_rest(case.subject))
    return demand_same(
        twin.slots(), original.slots(), "what the original has", fix="Keep state where Optimizer.__getstate__ finds it."
    )


def keeps_dtype(case: Case) -> str:
    """Loading keeps each state's dtype."""
    return _kept(case, torch.float32)


def keeps_dtype_16(case: Case) -> str:
    """The same for bfloat16 params: what is kept finer than they are stays so."""
    return _kept(case, torch.bfloat16)


def _kept(case: Case, dtype: torch.dtype) -> str:
    try:
        saved = case.subject.bench(dtype=dtype).run(0, case.subject.short(BEFORE))
    except Exception as error:
        if dtype == torch.float32:
            raise
        raise NotApplicable(f"it refuses {dtype}: {first_line(error)}") from error
    other = case.subject.bench(dtype=dtype).load(copy.deepcopy(saved.state_dicts()))
    before, after = (dtypes(bench.slots()) for bench in (saved, other))
    if cast := [slot_id for slot_id, its in before.items() if after.get(slot_id, its) != its]:
        raise Failed(
            *(
                Problem(
                    f"{before[one]}, as it was saved", str(after[one]), one[0], one[1], fix="Cast nothing in load_state_dict."
                )
                for one in cast
            )
        )
    return f"{len(before)} tensors"


def moved_state(case: Case) -> str:
    """Moving state away and back between steps changes nothing."""
    device = _device()
    bench = _onto(case, device)
    for step in range(case.subject.short(AFTER)):
        bench.run(step, step + 1)
        for _, entry in bench.entries():
            for key, value in entry.items():
                entry[key] = tree_map(_away_and_back, value)
    still = _onto(case, device).run(0, case.subject.short(AFTER))
    return demand_same(
        bench.slots(), still.slots(), "the run whose state stayed where it was", fix="Read state from optimizer.state."
    )


def _away_and_back(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    away = value.detach().to("cpu", copy=True)
    away = away.to(torch.float64) if away.dtype.is_floating_point else away
    return away.to(value.device, value.dtype, copy=True)


def _continued(case: Case, carry: Callable[[Any], Any], what: str, device: torch.device | None = None) -> str:
    saved, other = _onto(case, device).run(0, case.subject.short(BEFORE)), _onto(case, device)
    _resume(case.subject, other, saved, carry)
    whole: Slots = _onto(case, device).run(0, case.subject.short(AFTER)).slots()
    return demand_same(other.slots(), whole, what, fix=_FIX)


def _rest(subject: Subject) -> tuple[int, int]:
    return subject.short(BEFORE), subject.short(AFTER)


def _resume(subject: Subject, bench: Bench, saved: Bench, carry: Callable[[Any], Any]) -> None:
    bench.put(saved.values()).load(carry(saved.state_dicts())).run(*_rest(subject))


def _onto(case: Case, device: torch.device | None) -> Bench:
    """Return a new bench with its params on a device."""
    if device is None or device.type == "cpu":
        return case.subject.bench()
    return case.subject.bench({name: param.detach().to(device) for name, param in case.subject.usual.params.items()})


def _device() -> torch.device:
    """Return where state is moved from: an accelerator, where there is one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else found


def _moved(states: Any, device: torch.device) -> Any:
    return tree_map(lambda value: value.to(device, copy=True) if isinstance(value, Tensor) else value, copy.deepcopy(states))
