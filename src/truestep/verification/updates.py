"""The phase `update`: given the candidate's old state and reduced gradient, the reference optimizer must end where it did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from truestep.backends import slots
from truestep.backends.base import Identity
from truestep.optimizers.replica import replica
from truestep.proof.update import ZERO_GRADIENT, Judgement, judge, sensitivity
from truestep.state.containers import by_path, nested
from truestep.state.digest import bitwise_equal
from truestep.state.view import Slot, SlotId, slots_of
from truestep.verification import rules
from truestep.verification.sheet import Sheet
from truestep.verification.whole import Wholes
from truestep.words.finding import SHOWN_AT_MOST, Finding
from truestep.words.names import OPTIMIZER_SLOT, group_slot, labelled

# Group entries that schedules set: never state, even where an engine's own schedule moves them inside its step.
SCHEDULED = frozenset({"lr", "initial_lr", "momentum", "betas"})


Groups = Mapping[SlotId, Any]  # entries of param groups by slot, containers as key paths


@dataclass(frozen=True, eq=False)
class Update:
    """One update to judge: everything whole.

    Attributes:
        start: Slots before the step.
        after: Slots after it.
        gradients: ``name -> gradient`` as it entered; None for a param for which no backward of the window made one.
        groups: What the param groups held as the step came.
    """

    start: Wholes
    after: Wholes
    gradients: Mapping[str, Tensor | None]
    groups: Groups


class UpdateJudge:
    """Steps replicas of the reference optimizers from the candidate's state.

    Args:
        params: The reference model's trainable params by name.
        optimizers: ``(label, optimizer)``: the reference optimizers; they themselves never step here, their schedules do.
    """

    def __init__(self, params: Mapping[str, Tensor], optimizers: Sequence[tuple[str | None, torch.optim.Optimizer]]) -> None:
        self._name_by_id = {id(param): name for name, param in params.items()}
        self._optimizers = list(optimizers)

    def membership(self, sheet: Sheet, identity: Identity) -> None:
        """Compare which group of which optimizer holds each param, where both have as many groups."""
        mine = {
            self._name_by_id[id(param)]: (index, place)
            for index, (_, optimizer) in enumerate(self._optimizers)
            for place, group in enumerate(optimizer.param_groups)
            for param in group["params"]
        }
        theirs = {identity.live[held]: where for where, ids in identity.held for held in ids if held in identity.live}
        if {where for where, _ in identity.held} >= set(mine.values()):
            for name in [name for name in mine if theirs.get(name, mine[name]) != mine[name]][:SHOWN_AT_MOST]:
                sheet.add(_other_group(name, mine[name][1], theirs[name][1]), "update")

    def hyper_parameters(self, sheet: Sheet, update: Update, found: Groups, *, held_by_user: bool) -> None:
        """Compare param groups with those that the reference's own schedule drives.

        Args:
            sheet: What is found.
            update: The step: what it changed in a group is state.
            found: The param groups to look at.
            held_by_user: Whether the optimizer that steps is the one that the user holds.
        """
        for label, optimizer in self._optimizers:
            for name, group in zip(slots.group_names(optimizer), optimizer.param_groups, strict=True):
                owner = group_slot(labelled(label, name))
                theirs = _entries(found, owner, group)
                for key in [key for key in optimizer.defaults if key in theirs and not _stateful(update, owner, str(key))]:
                    if not _same(group.get(key), theirs[key]):
                        sheet.add(_hyper_parameter(owner, str(key), group.get(key), theirs[key], held_by_user), "update")

    def judge(self, sheet: Sheet, update: Update) -> None:
        """Judge every param, every slot, in the model's order; a param's state before the param itself."""
        if unread := [slot_id for slot_id in update.start.opaque if not slot_id[0].startswith("@group")]:
            sheet.not_checked(
                "update", f"state in objects that cannot be read: {'/'.join(unread[0])}", param=unread[0][0], key=unread[0][1]
            )
            return
        expected = self._stepped(update)
        found, old = self._found(update.after, expected), self._found(update.start, expected)
        absent = {name for name, gradient in update.gradients.items() if gradient is None}
        verdicts = {judged.slot: judged for judged in judge(found, expected, old=old, without_gradient=absent)}
        rough = {slot_id for slot_id, judged in verdicts.items() if judged.verdict == "differs"}
        if rough:
            verdicts.update(self._by_sensitivity(update, found, old, absent, rough))
            verdicts.update(self._by_rule(update, found, rough))
        self._report(sheet, update, expected, found, [verdicts[slot_id] for slot_id in self._ordered(verdicts)])

    # -- the reference's step

    def _stepped(self, update: Update, *, absent_as_zero: bool = False, plain_kernels: bool = False) -> dict[SlotId, Any]:
        """Step replicas from the old state; return all their slots."""
        result: dict[SlotId, Any] = {}
        for label, optimizer in self._optimizers:
            plain = {
                param: torch.nn.Parameter(self._old(update, self._name_by_id[id(param)]).clone())
                for group in optimizer.param_groups
                for param in group["params"]
            }
            names = {id(new): self._name_by_id[id(old)] for old, new in plain.items()}
            state = {param: update.start.of_param(self._name_by_id[id(param)]) for param in plain}
            stepping = replica(optimizer, plain, state_by_param={param: entry for param, entry in state.items() if entry})
            self._set_groups(stepping, update, label, plain_kernels)
            for new in plain.values():
                gradient = update.gradients.get(names[id(new)])
                if gradient is None and absent_as_zero:
                    gradient = torch.zeros_like(new)
                new.grad = None if gradient is None else gradient.to(new.dtype).clone()
            stepping.step()
            kept = [slot for slot in slots.optimizer_slots(stepping, label) if self._is_moved(update, (slot.name, slot.key))]
            for slot in _slots(stepping, label, names, kept):
                result[slot[0]] = slot[1]
        return result

    @staticmethod
    def _is_moved(update: Update, slot_id: SlotId) -> bool:
        """Tell whether what the optimizer object keeps is state: the candidate's step changed it."""
        return not _same(update.start.values.get(slot_id), update.after.values.get(slot_id))

    def _old(self, update: Update, name: str) -> Tensor:
        master = update.start.values.get((name, "master"))
        tensor = update.start.values[name, "param"] if master is None else master
        return torch.as_tensor(tensor)

    def _set_groups(self, stepping: torch.optim.Optimizer, update: Update, label: str | None, plain_kernels: bool) -> None:
        for name, group in zip(slots.group_names(stepping), stepping.param_groups, strict=True):
            group.update(_entries(update.groups, group_slot(labelled(label, name)), group))
            if plain_kernels:
                group.update({flag: False for flag in ("foreach", "fused") if flag in group})
        for key, value in update.start.kept_by(_own(label)).items():
            if hasattr(stepping, key):
                setattr(stepping, key, value)
            else:
                stepping.state[key.removeprefix("state/")] = value  # type: ignore[index]  # as some classes do

    # -- judging

    def _found(self, all_slots: Wholes, expected: Mapping[SlotId, Any]) -> dict[SlotId, Any]:
        """Return the slots that the reference has or should have; a param is its master where there is one."""
        names = set(self._name_by_id.values())
        found = {
            slot_id: value
            for slot_id, value in all_slots.values.items()
            if slot_id in expected or (slot_id[0] in names and slot_id[1] != "master")
        }
        for name in names:
            if (name, "master") in all_slots.values:
                found[name, "param"] = all_slots.values[name, "master"]
        return found

    def _ordered(self, slot_ids: Iterable[SlotId]) -> list[SlotId]:
        """Return slots in the model's order, what a param keeps before the param: a wrong moment is the cause, not the effect."""
        order = {name: place for place, name in enumerate(self._name_by_id.values())}
        return sorted(slot_ids, key=lambda slot_id: (order.get(slot_id[0], len(order)), slot_id[1] == "param"))

    def _by_sensitivity(
        self, update: Update, found: Mapping[SlotId, Any], old: Mapping[SlotId, Any], absent: set[str], rough: set[SlotId]
    ) -> dict[SlotId, Judgement]:
        """Judge again what is not bitwise: by what random ulps in the step's own operations, with plain kernels, make of it."""
        plain = self._stepped(update, plain_kernels=True)
        moves = sensitivity(lambda: self._stepped(update, plain_kernels=True), unmoved=plain)
        judged = judge(found, plain, old=old, moves=moves, without_gradient=absent)
        return {judgement.slot: judgement for judgement in judged if judgement.slot in rough}

    def _by_rule(self, update: Update, found: Mapping[SlotId, Any], rough: set[SlotId]) -> dict[SlotId, Judgement]:
        """Judge again, by the operand bound, what is not bitwise of params whose optimizer has an element-wise rule."""
        judged: list[Judgement] = []
        for label, optimizer in self._optimizers:
            if not rules.has_rule(optimizer):
                continue
            for group_name, group in zip(slots.group_names(optimizer), optimizer.param_groups, strict=True):
                used = {**group, **_entries(update.groups, group_slot(labelled(label, group_name)), group)}
                for name in (self._name_by_id[id(param)] for param in group["params"]):
                    gradient = update.gradients.get(name)
                    if gradient is not None and any(owner == name for owner, _ in rough):
                        old = {**update.start.of_param(name), "param": self._old(update, name)}
                        judged += rules.by_rule(optimizer, used, name, old, gradient, found, rough)
        return {judgement.slot: judgement for judgement in judged}

    def _report(
        self,
        sheet: Sheet,
        update: Update,
        expected: Mapping[SlotId, Any],
        found: Mapping[SlotId, Any],
        judged: Sequence[Judgement],
    ) -> None:
        sheet.bitwise("update", sum(judgement.verdict == "bitwise" for judgement in judged))
        for judgement in judged:
            if judgement.verdict == "within":
                sheet.bounded("update", judgement.ratio)
        harmless = [judgement.slot for judgement in judged if judgement.verdict == "harmless"]
        if harmless:
            sheet.add(_harmless(harmless), "update")
        wrong = [judgement for judgement in judged if judgement.verdict == "differs"]
        as_zero = self._stepped(update, absent_as_zero=True) if any(judgement.why == ZERO_GRADIENT for judgement in wrong) else {}
        # Of a param that moved for a gradient it never had, the param is the fault; counters and zeros beside it are not.
        moved = {j.slot[0] for j in wrong if j.why == ZERO_GRADIENT and j.slot[1] == "param"}
        for judgement in wrong:
            name, key = judgement.slot
            zero = judgement.why == ZERO_GRADIENT and _same(as_zero.get(judgement.slot), found.get(judgement.slot))
            if not (zero and name in moved and key != "param"):
                sheet.add(
                    _wrong(judgement, expected.get(judgement.slot, _ABSENT), found.get(judgement.slot, _ABSENT), zero), "update"
                )


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


