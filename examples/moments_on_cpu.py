"""An AdamW that parks its moments on the CPU between steps: what is true of it, and what is not.

It is the optimizer of a public report: 70 B params, moments moved to the GPU for the update only, and a loss that swings late in
training. `docs/worked_case.md` tells the story with the figures that this file measures.

    python examples/moments_on_cpu.py                       the report on it, and the table
    python examples/moments_on_cpu.py --figure FILE.svg     the second moment against float64, drawn (needs matplotlib)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import truestep as ts

STEPS = 3000
EVERY = 20  # steps that the figure shows
CHANGE = 1000  # the step from which gradients have another size


class ParkedAdamW(Optimizer):
    """AdamW whose moments lie on the CPU between steps.

    Args:
        params: As of any optimizer.
        lr, betas, eps, weight_decay: As of AdamW.
        in_dtype: Of the moments, on the CPU and in the update. None: the param's, "to be consistent", as is often advised.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 2e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        in_dtype: torch.dtype | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "in_dtype": in_dtype}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)
        return loss

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if grad.is_sparse or param.is_complex():
            raise RuntimeError("ParkedAdamW takes no sparse gradients and no complex params")
        dtype = group["in_dtype"] or param.dtype
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros(param.shape, dtype=dtype, device="cpu")
            state["exp_avg_sq"] = torch.zeros(param.shape, dtype=dtype, device="cpu")
        state["step"] += 1
        t, (beta1, beta2) = float(state["step"]), group["betas"]
        # There: to the param's device, and in the dtype to compute in.
        exp_avg = state["exp_avg"].to(param.device, dtype)
        exp_avg_sq = state["exp_avg_sq"].to(param.device, dtype)
        grad = grad.to(dtype)
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (exp_avg_sq / (1 - beta2**t)).sqrt_().add_(group["eps"])
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_((group["lr"] / (1 - beta1**t) * exp_avg / denominator).to(param.dtype))
        # And back: the dtype stays what it was.
        state["exp_avg"], state["exp_avg_sq"] = exp_avg.to("cpu"), exp_avg_sq.to("cpu")


@dataclass(frozen=True)
class Course:
    """How large gradients are, step by step, from 0.

    Attributes:
        name: In words.
        size: ``step -> size``.
        noisy: Drawn from a normal distribution, not all of that size.
    """

    name: str
    size: Callable[[int], float]
    noisy: bool = False


COURSES = (
    Course("of size 1 throughout", lambda step: 1.0),
    Course(f"a tenth from step {CHANGE} on", lambda step: 1.0 if step < CHANGE else 0.1),
    Course(f"1.4 times that from step {CHANGE} on", lambda step: 1.0 if step < CHANGE else 1.4),
    Course("noise of size 1", lambda step: 1.0, noisy=True),
    Course(f"noise, a tenth from step {CHANGE} on", lambda step: 1.0 if step < CHANGE else 0.1, noisy=True),
)


@dataclass(frozen=True)
class Followed:
    """A run beside the same moments in float64.

    Attributes:
        second: exp_avg_sq after each step, over that in float64: the median of the elements.
        update: exp_avg over the root of exp_avg_sq, over the same in float64: of the sizes over all elements.
        lost: The share of updates that left the param as it was.
        path: exp_avg_sq of the first element after each step, and in float64.
    """

    second: list[float]
    update: list[float]
    lost: float
    path: list[tuple[float, float]]


def followed(course: Course, dtype: torch.dtype, in_dtype: torch.dtype | None, steps: int = STEPS, numel: int = 256) -> Followed:
    """Run the optimizer on params of a dtype, its moments parked in another, beside moments in float64."""
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter((0.02 * torch.randn(numel, generator=generator)).to(dtype))
    optimizer = ParkedAdamW([param], in_dtype=in_dtype)
    beta1, beta2 = optimizer.defaults["betas"]
    first, second = (torch.zeros(numel, dtype=torch.float64) for _ in range(2))
    told = Followed([], [], 0.0, [])
    still = 0
    for step in range(steps):
        noise = torch.randn(numel, generator=generator) if course.noisy else torch.ones(numel)
        param.grad = (course.size(step) * noise).to(dtype)
        before = param.detach().clone()
        optimizer.step()
        still += int((param.detach() == before).sum())
        grad = param.grad.double()
        first.lerp_(grad, 1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        state = optimizer.state[param]
        told.second.append(float((state["exp_avg_sq"].double() / second).median()))
        ours, theirs = (m / v.sqrt() for m, v in ((state["exp_avg"].double(), state["exp_avg_sq"].double()), (first, second)))
        told.update.append(float(ours.norm() / theirs.norm()))
        told.path.append((float(state["exp_avg_sq"][0]), float(second[0])))
    return Followed(told.second, told.update, still / (steps * numel), told.path)


SETTINGS = (
    ("bf16 params, moments in bf16", torch.bfloat16, None),
    ("bf16 params, moments in fp32", torch.bfloat16, torch.float32),
    ("fp32 params, moments in fp32", torch.float32, None),
)


def table(steps: int = STEPS) -> str:
    """Return the figures as a table in Markdown."""
    lines = ["| gradients | params and moments | exp_avg_sq | update | updates lost |", "|---|---|---|---|---|"]
    for course in COURSES:
        for name, dtype, in_dtype in SETTINGS:
            run = followed(course, dtype, in_dtype, steps)
            lines.append(f"| {course.name} | {name} | {run.second[-1]:.2f} x | {run.update[-1]:.2f} x | {run.lost:.0%} |")
    return "\n".join(lines)


def figure(path: str, steps: int = STEPS) -> None:
    """Draw the second moment against float64 and write it to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [course for course in COURSES if not course.noisy]
    made, axes = pyplot.subplots(1, len(shown), figsize=(4 * len(shown), 3), layout="constrained")
    for axis, course in zip(axes, shown, strict=True):
        for name, dtype, in_dtype in SETTINGS[:2]:
            seen = followed(course, dtype, in_dtype, steps).path[::EVERY]
            axis.plot(range(0, steps, EVERY), [mine for mine, _ in seen], label=name.partition(", ")[2])
        axis.plot(range(0, steps, EVERY), [theirs for _, theirs in seen], "k--", label="float64")
        axis.set_title(f"gradients {course.name}", fontsize="medium")
        axis.set_xlabel("step")
    axes[0].set_ylabel("exp_avg_sq")
    axes[0].legend()
    made.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the report and the table, or draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--figure", metavar="FILE", help="draw the second moment into this file")
    parser.add_argument("--steps", type=int, default=STEPS)
    asked = parser.parse_args(arguments)
    if asked.figure:
        figure(asked.figure, asked.steps)
        return
    print(ts.check_optimizer(ParkedAdamW, reference="adamw").table())
    print()
    print(table(asked.steps))


if __name__ == "__main__":
    main()
