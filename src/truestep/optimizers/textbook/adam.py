"""Adam and its kin: Adam, AdamW, Adamax, NAdam, RAdam.

In all of them m is the first moment (`exp_avg`), v the second (`exp_avg_sq`), t the step from 1, alpha the learning rate.

Note: how the roundings are counted
    Coupled decay makes g with 3. m takes 4 more, by lerp (a difference, the cast of 1 - beta1, a product, a sum): 7. v squares g
    (7), times 1 - beta2 (9), plus the decayed old one: 10. sqrt(v) 11, over the root of the bias correction 13, plus eps 14.
    alpha m has 9, over the denominator 9 + 14 + 1 = 24, added to the param 25. Bias corrections are made in Python's float64.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from truestep.optimizers.textbook.definition import Hyper, NewState, Rule, State, decayed, slope
from truestep.optimizers.textbook.operand import Quantity, absolute, by_sign, maximum, mix, sqrt
from truestep.words.scope import Scope

_ADAM: Final[dict[str, Any]] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
    "maximize": False,
    "decoupled_weight_decay": False,
}
NADAM_DECAY: Final = 0.96  # of the momentum schedule, Dozat's recommended value
RECTIFIED_FROM: Final = 5.0  # torch rectifies where rho_t > 5; the paper has 4


def _moments(param: Tensor, hyper: Hyper) -> NewState:
    state: NewState = {"step": 0.0, "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
    if hyper.get("amsgrad"):
        state["max_exp_avg_sq"] = torch.zeros_like(param)
    return state


def _adam(theta: Quantity, grad: Quantity, state: State, hyper: Hyper, t: Quantity) -> tuple[Quantity, NewState]:
    alpha, (beta1, beta2) = hyper["lr"], hyper["betas"]
    g = slope(theta, grad, hyper)
    theta = decayed(theta, hyper)
    m = mix(state["exp_avg"], g, 1 - beta1)
    v = beta2 * state["exp_avg_sq"] + (1 - beta2) * (g * g)
    new: NewState = {"step": t, "exp_avg": m, "exp_avg_sq": v}
    if hyper["amsgrad"]:
        v = new["max_exp_avg_sq"] = maximum(state["max_exp_avg_sq"], v)
    alpha_hat = alpha / (1 - beta1**t)  # of the step, as kernels have it, in place of m_hat
    v_hat = v / (1 - beta2**t)
    return theta - alpha_hat * m / (sqrt(v_hat) + hyper["eps"]), new


def _adamax_init(param: Tensor, hyper: Hyper) -> NewState:
    return {"step": 0.0, "exp_avg": torch.zeros_like(param), "exp_inf": torch.zeros_like(param)}


def _adamax(theta: Quantity, grad: Quantity, state: State, hyper: Hyper, t: Quantity) -> tuple[Quantity, NewState]:
    alpha, (beta1, beta2) = hyper["lr"], hyper["betas"]
    g = slope(theta, grad, hyper)
    m = mix(state["exp_avg"], g, 1 - beta1)
    u = maximum(beta2 * state["exp_inf"], absolute(g) + hyper["eps"])
    return theta - alpha / (1 - beta1**t) * m / u, {"step": t, "exp_avg": m, "exp_inf": u}


def _nadam_init(param: Tensor, hyper: Hyper) -> NewState:
    return {**_moments(param, hyper), "mu_product": 1.0}


def _nadam(theta: Quantity, grad: Quantity, state: State, hyper: Hyper, t: Quantity) -> tuple[Quantity, NewState]:
    alpha, (beta1, beta2), psi = hyper["lr"], hyper["betas"], hyper["momentum_decay"]
    g = slope(theta, grad, hyper)
    theta = decayed(theta, hyper)
    mu = beta1 * (1 - 0.5 * NADAM_DECAY ** (t * psi))
    mu_next = beta1 * (1 - 0.5 * NADAM_DECAY ** ((t + 1) * psi))
    product = state["mu_product"] * mu
    m = mix(state["exp_avg"], g, 1 - beta1)
    v = beta2 * state["exp_avg_sq"] + (1 - beta2) * (g * g)
    alpha_m_hat = alpha * (1 - mu) / (1 - product) * g + alpha * mu_next / (1 - product * mu_next) * m
    v_hat = v / (1 - beta2**t)
    theta = theta - alpha_m_hat / (sqrt(v_hat) + hyper["eps"])
    return theta, {"step": t, "exp_avg": m, "exp_avg_sq": v, "mu_product": product}


def _radam(theta: Quantity, grad: Quantity, state: State, hyper: Hyper, t: Quantity) -> tuple[Quantity, NewState]:
    alpha, (beta1, beta2) = hyper["lr"], hyper["betas"]
    g = slope(theta, grad, hyper)
    theta = decayed(theta, hyper)
    m = mix(state["exp_avg"], g, 1 - beta1)
    v = beta2 * state["exp_avg_sq"] + (1 - beta2) * (g * g)
    m_hat = m / (1 - beta1**t)
    rho_inf = 2 / (1 - beta2) - 1
    rho = rho_inf - 2 * t * beta2**t / (1 - beta2**t)
    if rho_inf > RECTIFIED_FROM:  # else no step ever is
        r = sqrt((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho))
        ell = sqrt(1 - beta2**t) / (sqrt(v) + hyper["eps"])
        scale = by_sign(rho - RECTIFIED_FROM, below=1.0, at=1.0, above=ell * r)
    else:
        scale = 1.0
    return theta - alpha * m_hat * scale, {"step": t, "exp_avg": m, "exp_avg_sq": v}


_KINGMA: Final = "D. P. Kingma, J. Ba, Adam, ICLR 2015"
_BETAS: Final = {key: _ADAM[key] for key in ("lr", "betas", "eps", "weight_decay", "maximize")}

ADAM: Final = Rule(
    "adam",
    f"{_KINGMA}, algorithm 1; AMSGrad: S. Reddi et al., On the Convergence of Adam and Beyond, ICLR 2018, algorithm 2, with the "
    "bias corrections of torch/optim/adam.py",
    Scope.ELEMENT,
    25,
    _ADAM,
    _moments,
    _adam,
)
ADAMW: Final = Rule(
    "adamw",
    "I. Loshchilov, F. Hutter, Decoupled Weight Decay Regularization, ICLR 2019, algorithm 2; the decay is lr times lambda, as "
    "in torch/optim/adamw.py",
    Scope.ELEMENT,
    25,  # as Adam, which it is when decoupled_weight_decay is set to False
    {**_ADAM, "weight_decay": 1e-2, "decoupled_weight_decay": True},
    _moments,
    _adam,
)
ADAMAX: Final = Rule(
    "adamax",
    f"{_KINGMA}, algorithm 2; eps added to abs(g), as in torch/optim/adamax.py",
    Scope.ELEMENT,
    15,  # alpha m 9; abs(g) + eps 4; the quotient 14, added to the param 15
    {**_BETAS, "lr": 2e-3},
    _adamax_init,
    _adamax,
)
NADAM: Final = Rule(
    "nadam",
    "T. Dozat, Incorporating Nesterov Momentum into Adam, ICLR workshop 2016, algorithm 2, with its momentum schedule; "
    "torch/optim/nadam.py",
    Scope.ELEMENT,
    25,  # as Adam: the longer of the two quotients is that of m
    {**_BETAS, "lr": 2e-3, "momentum_decay": 4e-3, "decoupled_weight_decay": False},
    _nadam_init,
    _nadam,
)
RADAM: Final = Rule(
    "radam",
    "L. Liu et al., On the Variance of the Adaptive Learning Rate and Beyond, ICLR 2020, algorithm 2; eps outside the root and "
    "the threshold 5 from torch/optim/radam.py",
    Scope.ELEMENT,
    29,  # m_hat 9, times alpha 11; ell 14; their product 26, times r 28, added to the param 29
    {**_BETAS, "decoupled_weight_decay": False},
    _moments,
    _radam,
)
