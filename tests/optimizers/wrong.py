"""One wrong optimizer for each check: what the check must be able to fail. Those of `mutants` serve where they can."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from mutants import MUTANTS, MomentsSwapped, PlainAdamW
from torch import Tensor
from torch.optim import Optimizer


class HalvesParams(PlainAdamW):
    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.mul_(0.5)


class AbsentAsZero(PlainAdamW):
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.update(param, torch.zeros_like(param) if param.grad is None else param.grad, group)


class ZeroAsAbsent(PlainAdamW):
    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if bool(grad.any()):
            super().update(param, grad, group)


class DrawsFromTheSystem(PlainAdamW):
    def direction(self, param: Tensor, grad: Tensor, group: Any) -> Tensor:
        return super().direction(param, grad, group) * random.SystemRandom().random()


class NewMemory(PlainAdamW):
    def move(self, param: Tensor, state: Any, group: Any, t: float) -> None:
        param.data = param.data.clone()
        super().move(param, state, group, t)


class IgnoresClosure(PlainAdamW):
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        super().step()


class KeepsGradients(PlainAdamW):
    def zero_grad(self, set_to_none: bool = True) -> None: ...


class NeverMaximizes(PlainAdamW):
    def direction(self, param: Tensor, grad: Tensor, group: Any) -> Tensor:
        return grad


class NoHooks(PlainAdamW):
    def register_step_post_hook(self, hook: Any) -> Any: ...


class TwiceTheRate(PlainAdamW):
    def move(self, param: Tensor, state: Any, group: Any, t: float) -> None:
        super().move(param, state, {**group, "lr": 2 * group["lr"]}, t)


class FirstIsFaster(PlainAdamW):
    def move(self, param: Tensor, state: Any, group: Any, t: float) -> None:
        rate = 2 * group["lr"] if param is group["params"][0] else group["lr"]
        super().move(param, state, {**group, "lr": rate}, t)


class SlowerInCompany(PlainAdamW):
    def move(self, param: Tensor, state: Any, group: Any, t: float) -> None:
        super().move(param, state, {**group, "lr": group["lr"] / len(group["params"])}, t)


class FirstGroupOnly(PlainAdamW):
    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if group is self.param_groups[0]:
            super().update(param, grad, group)


class RateOnce(PlainAdamW):
    """The rate is read when it is built."""

    def __init__(self, params: Any, lr: Any = 1e-3, **settings: Any) -> None:
        super().__init__(params, lr=lr, **settings)
        self._rate = lr

    def move(self, param: Tensor, state: Any, group: Any, t: float) -> None:
        super().move(param, state, {**group, "lr": self._rate}, t)


class RateAsNumber(PlainAdamW):
    def __init__(self, params: Any, lr: Any = 1e-3, **settings: Any) -> None:
        super().__init__(params, lr=float(lr), **settings)


class MoreDefaults(PlainAdamW):
    def __init__(self, params: Any, lr: Any = 1e-3) -> None:
        super().__init__(params, lr=lr)
        self.defaults["decoupled"] = True


class DividesByNumel(PlainAdamW):
    def move(self, param: Tensor, state: Any, group: Any, t: float) -> None:
        super().move(param, state, {**group, "scale": 1 / param.numel()}, t)


class NeedsADim(PlainAdamW):
    def move(self, param: Tensor, state: Any, group: Any, t: float) -> None:
        if param.ndim:
            super().move(param, state, group, t)


class WalksMemory(PlainAdamW):
    """It adds up flat memory, as a kernel that forgets strides does."""

    def move(self, param: Tensor, state: Any, group: Any, t: float) -> None:
        first, second = self.corrections(group, t)
        update = state["exp_avg"] / first / self.denominator(state, group, second)
        param.as_strided((param.numel(),), (1,)).sub_(group["lr"] * update.as_strided((param.numel(),), (1,)))

    def fill(self, state: dict[str, Any], param: Tensor) -> None:
        super().fill(state, torch.zeros(param.shape, dtype=param.dtype))


def wrong_kernel(dtype: torch.dtype) -> type[PlainAdamW]:
    class WrongKernel(PlainAdamW):
        """Its foreach kernel takes half the step in one dtype."""

        def __init__(self, params: Any, lr: Any = 1e-3, foreach: bool | None = None) -> None:
            super().__init__(params, lr=lr)
            self.param_groups[0]["foreach"] = foreach

        def move(self, param: Tensor, state: Any, group: Any, t: float) -> None:
            rate = group["lr"] / 2 if group["foreach"] and param.dtype == dtype else group["lr"]
            super().move(param, state, {**group, "lr": rate}, t)

    return WrongKernel


class FineState(PlainAdamW):
    """State in float32 whatever the param is, loaded as torch loads: cast to the param's dtype."""

    def fill(self, state: dict[str, Any], param: Tensor) -> None:
        super().fill(state, torch.zeros(param.shape, dtype=torch.promote_types(param.dtype, torch.float32)))

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        super().update(param, grad.to(torch.promote_types(grad.dtype, torch.float32)), group)


