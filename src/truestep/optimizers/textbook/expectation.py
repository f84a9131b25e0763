"""One step of the textbook for one param of a live optimizer: what its update should be, and how far a kernel may be from it.

Note: which dtype a kernel computes in
    Plain and foreach kernels of torch round every operation to the param's dtype. The fused ones of 16-bit params add and
    multiply in float32, but on the CPU they cast the settings to 16 bits first (in bfloat16 beta2 = 0.999 is 1, and lr is off by
    up to 0.4%), so that their results are no closer to the rule: the param's dtype it is for all of them. `dtype` says otherwise.

Note: what is computed in tensors
    Bias corrections and the like are made in Python's float64. With `capturable`, betas in tensors, and for some rules
    `differentiable`, they are made by kernels in the dtype of `step`, where 1 - beta^t cancels. So t is an operand of the one
    arithmetic or the other, and so is a learning rate in a tensor; what is made of them is rounded once when it meets a param.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from truestep.optimizers.textbook.definition import Rule
from truestep.optimizers.textbook.operand import Arithmetic, Operand
from truestep.optimizers.textbook.table import rule, rule_of
from truestep.proof.bounds import Expected, smallest_subnormal, unit_roundoff
from truestep.words.errors import TrueStepError

PARAM: Final = "param"
STEP: Final = "step"
_IN_TENSORS_IF_DIFFERENTIABLE: Final = ("adam", "adamw", "nadam")


def hyper_of(rule: Rule, group: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return the hyper-parameters of a rule as plain numbers, read from a param group, or else the defaults.

    Args:
        rule: Of the optimizer.
        group: One of its `param_groups`; entries that the rule does not know (``foreach``, ``fused``, ..) are passed over.
        dtype: Of the params, on which Adafactor's first eps depends.
    """
    hyper = {key: _number(group.get(key, default)) for key, default in rule.defaults.items()}
    if isinstance(hyper.get("eps"), tuple) and hyper["eps"][0] is None:
        hyper["eps"] = (float(torch.finfo(dtype).eps), *hyper["eps"][1:])
    return hyper


