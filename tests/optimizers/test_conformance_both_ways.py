"""The conformance suite both ways: a fault that hides from most rows is seen by one, and a healthy class of any build by none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest
import torch
from mutants import PlainAdamW
from torch import Tensor
from torch.optim import Optimizer

from truestep.optimizers.conformance import CHECKS
from truestep.optimizers.conformance.reference import reference_of
from truestep.optimizers.conformance.run import explained, outcome_of
from truestep.optimizers.conformance.subject import Case, subject_of
from truestep.optimizers.probe.quiet import quiet

ALWAYS = {"state-tracks-bf16"}  # true of every class that keeps state as torch does


def failing(optimizer: Any, reference: Any, names: Collection[str] = tuple(CHECKS)) -> dict[str, str | None]:
    """Return those of the named rows that do not hold, with the row that each follows from."""
    with quiet():
        subject = subject_of(optimizer, None, {})
        case = Case(subject, reference_of(reference, subject))
        rows = explained([outcome_of(CHECKS[name], case) for name in names])
    return {row.name: row.because for row in rows if row.outcome in ("failed", "warning") and row.name not in ALWAYS}


# -- Wrong


class DecayByTheRateTwice(PlainAdamW):
    def decay(self, param: Tensor, group: Mapping[str, Any]) -> None:
        param.mul_(1 - group["lr"] ** 2 * group["weight_decay"])


class DecayAfterTheUpdate(PlainAdamW):
    def move(self, param: Tensor, state: dict[str, Any], group: Mapping[str, Any], t: float) -> None:
        super().move(param, state, {**group, "weight_decay": 0.0}, t)
        self.decay(param, group)


class EpsBeforeTheCorrection(PlainAdamW):
    """The form at the end of section 2 of the paper, with the eps of algorithm 1."""

    def denominator(self, state: dict[str, Any], group: Mapping[str, Any], correction: float) -> Tensor:
        return (state["exp_avg_sq"].sqrt() + group["eps"]) / correction**0.5


class BetasExchanged(PlainAdamW):
    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        super().update(param, grad, {**group, "betas": group["betas"][::-1]})


class InitStepInTheFirst(PlainAdamW):
    """The first step takes one with zero gradients before it: no state tells of it before."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if not self.state:
            for group in self.param_groups:
                for param in group["params"]:
                    self.update(param, torch.zeros_like(param), {**group, "lr": 0.0})
        return super().step(closure)


class ZeroSkippedInAGroup(PlainAdamW):
    """Steps are counted in the group, so that no counter tells of the gradient that was passed over."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        return super().step(closure)

    def count(self, state: dict[str, Any], group: dict[str, Any]) -> float:
        state.pop("step", None)
        return float(group["step"])

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if bool((grad != 0).any()):
            super().update(param, grad, group)


class KeyNotSaved(PlainAdamW):
    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        kept = {name: {key: its for key, its in one.items() if key != "exp_avg_sq"} for name, one in saved["state"].items()}
        return {**saved, "state": kept}

    def state_of(self, param: Tensor) -> dict[str, Any]:
        state = super().state_of(param)
        state.setdefault("exp_avg_sq", torch.zeros_like(param))
        return state


class CastByTheFirstStep(PlainAdamW):
    """State is made in float32, and is the param's dtype once it was used."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        for group in self.param_groups:
            for param in group["params"]:
                self.fill(self.state[param], param)

    def fill(self, state: dict[str, Any], param: Tensor) -> None:
        super().fill(state, torch.zeros(param.shape, dtype=torch.promote_types(param.dtype, torch.float32)))

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state_of(param)
        super().update(param, grad.to(state["exp_avg"].dtype), group)
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].to(param.dtype)


class KernelThatRaises(PlainAdamW):
    def __init__(self, params: Any, lr: Any = 1e-3, foreach: bool | None = None) -> None:
        super().__init__(params, lr=lr)
        self.param_groups[0]["foreach"] = foreach

    def move(self, param: Tensor, state: dict[str, Any], group: Mapping[str, Any], t: float) -> None:
        if group["foreach"]:
            raise RuntimeError("stack expects each tensor to be equal size")
        super().move(param, state, group, t)


