"""Rules that look at the whole tensor: Adafactor, Muon, LAMB.

They are run on whole params only: on shards they are other rules. Norms and means count one rounding for each term that is added
(`operand`, note on reductions). Muon's Newton-Schulz iteration runs in bfloat16 on purpose, for which no sum of magnitudes says
anything: its params come without a bound and are judged by the step's own sensitivity (`proof.update`).
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from truestep.optimizers.textbook.definition import Hyper, NewState, Rule, State, decayed
from truestep.optimizers.textbook.operand import (
    Operand,
    Quantity,
    by_sign,
    maximum,
    mean,
    minimum,
    mix,
    norm,
    shape,
    sqrt,
    unbounded,
)
from truestep.words.errors import TrueStepError
from truestep.words.scope import Scope


def _adafactor_init(param: Tensor, hyper: Hyper) -> NewState:
    if param.ndim < 2:
        return {"step": 0.0, "variance": torch.zeros_like(param)}
    rows = torch.zeros_like(param[..., :1])
    columns = torch.zeros_like(param[..., :1, :])
    return {"step": 0.0, "row_var": rows, "col_var": columns}


def _adafactor(theta: Quantity, grad: Quantity, state: State, hyper: Hyper, t: Quantity) -> tuple[Quantity, NewState]:
    (eps1, eps2), lr = hyper["eps"], hyper["lr"]
    eps1 = torch.finfo(torch.float64).eps if eps1 is None else eps1  # of the param's own dtype, which `expected` knows
    g = -grad if hyper["maximize"] else grad
    root_n = math.sqrt(math.prod(shape(theta)))
    one_minus_beta2 = t ** hyper["beta2_decay"]
    rho = minimum(1 / sqrt(t), lr)
    alpha = maximum(norm(theta) / root_n, eps2) * rho
    theta = decayed(theta, hyper)
    new: NewState = {"step": t}
    if len(shape(g)) < 2:
        v = new["variance"] = mix(state["variance"], g * g, one_minus_beta2)
    else:
        r = new["row_var"] = mix(state["row_var"], _mean_square(g, -1), one_minus_beta2)
        c = new["col_var"] = mix(state["col_var"], _mean_square(g, -2), one_minus_beta2)
        v = r * c / maximum(mean(r, -2), eps1)
    u = 1 / sqrt(maximum(v, eps1 * eps1)) * g
    u_hat = u / maximum(norm(u) / (root_n * hyper["d"]), 1.0)
    return theta - alpha * u_hat, new


def _mean_square(g: Quantity, dim: int) -> Quantity:
    root = norm(g, dim)
    return root * root / shape(g)[dim]


def _muon_init(param: Tensor, hyper: Hyper) -> NewState:
    return {"momentum_buffer": torch.zeros_like(param)}


def _muon(theta: Quantity, grad: Quantity, state: State, hyper: Hyper, t: Quantity) -> tuple[Quantity, NewState]:
    if len(shape(theta)) != 2:
        raise TrueStepError(
            f"expected a param of 2 dims for muon, found shape {tuple(shape(theta))}. Give it matrices, and the rest to AdamW."
        )
    lr, mu = hyper["lr"], hyper["momentum"]
    b = mix(state["momentum_buffer"], grad, 1 - mu)
    o = _orthogonalized(mix(grad, b, mu) if hyper["nesterov"] else b, hyper)
    theta = decayed(theta, hyper)
    return theta - lr * _adjustment(hyper["adjust_lr_fn"], *shape(theta)) * o, {"momentum_buffer": b}


def _orthogonalized(x: Quantity, hyper: Hyper) -> Quantity:
    """Return the Newton-Schulz iterate of a matrix, run on its shorter side."""
    if isinstance(x, Operand):
        return unbounded(_orthogonalized(x.value, hyper), x)
    a, b, c = hyper["ns_coefficients"]
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / torch.linalg.vector_norm(x).clamp(min=hyper["eps"])
    for _ in range(hyper["ns_steps"]):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def _adjustment(name: str | None, rows: int, columns: int) -> float:
    """Return by how much the learning rate is multiplied for a matrix of that shape."""
    if name == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def _lamb_init(param: Tensor, hyper: Hyper) -> NewState:
    return {"step": 0.0, "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}


def _lamb(theta: Quantity, grad: Quantity, state: State, hyper: Hyper, t: Quantity) -> tuple[Quantity, NewState]:
    eta, (beta1, beta2) = hyper["lr"], hyper["betas"]
    g = -grad if hyper["maximize"] else grad
    m = mix(state["exp_avg"], g, 1 - beta1)
    v = beta2 * state["exp_avg_sq"] + (1 - beta2) * (g * g)
    m_hat = m / (1 - beta1**t)
    v_hat = v / (1 - beta2**t)
    r = m_hat / (sqrt(v_hat) + hyper["eps"])
    r = r + hyper["weight_decay"] * theta if hyper["weight_decay"] else r
    # Where one of the norms is zero there is nothing to trust: the step is taken as it is.
    weight_norm, step_norm = norm(theta), norm(r)
    ratio = by_sign(step_norm, below=1.0, at=1.0, above=weight_norm / step_norm)
    trust = by_sign(weight_norm, below=1.0, at=1.0, above=ratio)
    return theta - eta * trust * r, {"step": t, "exp_avg": m, "exp_avg_sq": v}


ADAFACTOR: Final = Rule(
    "adafactor",
    "N. Shazeer, M. Stern, Adafactor, ICML 2018, algorithms 4 and 5; the floors of torch/optim/_adafactor.py",
    Scope.TENSOR,
    # A mean square 6, its average 10, the product of two 21, over their mean 34, root 35, u 36; over its own norm 75, alpha 80..
    80,
    {
        "lr": 1e-2,
        "beta2_decay": -0.8,
        "eps": (None, 1e-3),
        "d": 1.0,
        "weight_decay": 0.0,
        "maximize": False,
    },
    _adafactor_init,
    _adafactor,
)
MUON: Final = Rule(
    "muon",
    "K. Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024; J. Liu et al., arXiv:2502.16982, for "
    "match_rms_adamw; torch/optim/_muon.py",
    Scope.TENSOR,
    4,  # of the buffer: a lerp
    {
        "lr": 1e-3,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "nesterov": True,
        "ns_coefficients": (3.4445, -4.7750, 2.0315),
        "eps": 1e-7,
        "ns_steps": 5,
        "adjust_lr_fn": None,
    },
    _muon_init,
    _muon,
)
LAMB: Final = Rule(
    "lamb",
    "Y. You et al., Large Batch Optimization for Deep Learning, ICLR 2020, algorithm 2, with phi(z) = z",
    Scope.TENSOR,
    40,
    {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0, "maximize": False},
    _lamb_init,
    _lamb,
)