def _entries(groups: Groups, owner: str, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of one group, as copies; a sequence that is a tuple in the group `like` is one."""
    flat = {key: value for (name, key), value in groups.items() if name == owner}
    entries = nested(flat, by_path(flat))
    return {
        key: tuple(value) if isinstance(value, list) and isinstance(like.get(key), tuple) else value
        for key, value in entries.items()
    }


def _stateful(update: Update, owner: str, key: str) -> bool:
    """Return whether a group entry is state: the step changed it."""
    if key in SCHEDULED:
        return False
    after = {slot_id: value for slot_id, value in update.after.values.items() if slot_id[0] == owner}
    changed = [slot_id for slot_id in {**update.groups, **after} if not _same(update.groups.get(slot_id), after.get(slot_id))]
    return any(name == owner and (path == key or path.startswith(f"{key}/")) for name, path in changed)


def _own(label: str | None) -> str:
    return OPTIMIZER_SLOT if label is None else f"{OPTIMIZER_SLOT}/{label}"


def _slots(
    stepped: torch.optim.Optimizer, label: str | None, names: Mapping[int, str], kept: Sequence[Slot]
) -> list[tuple[SlotId, Any]]:
    params = [param for group in stepped.param_groups for param in group["params"]]
    found = [
        slot
        for param in params
        for key, value in stepped.state.get(param, {}).items()
        for slot in slots_of(names[id(param)], str(key), value, slots.replica)
    ]
    for param in params:
        found += slots_of(names[id(param)], "param", param, slots.replica)
    found += [*slots.group_slots(stepped, label), *kept]
    defaults = {str(key) for key in stepped.defaults} | {"initial_lr"}
    return [
        (slot_id, slot.local[0] if slot.kind == "tensor" else slot.value)
        for slot in found
        if (slot_id := (slot.name, slot.key))
        and slot.kind != "opaque"
        and not (slot.name.startswith("@") and slot.key in defaults)
    ]


def _same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
        return bitwise_equal(mine.detach().cpu(), theirs.detach().cpu())
    if isinstance(mine, Tensor) or isinstance(theirs, Tensor):
        return False
    return type(mine) is type(theirs) and (mine == theirs or repr(mine) == repr(theirs))


def _double(value: Any) -> Tensor:
    tensor = torch.as_tensor(value).detach()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _told(value: Any, other: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    if not isinstance(other, Tensor) or other.shape != value.shape or not value.numel():
        return f"{value.dtype} of shape {tuple(value.shape)}"
    away = (_double(value) - _double(other)).abs().nan_to_num(nan=float("inf"))
    flat = int(away.reshape(-1).argmax())
    return (
        f"{value.reshape(-1)[flat].item():.8g} at {tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), value.shape))}"
    )


def _wrong(judgement: Judgement, expected: Any, found: Any, zero: bool) -> Finding:
    name, key = judgement.slot
    return Finding(
        "update/absent-as-zero" if zero else "update/differs",
        "update",
        "error",
        param=None if name.startswith("@") else name,
        key=key if not name.startswith("@") else f"{name}/{key}",
        expected=_told(expected, found) + (", left alone" if zero and key == "param" else ""),
        found=_told(found, expected) + (f" ({judgement.why})" if judgement.why and not zero else ""),
        cause=ZERO_GRADIENT if zero else None,
        fix="Freeze the param, give it a gradient in every window, or use DDP or FSDP2, which leave it alone."
        if zero
        else "Step the same optimizer on whole tensors to see its rule; look at what sits between it and the step here.",
    )


def _harmless(slot_ids: Sequence[SlotId]) -> Finding:
    name, key = slot_ids[0]
    return Finding(
        "update/zero-gradient",
        "update",
        "note",
        param=name,
        key=key,
        found=f"{len(slot_ids)} slots that a zero gradient in place of an absent one counted or made, the param left alone",
    )


def _other_group(name: str, mine: int, theirs: int) -> Finding:
    return Finding(
        "params/other-group",
        "params",
        "error",
        param=name,
        key="param",
        expected=f"it in param group {mine}, where one process has it",
        found=f"it in param group {theirs}",
        cause="the params were sorted into groups by something that wrapping changes, as their shapes or their order",
        fix="Sort them by name, or by what the unwrapped model says of them.",
    )


def _hyper_parameter(owner: str, key: str, mine: Any, theirs: Any, held_by_user: bool) -> Finding:
    if held_by_user:
        cause, fix = "it was set otherwise than by one step of the schedule a window", "Step the schedule once, after each step."
    else:
        cause = "the optimizer that the loop and its schedule hold is not the one that steps"
        fix = "Build the schedule on the optimizer that initialize or prepare returned."
    return Finding(
        "params/hyper-parameters",
        "params",
        "error",
        key=f"{owner}/{key}",
        expected=f"{mine!r}, as the optimizer and its schedule have it in one process",
        found=f"{theirs!r} in the optimizer that steps",
        cause=cause,
        fix=fix,
    )