class LoadsOnTop(PlainAdamW):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        before = {param: state["exp_avg"].clone() for param, state in self.state.items()}
        super().load_state_dict(state_dict)
        for param, moment in before.items():
            self.state[param]["exp_avg"] = self.state[param]["exp_avg"] + moment


class KeepsAFunction(PlainAdamW):
    def fill(self, state: dict[str, Any], param: Tensor) -> None:
        super().fill(state, param)
        state["schedule"] = lambda t: t


class LosesAttributes(PlainAdamW):
    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.scale = 1.0

    def move(self, param: Tensor, state: Any, group: Any, t: float) -> None:
        super().move(param, state, {**group, "lr": group["lr"] * self.scale}, t)


class Average:
    """An object that no file may bring back."""

    def __init__(self, like: Tensor) -> None:
        self.value = torch.zeros_like(like)


class KeepsAnObject(PlainAdamW):
    def fill(self, state: dict[str, Any], param: Tensor) -> None:
        super().fill(state, param)
        state["average"] = Average(param)


class KeepsItsOwn(PlainAdamW):
    """State is read from a private dict; what is in `optimizer.state` is for show once it was made."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self._tensors: dict[int, dict[str, Any]] = {}

    def state_of(self, param: Tensor) -> dict[str, Any]:
        return self._tensors.setdefault(id(param), dict(super().state_of(param)))


class OneBuffer(PlainAdamW):
    def fill(self, state: dict[str, Any], param: Tensor) -> None:
        super().fill(state, param)
        state["exp_avg_sq"] = state["exp_avg"]


class Remembers(PlainAdamW):
    def count(self, state: dict[str, Any], group: dict[str, Any]) -> float:
        state.setdefault("history", []).append(state["exp_avg"].clone())
        return super().count(state, group)


class Promotes(PlainAdamW):
    def count(self, state: dict[str, Any], group: dict[str, Any]) -> float:
        if state["step"] == 2:
            state["exp_avg_sq"] = state["exp_avg_sq"].double()
        return super().count(state, group)


class SparseOff(PlainAdamW):
    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        super().update(param, grad.to_dense().flip(0) if grad.is_sparse else grad, group)


class DropsTheImaginaryPart(Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * param.grad.real)


WRONG: dict[str, type[Optimizer]] = {
    "construction": HalvesParams,
    "absent-gradient": AbsentAsZero,
    "zero-gradient": ZeroAsAbsent,
    "repeatable": DrawsFromTheSystem,
    "in-place": NewMemory,
    "closure": IgnoresClosure,
    "zero-grad": KeepsGradients,
    "maximize": NeverMaximizes,
    "hooks": NoHooks,
    "late-updates": TwiceTheRate,
    "order": FirstIsFaster,
    "grouping": SlowerInCompany,
    "added-group": FirstGroupOnly,
    "lr-acts": RateOnce,
    "lr-tensor": RateAsNumber,
    "rebuilt": MoreDefaults,
    "zero-size": DividesByNumel,
    "empty-shard": DividesByNumel,
    "zero-dim": NeedsADim,
    "non-contiguous": WalksMemory,
    "fused-strides": torch.optim.AdamW,
    "kernels-float32": wrong_kernel(torch.float32),
    "kernels-float64": wrong_kernel(torch.float64),
    "kernels-bfloat16": wrong_kernel(torch.bfloat16),
    "kernels-float16": wrong_kernel(torch.float16),
    "keeps-dtype-16": FineState,
    "loaded-over": LoadsOnTop,
    "pickled": KeepsAFunction,
    "through-cpu": MomentsSwapped,
    "copied": LosesAttributes,
    "weights-only": KeepsAnObject,
    "moved-state": KeepsItsOwn,
    "state-apart": OneBuffer,
    "state-size": Remembers,
    "dtype-stays": Promotes,
    "state-tracks-bf16": PlainAdamW,
    "sparse-gradient": SparseOff,
    "complex-params": DropsTheImaginaryPart,
    **{name: mutant for mutant, name in MUTANTS.items()},
}
