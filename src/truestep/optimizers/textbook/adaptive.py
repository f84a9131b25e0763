"""Rules that scale by accumulated squares, without bias correction: Adagrad, RMSprop, Adadelta.

The roundings are counted as in `adam`: g 3, an average of squares 10, one of gradients by lerp 7.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from truestep.optimizers.textbook.definition import Hyper, NewState, Rule, State, slope
from truestep.optimizers.textbook.operand import Quantity, mix, sqrt
from truestep.words.scope import Scope


def _adagrad_init(param: Tensor, hyper: Hyper) -> NewState:
    return {"step": 0.0, "sum": torch.full_like(param, hyper["initial_accumulator_value"])}


def _adagrad(theta: Quantity, grad: Quantity, state: State, hyper: Hyper, t: Quantity) -> tuple[Quantity, NewState]:
    g = slope(theta, grad, hyper)
    eta = hyper["lr"] / (1 + (t - 1) * hyper["lr_decay"])
    total = state["sum"] + g * g
    return theta - eta * g / (sqrt(total) + hyper["eps"]), {"step": t, "sum": total}


def _rmsprop_init(param: Tensor, hyper: Hyper) -> NewState:
    keys = ["square_avg"]
    keys += ["momentum_buffer"] if hyper["momentum"] > 0 else []
    keys += ["grad_avg"] if hyper["centered"] else []
    return {"step": 0.0, **{key: torch.zeros_like(param) for key in keys}}


def _rmsprop(theta: Quantity, grad: Quantity, state: State, hyper: Hyper, t: Quantity) -> tuple[Quantity, NewState]:
    lr, alpha = hyper["lr"], hyper["alpha"]
    g = slope(theta, grad, hyper)
    v = alpha * state["square_avg"] + (1 - alpha) * (g * g)
    new: NewState = {"step": t, "square_avg": v}
    if hyper["centered"]:
        mean = new["grad_avg"] = mix(state["grad_avg"], g, 1 - alpha)
        v = v - mean * mean
    direction = g / (sqrt(v) + hyper["eps"])
    if hyper["momentum"] > 0:
        direction = new["momentum_buffer"] = hyper["momentum"] * state["momentum_buffer"] + direction
    return theta - lr * direction, new


def _adadelta_init(param: Tensor, hyper: Hyper) -> NewState:
    return {"step": 0.0, "square_avg": torch.zeros_like(param), "acc_delta": torch.zeros_like(param)}


def _adadelta(theta: Quantity, grad: Quantity, state: State, hyper: Hyper, t: Quantity) -> tuple[Quantity, NewState]:
    rho, eps = hyper["rho"], hyper["eps"]
    g = slope(theta, grad, hyper)
    v = rho * state["square_avg"] + (1 - rho) * (g * g)
    delta = sqrt(state["acc_delta"] + eps) / sqrt(v + eps) * g
    u = rho * state["acc_delta"] + (1 - rho) * (delta * delta)
    return theta - hyper["lr"] * delta, {"step": t, "square_avg": v, "acc_delta": u}


ADAGRAD: Final = Rule(
    "adagrad",
    "J. Duchi, E. Hazan, Y. Singer, Adaptive Subgradient Methods, JMLR 12 (2011), figure 1, diagonal; lr_decay and eps outside "
    "the root from torch/optim/adagrad.py",
    Scope.ELEMENT,
    17,  # the square 7, the sum 8, its root 9, plus eps 10; eta g 5, the quotient 16, added to the param 17
    {
        "lr": 1e-2,
        "lr_decay": 0.0,
        "weight_decay": 0.0,
        "initial_accumulator_value": 0.0,
        "eps": 1e-10,
        "maximize": False,
    },
    _adagrad_init,
    _adagrad,
)
RMSPROP: Final = Rule(
    "rmsprop",
    "T. Tieleman, G. Hinton, Neural Networks for Machine Learning, lecture 6.5, 2012; centered: A. Graves, arXiv:1308.0850, "
    "equations 38 to 45, with eps outside the root as in torch/optim/rmsprop.py",
    Scope.ELEMENT,
    26,  # the square of grad_avg 15, off v 16, root 17, plus eps 18; g over it 22, the buffer 23, times lr 25, added 26
    {
        "lr": 1e-2,
        "alpha": 0.99,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "momentum": 0.0,
        "centered": False,
        "maximize": False,
    },
    _rmsprop_init,
    _rmsprop,
)
ADADELTA: Final = Rule(
    "adadelta",
    "M. D. Zeiler, ADADELTA, arXiv:1212.5701, algorithm 1, scaled by lr; torch/optim/adadelta.py",
    Scope.ELEMENT,
    44,  # std 12; the old rms 3; their quotient 16, times g 20, its square 41, times 1 - rho 43, added 44
    {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0, "maximize": False},
    _adadelta_init,
    _adadelta,
)