def with_rate(hyper: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters with a learning rate that is kept in a tensor as an operand in that tensor's arithmetic."""
    rate = group.get("lr")
    if not isinstance(rate, Tensor) or not rate.is_floating_point():
        return dict(hyper)
    return {**hyper, "lr": Arithmetic.of(rate.dtype, scalar=True).exact(rate.item())}


def expected(
    optimizer: Optimizer | type[Optimizer] | Rule | str,
    group: Mapping[str, Any],
    param: Tensor,
    grad: Tensor | None,
    state: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
    step: float | None = None,
) -> dict[str, Expected]:
    """Return what one step of the textbook makes of one param and its state, each with its operand bound; changes nothing.

    Args:
        optimizer: A torch optimizer or its class, a rule, or the name of one.
        group: The param group, with the hyper-parameters that the step is to use.
        param: Before the step; any shape and real or complex float dtype. Whole, for a rule of scope `tensor`.
        grad: Its gradient, of the same shape, unscaled; sparse ones count as dense. None: nothing changes.
        state: Its state before the step, by torch's keys; empty or None before the first one.
        dtype: That the kernel computes in, if it is not that of the param; see the note at the top of the module.
        step: How many steps were taken before, where neither the state nor the group says so under ``step``.

    Returns:
        ``"param"`` and each key of the new state: float64, of the slot's shape (complex ones as their real view, shape (.., 2)).
        A counter's bound is zero; one that is infinite says that the rule cannot tell (a denominator that may be zero, and the
        params of Muon).

    Raises:
        TrueStepError: If the textbook has no rule for the optimizer, or shapes do not match.
    """
    chosen = _chosen(optimizer)
    old = {key: value for key, value in (state or {}).items() if value is not None}
    if grad is None:
        return {key: _unchanged(value) for key, value in {PARAM: param, **old}.items() if _is_number(value)}
    if grad.shape != param.shape:
        raise TrueStepError(
            f"expected a gradient of shape {tuple(param.shape)}, found {tuple(grad.shape)}. Pass both whole, or both as shards."
        )
    scalars = _scalar_dtype(old)
    arithmetic = Arithmetic.of(dtype or param.dtype)
    theta = _real(param)
    hyper = hyper_of(chosen, group, param.dtype)
    before = _before(chosen, theta, hyper, old, arithmetic, scalars)
    hyper = with_rate(hyper, group)  # init took it for a number; the step takes it for what it is
    taken = _steps(old, group, step)
    counting = Arithmetic.of(scalars if _in_tensors(chosen, group) else torch.float64, scalar=True)
    t = counting.exact(torch.tensor(taken + 1, dtype=torch.float64, device=theta.device))
    new_param, new_state = chosen.step(arithmetic.exact(theta), arithmetic.exact(_real(grad)), before, hyper, t)
    made = {PARAM: _expected(new_param, theta, param.dtype)}
    for key, value in new_state.items():
        if key == STEP:
            made[key] = _unchanged(taken + 1)
        else:
            made[key] = _expected(value, _like(before.get(key), theta), _dtype_of(old.get(key), before.get(key), param, scalars))
    return made


def _chosen(optimizer: Optimizer | type[Optimizer] | Rule | str) -> Rule:
    if isinstance(optimizer, (Rule, str)):
        return rule(optimizer) if isinstance(optimizer, str) else optimizer
    found = rule_of(optimizer)
    if found is None:
        name = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise TrueStepError(f"expected an optimizer of the textbook, found {name}. Name its rule, or judge it by a replica.")
    return found


def _before(
    rule: Rule, theta: Tensor, hyper: Mapping[str, Any], old: Mapping[str, Any], arithmetic: Arithmetic, scalars: torch.dtype
) -> dict[str, Operand]:
    """Return the state before the step: what is there is exact, what the step is about to make is rounded to its dtype."""
    initial = rule.init(theta, hyper)
    made: dict[str, Operand] = {}
    for key, value in {**initial, **old}.items():
        if key == STEP or not _is_number(value):
            continue
        is_scalar = key in initial and not isinstance(initial[key], Tensor)
        if key in old:
            tensor = _real(value) if isinstance(value, Tensor) else value
            kind = value.dtype if isinstance(value, Tensor) else torch.float64
            made[key] = (Arithmetic.of(kind, scalar=True) if is_scalar else arithmetic).exact(tensor)
        elif is_scalar:
            made[key] = Arithmetic.of(scalars, scalar=True).constant(value)
        else:
            made[key] = Operand(value, value.abs(), int(bool(value.any())), arithmetic)
    return made


def _expected(found: Operand, like: Tensor, dtype: torch.dtype) -> Expected:
    """Return value and bound, of the shape of `like`, of a slot of that dtype."""
    value, bound = found.value.broadcast_to(like.shape), found.bound.broadcast_to(like.shape)
    if unit_roundoff(dtype) > found.arithmetic.u:
        bound = bound + unit_roundoff(dtype) * (value.abs() + bound) + smallest_subnormal(dtype)
    return Expected(value.clone(), bound.clone())


def _unchanged(value: Any) -> Expected:
    exact = _real(value) if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
    return Expected(exact.clone(), torch.zeros_like(exact))


def _like(old: Operand | None, theta: Tensor) -> Tensor:
    return theta if old is None else old.value


def _dtype_of(old: Any, before: Operand | None, param: Tensor, scalars: torch.dtype) -> torch.dtype:
    """Return the dtype of a slot: its own, or the one that the first step will give it."""
    if isinstance(old, Tensor) and (old.is_floating_point() or old.is_complex()):
        return old.dtype
    if old is not None:
        return torch.float64  # a Python number
    return scalars if before is not None and before.value.ndim == 0 and param.ndim else param.dtype


def _real(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, dense, complex ones as their real view."""
    tensor = tensor.detach()
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return torch.view_as_real(tensor.resolve_conj()).to(torch.float64) if tensor.is_complex() else tensor.to(torch.float64)


def _number(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_number(part) for part in value)
    return value.item() if isinstance(value, Tensor) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (Tensor, int, float)) and not isinstance(value, bool)


def _in_tensors(rule: Rule, group: Mapping[str, Any]) -> bool:
    """Tell whether bias corrections are made by kernels."""
    if group.get("differentiable") and rule.name in _IN_TENSORS_IF_DIFFERENTIABLE:
        return True
    return bool(group.get("capturable")) or any(isinstance(beta, Tensor) for beta in group.get("betas", ()))


def _scalar_dtype(old: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of the 0-d state, as torch chooses it: that of the counter, or what it would be."""
    counter = old.get(STEP)
    if isinstance(counter, Tensor) and counter.is_floating_point():
        return counter.dtype
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def _steps(old: Mapping[str, Any], group: Mapping[str, Any], step: float | None) -> float:
    taken = step if step is not None else old.get(STEP, group.get(STEP, 0))
    taken = float(_number(taken))
    if not math.isfinite(taken) or taken < 0:
        raise TrueStepError(f"expected the number of steps taken before, found {taken}. Pass step=.")
    return taken
