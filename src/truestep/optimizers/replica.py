"""The replica: the same optimizer object on plain tensors, to be stepped beside the one that trains.

It is made without its constructor, since classes cannot be called with what they keep (``AdamW(params, **defaults)`` raises): a
deep copy of the object's attributes in which every param is replaced by its plain tensor. It shares no memory with the original.

Note: no hooks
    Step hooks of the original are left behind. torch's global ones fire for any optimizer of a class that it has wrapped, through
    `super().step()` and for optimizers held inside as well, so that leaving them out of one call is not enough: a replica is of a
    subclass, of the same name, whose `step` puts empty tables in the place of the global ones for its duration. Hooks already
    running are not disturbed (they iterate over the tables that were put aside). In the meantime another thread's optimizer would
    miss its global hooks too: step replicas where no other thread steps.

Note: the patch of a schedule
    An LR scheduler puts a wrapped `step` onto the object, bound to the original: copied, it would step that one. Whatever stands
    in the way of the class's own `step` is left behind. Learning rates are in the param groups, which are copied as they are.

Note: what cannot be copied
    A process group, a stream, a lock or an open file is no data: it is shared.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from truestep.words.errors import TrueStepError

Memo: TypeAlias = dict[int, Any]
State: TypeAlias = Mapping[Tensor, Mapping[str, Any]]

_GLOBAL_HOOKS: Final = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_KERNELS: Final = ("foreach", "fused")
_QUIET: Final = "_truestep_steps_without_global_hooks"
_hooks_lock = threading.RLock()


def replica(
    optimizer: Optimizer,
    plain_by_param: Mapping[Tensor, Tensor],
    *,
    state_by_param: State | None = None,
    with_state: bool = True,
    plain_kernels: bool = False,
) -> Optimizer:
    """Return the same optimizer on plain tensors, sharing nothing with the original, with no hooks; changes nothing.

    An optimizer inside a wrapper (accelerate's, DeepSpeed's) is the caller's to take out first. Give the plain tensors a `.grad`,
    then step the replica: from the same state and gradients it ends bitwise where the original would.

    Args:
        optimizer: Any `torch.optim.Optimizer`.
        plain_by_param: For each param that the replica is to step, the tensor to step in its place: whole, or this rank's shard.
            Others that the optimizer holds are left out of its groups and state, see `left_out`.
        state_by_param: State to give the params instead of the original's, by the original param, key by key; a param that is not
            in it gets none. It is copied. For sharded state, which has to be made plain first.
        with_state: False: no state at all of params, as before the first step.
        plain_kernels: Switch foreach and fused kernels off, where the class has them.

    Returns:
        An instance of a subclass of the optimizer's class of the same name.

    Raises:
        TrueStepError: If no param of the optimizer is in `plain_by_param`, or two of them share one plain tensor.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    kept = [param for param in params if param in plain_by_param]
    if params and not kept:
        raise TrueStepError(
            f"expected a plain tensor for some of the {len(params)} params that {type(optimizer).__name__} holds, found none: "
            "its params may be from before the model was wrapped. Pass the mapping by the params that the optimizer holds."
        )
    if len({id(plain_by_param[param]) for param in kept}) != len({id(param) for param in kept}):
        raise TrueStepError("expected a plain tensor for each param, found one that stands for several. Copy it for each.")
    memo: Memo = {id(param): plain for param, plain in plain_by_param.items()}
    return _Copying(plain_by_param, state_by_param, with_state, memo).optimizer(optimizer, plain_kernels)


def left_out(optimizer: Optimizer, plain_by_param: Mapping[Tensor, Tensor]) -> list[Tensor]:
    """Return the tensors that the optimizer holds or keeps state for, but no plain tensor stands for: dead, or not live here."""
    held = [param for group in optimizer.param_groups for param in group["params"]]
    keyed = [key for key in optimizer.state if isinstance(key, Tensor)]
    by_id = {id(tensor): tensor for tensor in [*held, *keyed] if tensor not in plain_by_param}
    return list(by_id.values())


