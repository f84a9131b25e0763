"""AdamW written out plainly, and ten ways in which it is written wrong; each is named for the check that must fail it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class PlainAdamW(Optimizer):
    """AdamW, one param after the other; its parts are methods, so that a wrong one is a few lines."""

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, group)
        return loss

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if grad.is_sparse or param.is_complex():
            raise RuntimeError("sparse gradients and complex params are not supported")
        state = self.state_of(param)
        t = self.count(state, group)
        grad = self.direction(param, grad, group)
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).add_((1 - beta2) * grad * grad)
        self.move(param, state, group, t)

    def state_of(self, param: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            self.fill(state, param)
        return state

    def fill(self, state: dict[str, Any], param: Tensor) -> None:
        state["step"] = torch.tensor(0.0)
        state["exp_avg"] = torch.zeros_like(param)
        state["exp_avg_sq"] = torch.zeros_like(param)

    def count(self, state: dict[str, Any], group: dict[str, Any]) -> float:
        state["step"] += 1
        return float(state["step"])

    def direction(self, param: Tensor, grad: Tensor, group: Mapping[str, Any]) -> Tensor:
        return -grad if group["maximize"] else grad

    def corrections(self, group: Mapping[str, Any], t: float) -> tuple[float, float]:
        beta1, beta2 = group["betas"]
        return 1 - beta1**t, 1 - beta2**t

    def denominator(self, state: dict[str, Any], group: Mapping[str, Any], correction: float) -> Tensor:
        return (state["exp_avg_sq"] / correction).sqrt() + group["eps"]

    def move(self, param: Tensor, state: dict[str, Any], group: Mapping[str, Any], t: float) -> None:
        first, second = self.corrections(group, t)
        self.decay(param, group)
        param.sub_(group["lr"] / first * state["exp_avg"] / self.denominator(state, group, second))

    def decay(self, param: Tensor, group: Mapping[str, Any]) -> None:
        param.mul_(1 - group["lr"] * group["weight_decay"])


class SharedCounter(PlainAdamW):
    """The step of a group is counted once a tensor."""

    def count(self, state: dict[str, Any], group: dict[str, Any]) -> float:
        group["step"] = group.get("step", 0) + 1
        state.pop("step", None)
        return float(group["step"])


class EpsInRoot(PlainAdamW):
    def denominator(self, state: dict[str, Any], group: Mapping[str, Any], correction: float) -> Tensor:
        return (state["exp_avg_sq"] / correction + group["eps"]).sqrt()


class DecayCoupled(PlainAdamW):
    def direction(self, param: Tensor, grad: Tensor, group: Mapping[str, Any]) -> Tensor:
        return super().direction(param, grad, group) + group["weight_decay"] * param

    def decay(self, param: Tensor, group: Mapping[str, Any]) -> None: ...


class BiasOffByOne(PlainAdamW):
    def corrections(self, group: Mapping[str, Any], t: float) -> tuple[float, float]:
        return super().corrections(group, t + 1)


class MomentsSwapped(PlainAdamW):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]


class StateCast(PlainAdamW):
    """State is in bfloat16 once it was loaded."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].bfloat16().clone()

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state_of(param)
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].to(param.dtype)
        super().update(param, grad, group)


class GradientScaled(PlainAdamW):
    """The gradient is scaled in place on its way into the first moment, to save a buffer."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        super().update(param, grad, group)
        grad.mul_(1 - group["betas"][0])


class KeyedByShape(PlainAdamW):
    def state_of(self, param: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[tuple(param.shape)]
        if not state:
            self.fill(state, param)
        return state


class HiddenInitStep(PlainAdamW):
    """State is created by a step with zero gradients at lr 0, as torch's state-dict API does it."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        for group in self.param_groups:
            rate, group["lr"] = group["lr"], 0.0
            for param in group["params"]:
                with torch.no_grad():
                    self.update(param, torch.zeros_like(param), group)
            group["lr"] = rate


class Bfloat16SecondMoment(PlainAdamW):
    def fill(self, state: dict[str, Any], param: Tensor) -> None:
        super().fill(state, param)
        state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16()

    def denominator(self, state: dict[str, Any], group: Mapping[str, Any], correction: float) -> Tensor:
        return (state["exp_avg_sq"].to(state["exp_avg"].dtype) / correction).sqrt() + group["eps"]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16()


MUTANTS: dict[type[PlainAdamW], str] = {
    SharedCounter: "counters",
    EpsInRoot: "eps-place",
    DecayCoupled: "decay-place",
    BiasOffByOne: "young-updates",
    MomentsSwapped: "loaded",
    StateCast: "keeps-dtype",
    GradientScaled: "gradients-unaltered",
    KeyedByShape: "equal-shapes",
    HiddenInitStep: "no-hidden-step",
    Bfloat16SecondMoment: "state-tracks",
}
