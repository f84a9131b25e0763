"""Checks of what state can hold: dtypes, memory, and whether a moment in few bits still moves.

Note: when a slot stagnates
    A value that moves by less than half the spacing of its dtype a step is rounded back each time: a bfloat16 second moment at
    beta2 = 0.999 is to lose 0.1% a step, and the spacing is 0.4% to 0.8%. It is seen beside a twin in float64 (params, gradients
    and state): an element that kept its bits while the twin's moved by more than `SPACINGS` of its dtype has lost updates. A mean
    over n steps stops within n / 2 spacings of where it tends to, which for n = 10 (beta 0.9) nobody minds: 8 are 3% to 6%.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from truestep.optimizers.conformance.bench import PARAM, Bench, Slots, dtypes
from truestep.optimizers.conformance.compare import demand_same
from truestep.optimizers.conformance.given import gradients, start
from truestep.optimizers.conformance.problem import Failed, NotApplicable, Problem, first_line
from truestep.optimizers.conformance.subject import Case, Subject
from truestep.proof.bounds import unit_roundoff
from truestep.proof.update import judge
from truestep.state.view import SlotId

STEPS: Final = 4
LOUD_STEPS: Final = 256
QUIET_STEPS: Final = 96
QUIET: Final = 0.1  # size of the gradients after LOUD_STEPS
SPACINGS: Final = 8
_ELEMENTS: Final = 6


def dtype_stays(case: Case) -> str:
    """Steps change no dtype: not a param's, not its state's."""
    told = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        try:
            bench = case.subject.bench(dtype=dtype)
            before = dtypes(bench.state())
            before = {**dtypes(bench.run(0, 1).state()), **before}  # of each slot as it was made
        except Exception as error:
            if dtype == torch.float32:
                raise
            told.append(f"{_short(dtype)} refused: {first_line(error)}")
            continue
        after = dtypes(bench.run(1, STEPS).state())
        changed = [slot_id for slot_id, its in after.items() if before.get(slot_id, its) != its]
        changed += [(name, PARAM) for name in bench.params if after[name, PARAM] != dtype and (name, PARAM) not in changed]
        if changed:
            raise Failed(*(Problem(_short(before[one]), _short(after[one]), one[0], one[1], STEPS) for one in changed))
        told.append(_short(dtype))
    return ", ".join(told)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def state_apart(case: Case) -> str:
    """State shares memory with nothing: not with other state, a param or a gradient."""
    bench = case.subject.bench().run(0, STEPS)
    live: list[tuple[str, str, Any]] = [(name, PARAM, param) for name, param in bench.params.items()]
    live += [(name, "grad", param.grad) for name, param in bench.params.items()]
    live += [(name, str(key), value) for name, entry in bench.entries() for key, value in entry.items()]
    held = sorted((*_extent(leaf), name, key) for name, key, value in live for leaf in tree_leaves(value) if _has_memory(leaf))
    problems, reached, owner = [], 0, ""
    for first, last, name, key in held:
        if first < reached:
            problems.append(Problem("memory of its own", f"a part of that of {owner}", name, key, fix="Keep a clone."))
        if last > reached:
            reached, owner = last, f"{name}/{key}"
    if problems:
        raise Failed(*problems)
    return f"{len(held)} tensors"


def _has_memory(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided and leaf.numel() > 0


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor's memory, and the one after its last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def state_size(case: Case) -> str:
    """State stops growing; how many bytes it takes."""
    bench = case.subject.bench().run(0, STEPS)
    sizes = [_bytes(bench)]
    for step in range(STEPS, 4 * STEPS, STEPS):
        sizes.append(_bytes(bench.run(step, step + STEPS)))
    elements = sum(param.numel() for param in bench.params.values())
    told = f"{sizes[-1] / elements:.3g} bytes of state an element of fp32 params"
    if all(later > earlier for earlier, later in zip(sizes, sizes[1:], strict=False)):
        raise Failed(
            Problem(
                "state that stops growing",
                f"{sizes[0]} bytes after {STEPS} steps, {sizes[-1]} after {4 * STEPS}",
                fix="Plan memory for its limit, or bound it.",
            )
        )
    return told


def _bytes(bench: Bench) -> int:
    leaves = [leaf for _, entry in bench.entries() for leaf in tree_leaves(dict(entry)) if isinstance(leaf, Tensor)]
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if leaf.layout == torch.strided)


# -- Sparse and complex


def sparse(case: Case) -> str:
    """A sparse gradient gives what the dense one gives, or is refused by name."""
    subject = case.subject
    name = subject.one(2)
    if subject.sparse:
        return "it takes sparse gradients only"
    shape = subject.shapes[name]
    value = start({name: shape})
    bench = subject.bench(value)
    try:
        for step in range(subject.short(STEPS)):
            bench.step({name: gradients(value, step)[name].to_sparse(1)})
    except Exception as error:
        _refused(error, ("sparse", "layout"))

    def dense() -> Slots:
        return {
            slot_id: v for slot_id, v in subject.bench(value).run(0, subject.short(STEPS)).state().items() if slot_id[1] == PARAM
        }

    mine = {slot_id: v for slot_id, v in bench.state().items() if slot_id[1] == PARAM}
    return demand_same(
        mine, dense(), "the update by the same gradient, dense", again=dense, fix="Refuse gradients that are sparse."
    )


def complex_params(case: Case) -> str:
    """A complex param moves as its real and imaginary parts do, or turns as its gradient does, or is refused by name."""
    subject = case.subject
    if subject.sparse:
        raise NotApplicable("it takes sparse gradients only")
    name = next((name for name, shape in subject.shapes.items() if len(shape) == 1), subject.one())
    shape = subject.shapes[name] or (1,)
    parts = start({name: (*shape[:-1], 2 * shape[-1])})  # of as many dims: some classes go by that

    def as_complex(tensor: Tensor) -> Tensor:
        return torch.view_as_complex(tensor.view(*shape, 2))

    def stepped(turn: complex = 1) -> Tensor:
        bench = subject.bench({name: turn * as_complex(parts[name])})
        for step in range(subject.short(STEPS)):
            bench.step({name: turn * as_complex(gradients(parts, step)[name])})
        return torch.view_as_real(bench.params[name].detach().resolve_conj() / turn).reshape(parts[name].shape).clone()

    try:
        after = stepped()
    except Exception as error:
        _refused(error, ("complex", "real"))

    def real() -> Slots:
        return {(name, PARAM): subject.bench(parts).run(0, subject.short(STEPS)).values()[name]}

    mine, slot = {(name, PARAM): after}, (name, PARAM)
    try:
        fix = "Refuse complex params, or view them as real."
        return demand_same(mine, real(), "the update of real and imaginary parts", again=real, fix=fix)
    except Failed:
        # A rule of complex numbers, such as z / |z|, is another, and right: it has no direction of its own in their plane.
        turned = stepped(1j)  # by which they multiply exactly
        if not bool(after.isfinite().all()) or any(one.verdict == "differs" for one in judge({slot: turned}, mine)):
            raise
        return "its update turns as its gradient does"


def _refused(error: Exception, words: tuple[str, ...]) -> None:
    """Raise that it refuses, if its message says what; else the error itself."""
    if any(word in str(error).lower() for word in words):
        raise NotApplicable(f"it refuses them: {first_line(error)}") from error
    raise error


# -- State in few bits


def tracks(case: Case) -> str:
    """State in few bits, beside float32 params, moves as its float64 twin does."""
    return _tracked(case, torch.float32)


def tracks_16(case: Case) -> str:
    """The same of pure bfloat16 training: params and their state."""
    return _tracked(case, torch.bfloat16)


def _tracked(case: Case, dtype: torch.dtype) -> str:
    subject = case.subject
    ndim = min(len(shape) for shape in subject.shapes.values() if shape) if any(subject.shapes.values()) else 0
    shape = (_ELEMENTS,) if ndim == 1 else (2, _ELEMENTS // 2, *(1,) * (ndim - 2)) if ndim else ()
    low, high = (start({"weight": shape}, dtype=torch.float64)["weight"].to(dtype) for _ in range(2))
    try:
        mine, twin = subject.bench({"weight": low}).run(0, 1), subject.bench({"weight": high.double()}).run(0, 1)
    except Exception as error:
        raise NotApplicable(f"it refuses {_short(dtype)} or float64: {first_line(error)}") from error
    few = [slot_id for slot_id, its in dtypes(mine.state()).items() if its.is_floating_point and unit_roundoff(its) > 2.0**-20]
    if not few:
        raise NotApplicable(f"nothing is kept in fewer bits than float32 with {_short(dtype)} params")
    _widen(twin)
    paths = _paths(subject, mine, twin, few)
    if not paths:
        raise NotApplicable("its state is cast anew in each step: no float64 twin can be made of it")
    problems = [problem for slot_id, path in paths.items() if (problem := _stuck(slot_id, *path))]
    if problems:
        raise Failed(*problems)
    steps = 1 + min(len(low) for low, _ in paths.values())
    return f"{len(paths)} slots move as in float64 over {steps} steps"


def _widen(twin: Bench) -> None:
    """Give the twin's state the dtype of its params: what is written in place then stays in it."""
    for _, entry in twin.entries():
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                entry[key] = value.double()


