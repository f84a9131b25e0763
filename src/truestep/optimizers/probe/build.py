"""Building the optimizer of a probe: which way of passing params it takes is found by trying.

Note: ways
    A class may want params in two groups (so that what a group shares is told from what all share), in one list, with their
    names, in groups with a flag that it asks for (``use_muon``), or a module; its `step` may want a closure. The ways are tried
    in this order, and the first in which it steps some param is taken. A function is given ``[(name, param), ...]``, as a
    recipe's is.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from truestep.optimizers.probe.plan import DEFAULT_SHAPES, Member, group_of
from truestep.words.errors import UnsupportedError
from truestep.words.finding import listed

Target: TypeAlias = Callable[..., Any]
Named: TypeAlias = Sequence[tuple[Member, nn.Parameter]]

FORMS: Final = ("groups", "list", "names", "model")
WRAPS: Final = ("optimizer", "base", "base_optimizer")  # what the argument is called that takes another optimizer
_EXPECTED: Final = "expected an optimizer class, or a function named_params -> optimizer"
_FLAG: Final = re.compile(r"\buse_\w+")


class Refusal(Exception):
    """What a class raised when it was made or stepped; its cause is the error."""


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Raise whatever is raised inside as a `Refusal`, so that errors of the probe itself are not taken for it."""
    try:
        yield
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        raise Refusal(f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__) from error


@dataclass(frozen=True)
class Way:
    """How to make and step an optimizer.

    Attributes:
        target: The class or function.
        form: How it takes params: see the note above; ``function`` for a function.
        flag: Name of the entry that each group must have: true for params of 2 dims and more.
        closure: Its `step` takes a closure.
        settings: Its keyword arguments.
        group_settings: What to set in its groups after it was made (for functions, which take no settings of the class).
    """

    target: Target
    form: str
    flag: str = ""
    closure: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    group_settings: Mapping[str, Any] = field(default_factory=dict)

    def make(self, params: Named) -> list[Any]:
        """Return the optimizers of these params, in training mode where they have modes."""
        try:
            made = self.target(_PASSED[self.form](params, self.flag), **self.settings)
        except Exception:
            if self.form != "function":
                raise
            # It may want a param of each kind (Muon for matrices, AdamW for the rest): others stand beside, without gradients.
            made = self.target(_with_names([*params, *_bystanders()], self.flag), **self.settings)
        if isinstance(made, Mapping):
            made = list(made.values())
        optimizers = list(made) if isinstance(made, (list, tuple)) else [made]
        for optimizer in optimizers:
            if callable(train := getattr(optimizer, "train", None)):
                train()
        for group in groups_of(optimizers):
            group.update({key: value for key, value in self.group_settings.items() if key in group})
        return optimizers

    def step(self, optimizers: Sequence[Any], closure: Callable[[], Tensor]) -> None:
        """Step all of them, with the closure where they want one."""
        for optimizer in optimizers:
            optimizer.step(closure) if self.closure else optimizer.step()

    def with_plain_kernels(self) -> Way:
        """Return the same with foreach and fused kernels off, where its groups have them."""
        return replace(self, group_settings={**self.group_settings, "foreach": False, "fused": False})

    @property
    def needs(self) -> tuple[str, ...]:
        """What it must be given beside params and gradients."""
        given = (
            (self.closure, "closure"),
            (self.form == "names", "names"),
            (self.form == "model", "model"),
            (bool(self.flag), self.flag),
        )
        return tuple(name for is_needed, name in given if is_needed)


def groups_of(optimizers: Sequence[Any]) -> list[dict[str, Any]]:
    """Return all param groups."""
    return [group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ())]


def has_modes(target: Target) -> bool:
    """Tell whether it must be put into training mode, as schedule-free optimizers are."""
    return isinstance(target, type) and callable(getattr(target, "train", None))


# -- How params are passed


def _in_groups(params: Named, flag: str) -> list[dict[str, Any]]:
    """Return a group for each flag and number of a group that has params."""
    keys = {(member.whole_ndim >= 2 if flag else False, group_of(member.subject)) for member, _ in params}
    return [
        {
            "params": [p for m, p in params if (m.whole_ndim >= 2 if flag else False, group_of(m.subject)) == (flagged, number)],
            **({flag: flagged} if flag else {}),
        }
        for flagged, number in sorted(keys)
    ]