class _Copying:
    """One copy in the making: what stands for what, across an optimizer and those that it holds inside."""

    def __init__(self, plain_by_param: Mapping[Tensor, Tensor], state: State | None, with_state: bool, memo: Memo) -> None:
        self._plain_by_param = plain_by_param
        self._state = state
        self._with_state = with_state
        self._memo = memo

    def optimizer(self, original: Optimizer, plain_kernels: bool) -> Optimizer:
        """Return the copy of an optimizer; the memo then knows it, its groups and its state."""
        if id(original) in self._memo:
            return self._memo[id(original)]  # type: ignore[no-any-return]
        made: Optimizer = object.__new__(_quiet(type(original)))
        # What stands for the original must be known before its attributes are copied: bound methods of it are among them.
        self._memo[id(original)] = made
        own = {key: value for key, value in vars(original).items() if key != "step" and not _is_hooks(key)}
        for inner in _optimizers_in(own):
            self.optimizer(inner, plain_kernels)
        if isinstance(state := own.get("state"), dict):
            self._memo[id(state)] = self._state_of(state)
        if isinstance(groups := own.get("param_groups"), list) and id(groups) not in self._memo:
            self._memo[id(groups)] = [self._group(group, plain_kernels) for group in groups]
        for key, value in own.items():
            vars(made)[key] = self._copied(value)
        if plain_kernels and isinstance(vars(made).get("defaults"), dict):
            made.defaults.update({flag: False for flag in _KERNELS if flag in made.defaults})
        vars(made).update({key: OrderedDict() for key in vars(original) if _is_hooks(key)})
        return made

    def _group(self, group: dict[str, Any], plain_kernels: bool) -> dict[str, Any]:
        if id(group) in self._memo:
            return self._memo[id(group)]  # type: ignore[no-any-return]
        stays = [param in self._plain_by_param for param in group["params"]]
        made: dict[str, Any] = {}
        self._memo[id(group)] = made
        params = [self._plain_by_param[param] for param, stay in zip(group["params"], stays, strict=True) if stay]
        # The list itself is known to some classes (L-BFGS keeps it as an attribute): it stays one and the same.
        self._memo[id(group["params"])] = params
        for key, value in group.items():
            made[key] = params if key == "params" else self._copied(value)
        if isinstance(names := group.get("param_names"), list) and len(names) == len(stays):
            made["param_names"] = [name for name, stay in zip(names, stays, strict=True) if stay]
        if plain_kernels:
            made.update({flag: False for flag in _KERNELS if flag in made})
        return made

    def _state_of(self, state: dict[Any, Any]) -> dict[Any, Any]:
        """Return the new state, of the same kind of dict (a defaultdict): the params' under their plain tensors."""
        if id(state) in self._memo:
            return self._memo[id(state)]  # type: ignore[no-any-return]
        made = copy.copy(state)
        made.clear()
        given = self._state
        for key, entry in state.items():
            if not isinstance(key, Tensor):
                made[self._copied(key)] = self._copied(entry)
            elif key in self._plain_by_param and given is None and self._with_state:
                made[self._plain_by_param[key]] = self._copied(entry)
        for param, entry in (given or {}).items() if self._with_state else ():
            if param in self._plain_by_param:
                made[self._plain_by_param[param]] = {k: self._copied(_apart(value)) for k, value in entry.items()}
        return made

    def _copied(self, value: Any) -> Any:
        """Return a deep copy in which params are plain and memory that was shared still is; what cannot be copied is shared."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        known = dict(self._memo)
        try:
            return copy.deepcopy(value, self._memo)
        except Exception:  # whatever a class, an extension or pickle says to it: one part of it is no data
            self._memo.clear()
            self._memo.update(known)
        return self._copied_in_parts(value)

    def _copied_in_parts(self, value: Any) -> Any:
        """Copy what `deepcopy` refused as a whole, part by part."""
        made: Any
        if isinstance(value, Tensor):  # it refuses those that autograd made
            made = value.detach().clone()
        elif isinstance(value, tuple):
            parts = [self._copied(part) for part in value]
            made = type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        else:
            made = _shallow(value)
            self._memo[id(value)] = made
            if made is not value:
                parts_of = value if isinstance(value, (dict, list)) else vars(value)
                into = made if isinstance(value, (dict, list)) else vars(made)
                pairs = parts_of.items() if isinstance(parts_of, dict) else enumerate(parts_of)
                for key, part in list(pairs):
                    into[key] = self._copied(part)
        self._memo[id(value)] = made
        return made


def _apart(value: Any) -> Any:
    """Return a tensor with memory of its own: a deep copy would take along all that a view looks into."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _shallow(value: Any) -> Any:
    """Return a shallow copy of a container or an object with attributes; the value itself where there is no such copy."""
    if not (isinstance(value, (dict, list)) or hasattr(value, "__dict__")) or isinstance(value, types.ModuleType):
        return value
    try:
        return copy.copy(value)
    except Exception:  # a process group, a stream: see the note above
        return value


def _quiet(cls: type) -> type:
    """Return the subclass of `cls` that steps without global hooks; one for each class, which goes when its replicas do."""
    if _QUIET in vars(cls):
        return cls
    made: type
    for made in cls.__subclasses__():
        if _QUIET in vars(made):
            return made

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        with no_global_hooks():
            return cls.step(self, *args, **kwargs)  # type: ignore[attr-defined]

    step.hooked = True  # type: ignore[attr-defined]  # torch would wrap it once more at load_state_dict
    own = {"step": step, _QUIET: True, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return types.new_class(cls.__name__, (cls,), exec_body=lambda namespace: namespace.update(own))


@contextlib.contextmanager
def no_global_hooks() -> Iterator[None]:
    """Put torch's global optimizer hooks aside for a while: they are not a replica's."""
    with _hooks_lock:
        aside = {name: getattr(torch_optimizer, name) for name in _GLOBAL_HOOKS}
        for name in _GLOBAL_HOOKS:
            setattr(torch_optimizer, name, OrderedDict())
        try:
            yield
        finally:
            for name, hooks in aside.items():
                setattr(torch_optimizer, name, hooks)


def _is_hooks(key: str) -> bool:
    return key.startswith("_optimizer_") and key.endswith("_hooks")


def _optimizers_in(value: Any) -> Iterator[Optimizer]:
    """Yield the optimizers that attributes hold, directly or in containers; they do not survive a deep copy (`__getstate__`)."""
    if isinstance(value, Optimizer):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in ("state", "param_groups"):
                yield from _optimizers_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _optimizers_in(inner)