def _paths(subject: Subject, mine: Bench, twin: Bench, few: list[SlotId]) -> dict[SlotId, tuple[Tensor, Tensor]]:
    """Return what each slot in few bits was after each step, and what the twin's was."""
    seen: dict[SlotId, tuple[list[Tensor], list[Tensor]]] = {slot_id: ([], []) for slot_id in few}
    loud, quiet = (subject.short(steps) for steps in (LOUD_STEPS, QUIET_STEPS))
    for step in range(1, loud + quiet):
        size = 1.0 if step < loud else QUIET
        handed = gradients(mine.params, 0, size=size)  # always the same, so that moments settle
        mine.step(handed)
        twin.step({name: gradient.double() for name, gradient in handed.items()})
        ours, theirs = (_live(bench) for bench in (mine, twin))
        for slot_id, (low, high) in seen.items():
            if slot_id in ours and theirs.get(slot_id, ours[slot_id]).dtype == torch.float64:
                low.append(ours[slot_id].detach().clone())
                high.append(theirs[slot_id].detach().clone())
    return {slot_id: (torch.stack(low), torch.stack(high)) for slot_id, (low, high) in seen.items() if low}


def _live(bench: Bench) -> dict[SlotId, Tensor]:
    """Return the tensors of the params and of their own state, by slot: live ones, nested ones left out."""
    live = {(name, PARAM): param.detach() for name, param in bench.params.items()}
    for name, entry in bench.entries():
        live.update({(name, str(key)): value for key, value in entry.items() if isinstance(value, Tensor)})
    return live


def _stuck(slot_id: SlotId, low: Tensor, high: Tensor) -> Problem | None:
    """Return the problem of a slot of which some element kept its bits while the twin's moved on."""
    held = low.double()
    since, spacings = high[0], torch.zeros_like(high[0])
    for step in range(1, len(held)):
        since = torch.where(held[step] == held[step - 1], since, high[step])
        spacing = torch.finfo(low.dtype).eps * torch.maximum(held[step].abs(), high[step].abs())
        spacings = torch.maximum(spacings, ((high[step] - since).abs() / spacing).nan_to_num())
    where = int(spacings.reshape(-1).argmax())
    if float(spacings.reshape(-1)[where]) <= SPACINGS:
        return None
    mine, theirs = (float(path[-1].reshape(-1)[where]) for path in (held, high))
    times = f"{mine / theirs:.3g} times that" if theirs else "not zero"
    return Problem(
        f"{theirs:.4g} after {len(low) + 1} steps, as in float64",
        f"{mine:.4g} in {_short(low.dtype)}, {times}: updates below half its spacing are rounded away",
        *slot_id,
        step=len(low) + 1,
        fix="Keep it in float32, or round stochastically.",
    )