def _in_a_model(params: Named, flag: str) -> nn.Module:
    root = nn.Module()
    for member, param in params:
        *path, last = member.name.split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(last, param)
    return root


def _with_names(params: Named, flag: str) -> list[tuple[str, nn.Parameter]]:
    return [(member.name, param) for member, param in params]


def _bystanders() -> list[tuple[Member, nn.Parameter]]:
    return [
        (Member(f"rest.{name}", shape, (), number, len(shape)), nn.Parameter(torch.full(shape, 0.5)))
        for number, (name, shape) in enumerate(DEFAULT_SHAPES.items())
    ]


def _in_a_list(params: Named, flag: str) -> list[nn.Parameter]:
    return [param for _, param in params]


_PASSED: Final[Mapping[str, Callable[[Named, str], Any]]] = {
    "groups": _in_groups,
    "list": _in_a_list,
    "names": _with_names,
    "model": _in_a_model,
    "function": _with_names,
}


# -- Which ways there are


def target_of(optimizer: Any, settings: Mapping[str, Any]) -> tuple[Target, dict[str, Any]]:
    """Return the class or function, and its settings; a partial of a class is that class with settings.

    Raises:
        UnsupportedError: If it is neither, or does not take a setting.
    """
    settings = dict(settings)
    if isinstance(optimizer, functools.partial) and isinstance(optimizer.func, type) and not optimizer.args:
        optimizer, settings = optimizer.func, {**optimizer.keywords, **settings}
    if isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedError(f"{_EXPECTED}, found an optimizer. Pass its class, {type(optimizer).__name__}.")
    if not callable(optimizer):
        raise UnsupportedError(f"{_EXPECTED}, found {optimizer!r}. Pass torch.optim.AdamW.")
    accepted = arguments(optimizer)
    if unknown := [name for name in settings if accepted is not None and name not in accepted]:
        raise UnsupportedError(
            f"{name_of(optimizer)} takes no setting {listed(unknown)}: expected some of {listed(list(accepted or ())[1:], 20)}."
        )
    return optimizer, settings


def name_of(target: Target) -> str:
    """Return the name of a class or function."""
    return getattr(target, "__qualname__", type(target).__name__)


def arguments(target: Target) -> dict[str, inspect.Parameter] | None:
    """Return what a call takes by name; None if it takes any, or tells nothing."""
    parameters = _parameters(target)
    takes_any = not parameters or any(one.kind is one.VAR_KEYWORD for one in parameters)
    return None if takes_any else {one.name: one for one in parameters}


def _parameters(target: Target) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):  # some of C say nothing
        return []


def ways_of(target: Target, settings: Mapping[str, Any]) -> tuple[list[Way], str]:
    """Return the ways to try, and why there are none."""
    if not isinstance(target, type):
        return [Way(target, "function", closure=closure, settings=settings) for closure in (False, True)], ""
    positional = [one for one in _parameters(target) if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    missing = [one.name for one in positional[1:] if one.default is one.empty and one.name not in settings]
    first = positional[0].name if positional else "params"
    name = name_of(target)
    if first in WRAPS:
        return [], f"it wraps another optimizer: probe a function, lambda named: {name}(AdamW([p for _, p in named]))"
    if missing:
        return [], f"it must be given {listed(missing)}: ts.probe({name}, {missing[-1]}=...), or probe a function that gives them"
    forms = ("model",) if first == "model" else FORMS[:-1]
    return [Way(target, form, closure=closure, settings=settings) for form in forms for closure in (False, True)], ""


def flag_in(error: str) -> str:
    """Return the flag of groups that an error asks for, or nothing."""
    found = _FLAG.search(error)
    return found[0] if found else ""


def large_settings(way: Way, optimizers: Sequence[Any], limit: int) -> list[str]:
    """Return the names of whole-number settings above `limit`: of a class its arguments, of a function what its groups hold."""
    if way.form == "function":
        entries = [(key, value) for group in groups_of(optimizers) for key, value in group.items()]
    else:
        entries = [(one.name, one.default) for one in _parameters(way.target)] + list(way.settings.items())
        entries = list(dict(entries).items())
    return list(dict.fromkeys(key for key, value in entries if _is_above(value, limit)))


def _is_above(value: Any, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > limit
