"""Rules that follow the gradient or its sign: SGD, ASGD, Rprop, Lion."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from truestep.optimizers.textbook.definition import Hyper, NewState, Rule, State, decayed, slope
from truestep.optimizers.textbook.operand import Quantity, beside, by_sign, maximum, minimum, mix, sign
from truestep.words.scope import Scope


def _sgd_init(param: Tensor, hyper: Hyper) -> NewState:
    return {}  # the first step makes the buffer, of g itself


def _sgd(theta: Quantity, grad: Quantity, state: State, hyper: Hyper, t: Quantity) -> tuple[Quantity, NewState]:
    gamma, mu, tau = hyper["lr"], hyper["momentum"], hyper["dampening"]
    g = slope(theta, grad, hyper)
    if not mu:
        return theta - gamma * g, {}
    old = state.get("momentum_buffer")
    b = g if old is None else mu * old + (1 - tau) * g
    g = g + mu * b if hyper["nesterov"] else b
    return theta - gamma * g, {"momentum_buffer": b}


def _asgd_init(param: Tensor, hyper: Hyper) -> NewState:
    return {"step": 0.0, "eta": float(hyper["lr"]), "mu": 1.0, "ax": torch.zeros_like(param)}


def _asgd(theta: Quantity, grad: Quantity, state: State, hyper: Hyper, t: Quantity) -> tuple[Quantity, NewState]:
    lambd, eta, mu = hyper["lambd"], state["eta"], state["mu"]
    g = slope(theta, grad, hyper)
    theta = theta * (1 - lambd * eta) - eta * g
    ax = state["ax"] + mu * (theta - state["ax"])
    # foreach kernels make eta in a tensor, the plain one in Python.
    new_eta = hyper["lr"] / (1 + lambd * hyper["lr"] * beside(t, eta)) ** hyper["alpha"]
    new_mu = 1 / maximum(t - hyper["t0"], 1.0)
    return theta, {"step": t, "eta": new_eta, "mu": new_mu, "ax": ax}


def _rprop_init(param: Tensor, hyper: Hyper) -> NewState:
    return {"step": 0.0, "prev": torch.zeros_like(param), "step_size": torch.full_like(param, float(hyper["lr"]))}


def _rprop(theta: Quantity, grad: Quantity, state: State, hyper: Hyper, t: Quantity) -> tuple[Quantity, NewState]:
    (eta_minus, eta_plus), (least, most) = hyper["etas"], hyper["step_sizes"]
    g = -grad if hyper["maximize"] else grad
    turned = g * state["prev"]
    size = state["step_size"] * by_sign(turned, below=eta_minus, at=1.0, above=eta_plus)
    size = minimum(maximum(size, least), most)
    # After a change of sign the step is not taken, and the next one sees a zero.
    g = by_sign(turned, below=0.0 * g, at=g, above=g)
    return theta - sign(g) * size, {"step": t, "prev": g, "step_size": size}


def _lion_init(param: Tensor, hyper: Hyper) -> NewState:
    return {"exp_avg": torch.zeros_like(param)}


def _lion(theta: Quantity, grad: Quantity, state: State, hyper: Hyper, t: Quantity) -> tuple[Quantity, NewState]:
    eta, (beta1, beta2) = hyper["lr"], hyper["betas"]
    g = slope(theta, grad, hyper)
    c = mix(state["exp_avg"], g, 1 - beta1)
    m = mix(state["exp_avg"], g, 1 - beta2)
    return decayed(theta, hyper) - eta * sign(c), {"exp_avg": m}


SGD: Final = Rule(
    "sgd",
    "I. Sutskever et al., On the importance of initialization and momentum in deep learning, ICML 2013, sections 2 and 3, in the "
    "form of torch/optim/sgd.py: lr outside the buffer, which begins as g",
    Scope.ELEMENT,
    12,  # g 3, times 1 - dampening 5, the buffer 6, times momentum 8, plus g 9, times lr 11, added to the param 12
    {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False},
    _sgd_init,
    _sgd,
)
ASGD: Final = Rule(
    "asgd",
    "B. Polyak, A. Juditsky, Acceleration of Stochastic Approximation by Averaging, SIAM J. Control Optim. 30 (1992); schedule: "
    "L. Bottou, Large-Scale Machine Learning with SGD, 2010, section 5; torch/optim/asgd.py",
    Scope.ELEMENT,
    9,  # g 3, eta g 5, added to the param 6, minus ax 7, times mu 8, added to ax 9; foreach first adds lambd theta to g: as many
    {"lr": 1e-2, "lambd": 1e-4, "alpha": 0.75, "t0": 1e6, "weight_decay": 0.0, "maximize": False},
    _asgd_init,
    _asgd,
)
RPROP: Final = Rule(
    "rprop",
    "M. Riedmiller, H. Braun, A direct adaptive method for faster backpropagation learning, ICNN 1993, without weight "
    "backtracking: C. Igel, M. Huesken, NC 2000, Rprop-; a turned sign skips the step, as in torch/optim/rprop.py",
    Scope.ELEMENT,
    5,  # step_size times eta 2, clamped to cast ends 2, times the sign and -1 4, added to the param 5
    {"lr": 1e-2, "etas": (0.5, 1.2), "step_sizes": (1e-6, 50.0), "maximize": False},
    _rprop_init,
    _rprop,
)
LION: Final = Rule(
    "lion",
    "X. Chen et al., Symbolic Discovery of Optimization Algorithms, NeurIPS 2023, algorithm 2",
    Scope.ELEMENT,
    4,  # m: the difference, the cast, the product, the sum; the param has 3
    {
        "lr": 1e-4,
        "betas": (0.9, 0.99),
        "weight_decay": 0.0,
        "maximize": False,
        "decoupled_weight_decay": True,
    },
    _lion_init,
    _lion,
)
