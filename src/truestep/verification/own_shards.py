"""Element-wise steps, run once more by a replica on this rank's own shards: there they must agree bit for bit.

Fused and 16-bit kernels round by where an element lies in its tensor, so that on shards they need not end where a step on whole
tensors does: the reference judges that within a bound. What the bound lets pass, a kernel that reads or writes the wrong elements
of a shard, a wrapper that feeds it other operands, shows here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from truestep.backends import slots
from truestep.backends.base import Undo
from truestep.optimizers.replica import replica
from truestep.state.digest import bitwise_equal
from truestep.state.view import Slot
from truestep.verification.rules import is_element_wise
from truestep.words.finding import Finding
from truestep.words.layout import Shard


@dataclass
class OnShards:
    """What became of one rank's steps in one window.

    Attributes:
        bitwise: How many tensors and numbers agree.
        wrong: Which do not.
        not_run: Why a replica could not step beside, where it could not.
    """

    bitwise: int = 0
    wrong: list[Finding] = field(default_factory=list)
    not_run: str = ""


@dataclass(frozen=True, eq=False)
class _Beside:
    """A replica that waits for the live step to end."""

    stepping: torch.optim.Optimizer
    plain_by_param: dict[Tensor, Tensor]


class ShardWatch:
    """Steps a replica beside each step of element-wise optimizers; changes nothing.

    Args:
        optimizers: The innermost ones, that step; ZeRO hands them flat pieces of several params.
        name_by_id: ``id(param) -> name`` of the live ones.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], name_by_id: Mapping[int, str]) -> None:
        self._name_by_id = name_by_id
        self._beside: dict[int, _Beside | None] = {}
        self._found = OnShards()
        watched = [optimizer for optimizer in optimizers if is_element_wise(optimizer)]
        self._undo: list[Undo] = [
            handle.remove
            for optimizer in watched
            for handle in (
                optimizer.register_step_pre_hook(self._before),
                optimizer.register_step_post_hook(self._after),
            )
        ]

    def close(self) -> None:
        """Remove every hook."""
        for undo in self._undo:
            undo()

    def take(self) -> OnShards:
        """Return what was found since the last call."""
        found, self._found = self._found, OnShards()
        return found

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # the optimizer itself comes first
        self._beside[id(optimizer)] = _beside(optimizer) if closure is None else None

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        beside = self._beside.pop(id(optimizer), None)
        if beside is None:
            return
        try:
            beside.stepping.step()
        except Exception as error:  # of a class that goes by more than its params: the whole step is judged all the same
            self._found.not_run = f"{type(optimizer).__name__} on this rank's own shards: {type(error).__name__}: {error}"
            return
        for place, (param, plain) in enumerate(beside.plain_by_param.items()):
            name = self._name_by_id.get(id(param))
            live = {slot.key: slot for slot in slots.param_slots(name or str(place), param, [(None, optimizer)], _here)}
            mine = {slot.key: slot for slot in slots.param_slots(name or str(place), plain, [(None, beside.stepping)], _here)}
            for key in {**mine, **live}:
                if _agree(mine.get(key), live.get(key)):
                    self._found.bitwise += 1
                else:
                    self._found.wrong.append(_differs(name, place, key, mine.get(key), live.get(key)))


def _beside(optimizer: torch.optim.Optimizer) -> _Beside | None:
    """Return a replica on copies of this rank's shards, about to step as the original is; None where nothing would step."""
    held = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    if not held:
        return None
    plain_by_param: dict[Tensor, Tensor] = {}
    state: dict[Tensor, dict[str, Any]] = {}
    for param in held:
        plain = plain_by_param[param] = nn.Parameter(_local(param).detach().clone())
        plain.grad = _local(param.grad).detach().clone()
        if param in optimizer.state:
            state[param] = tree_map(_local, dict(optimizer.state[param]))
    return _Beside(replica(optimizer, plain_by_param, state_by_param=state), plain_by_param)


def _local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


def _here(tensor: Tensor) -> tuple[Shard, tuple[Tensor, ...]]:
    local = _local(tensor).detach()
    return Shard.replica(tuple(local.shape)), (local,)


def _agree(mine: Slot | None, live: Slot | None) -> bool:
    if mine is None or live is None or mine.kind != live.kind:
        return False
    if mine.kind == "opaque":
        return True
    return bitwise_equal(mine.local[0], live.local[0]) if mine.kind == "tensor" else mine.value == live.value


def _differs(name: str | None, place: int, key: str, mine: Slot | None, live: Slot | None) -> Finding:
    expected, found = _told(mine, live)
    return Finding(
        "update/differs-on-shards",
        "update",
        "error",
        param=name,
        key=key if name else f"{key} of flat piece {place}",
        expected=f"{expected}, bit for bit what a replica on the same shard comes to",
        found=found,
        fix="Step with foreach=False and fused=False to see whether it is the kernel; else look at what sits around the step.",
    )


def _told(mine: Slot | None, live: Slot | None) -> tuple[str, str]:
    """Return what a replica and the live step came to, where they are farthest apart."""
    if mine is None or live is None:
        return ("no such slot", "one") if mine is None else ("a slot", "none")
    if mine.kind != "tensor" or live.kind != "tensor":
        return repr(mine.value), repr(live.value)
    ours, theirs = mine.local[0].double().reshape(-1), live.local[0].double().reshape(-1)
    if ours.shape != theirs.shape or not ours.numel():
        return f"shape {tuple(mine.shape)}", f"shape {tuple(live.shape)}"
    worst = int((ours - theirs).abs().nan_to_num(nan=float("inf")).argmax())
    return f"{ours[worst]:.8g} at element {worst} of the shard", f"{theirs[worst]:.8g}"