WRONG: dict[type[PlainAdamW], str] = {
    DecayByTheRateTwice: "decay-place",
    DecayAfterTheUpdate: "decay-place",
    EpsBeforeTheCorrection: "eps-place",
    BetasExchanged: "late-updates",
    InitStepInTheFirst: "young-updates",
    ZeroSkippedInAGroup: "zero-gradient",
    KeyNotSaved: "loaded",
    CastByTheFirstStep: "dtype-stays",
    KernelThatRaises: "kernels-float32",
}


@pytest.mark.parametrize(("wrong", "name"), WRONG.items(), ids=[wrong.__name__ for wrong in WRONG])
def test_a_fault_that_hides_from_most_rows_is_seen_by_one(wrong: type, name: str) -> None:
    rows = failing(wrong, "adamw", (name, *CHECKS[name].follows))
    assert rows.get(name, "holds") is None, rows


# -- Healthy


class Healthy(Optimizer):
    """Descent; subclasses say by what."""

    def __init__(self, params: Any, lr: Any = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    if param.grad.is_sparse:
                        raise RuntimeError("sparse gradients are not supported")
                    param.sub_(group["lr"] * self.direction(param.grad, self.state[param], group))
        return loss

    def direction(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return grad


class Sign(Healthy):
    """Of complex numbers z / |z|, not the sign of each part."""

    def direction(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return grad.sgn()


class LastThree(Healthy):
    """A mean over a list of gradients."""

    def direction(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        last = state.setdefault("last", [])
        last.append(grad.clone())
        del last[:-3]
        return sum(last[1:], last[0]) / len(last)


class TensorsInDefaults(Healthy):
    """Settings in 0-d tensors, of which the constructor takes one."""

    def __init__(self, params: Any, lr: Any = None) -> None:
        Optimizer.__init__(self, params, {"lr": torch.tensor(0.01) if lr is None else lr, "beta": torch.tensor(0.9)})

    def direction(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if "buffer" not in state:
            state["buffer"] = torch.zeros_like(grad)
        return state["buffer"].mul_(group["beta"]).add_(grad)


class CountsTheNextStep(PlainAdamW):
    """Its counter says which step comes next."""

    def count(self, state: dict[str, Any], group: dict[str, Any]) -> float:
        super().count(state, group)
        return float(state["step"]) - 1

    def fill(self, state: dict[str, Any], param: Tensor) -> None:
        super().fill(state, param)
        state["step"] += 1


class TwoPasses(Healthy):
    """It looks one step ahead, and needs a closure for it."""

    def step(self, closure: Any) -> Any:
        with torch.enable_grad():
            loss = closure()
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        before = [param.detach().clone() for param in params]
        with torch.no_grad():
            for param in params:
                param.add_(0.05 * param.grad)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for param, value in zip(params, before, strict=True):
                param.copy_(value)
        super().step()
        return loss


def decayed_matrices(named: list[tuple[str, Tensor]]) -> Optimizer:
    """Two groups, of which one decays."""
    parts = [([p for _, p in named if p.ndim > 1], 0.1), ([p for _, p in named if p.ndim <= 1], 0.0)]
    return torch.optim.AdamW([{"params": params, "weight_decay": decay} for params, decay in parts])


def rate_by_layer(named: list[tuple[str, Tensor]]) -> Optimizer:
    return torch.optim.AdamW([{"params": [param], "lr": 1e-3 * (1 + len(name) % 3)} for name, param in named])


HEALTHY: dict[str, tuple[Any, str | None]] = {
    "descent": (Healthy, "sgd"),
    "a sign": (Sign, None),
    "a list": (LastThree, None),
    "tensors as settings": (TensorsInDefaults, None),
    "the next step": (CountsTheNextStep, "adamw"),
    "two passes": (TwoPasses, None),
    "two groups": (decayed_matrices, "adamw"),
    "a group a param": (rate_by_layer, "adamw"),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_class_of_any_build_fails_nothing(name: str) -> None:
    assert set(failing(*HEALTHY[name])) <= {"rebuilt"}


def test_a_learning_rate_in_a_tensor_has_the_bound_of_its_own_dtype() -> None:
    with quiet():
        subject = subject_of(torch.optim.AdamW, None, {"lr": torch.tensor(1e-3)})
        case = Case(subject, reference_of(None, subject))
        assert outcome_of(CHECKS["kernels-float64"], case).outcome == "passed"
