"""Each rule of the textbook against one step worked out by hand; the arithmetic is beside the numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from truestep.optimizers import textbook
from truestep.optimizers.textbook import Arithmetic, Operand

ROOT2 = 2**0.5


@dataclass(frozen=True)
class Step:
    """One step: what goes in, and what must come out."""

    rule: str
    hyper: dict[str, Any]
    t: int
    param: list[Any]
    grad: list[Any]
    state: dict[str, Any]
    new_param: list[Any]
    new_state: dict[str, Any] = field(default_factory=dict)


HALF = {"betas": (0.5, 0.75), "eps": 1.0, "lr": 0.1}
STEPS = {
    # g = 0.5 + 0.1 * 1 = 0.6; b = 0.9 * 2 + 0.75 * 0.6 = 2.25; 1 - 0.1 * 2.25
    "sgd": Step(
        "sgd",
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.25, "weight_decay": 0.1},
        3,
        [1.0],
        [0.5],
        {"momentum_buffer": [2.0]},
        [0.775],
        {"momentum_buffer": [2.25]},
    ),
    # b = g = 0.5, not 0.75 * 0.5; 1 - 0.1 * 0.5
    "sgd, first step": Step(
        "sgd",
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.25},
        1,
        [1.0],
        [0.5],
        {},
        [0.95],
        {"momentum_buffer": [0.5]},
    ),
    # g = -(-0.6) = 0.6; b = 0.9 * 2 + 0.6 = 2.4; direction 0.6 + 0.9 * 2.4 = 2.76; 1 - 0.276
    "sgd, Nesterov, maximize": Step(
        "sgd",
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True},
        3,
        [1.0],
        [-0.6],
        {"momentum_buffer": [2.0]},
        [0.724],
        {"momentum_buffer": [2.4]},
    ),
    # eta = 0.8 / (1 + 2 * 0.5) = 0.4; sum = 5 + 4 = 9; 1 - 0.4 * 2 / (3 + 1)
    "adagrad": Step("adagrad", {"lr": 0.8, "lr_decay": 0.5, "eps": 1.0}, 3, [1.0], [2.0], {"sum": [5.0]}, [0.8], {"sum": [9.0]}),
    # v = 0.75 * 20 + 0.25 * 4 = 16; 1 - 0.5 * 2 / (4 + 1)
    "rmsprop": Step(
        "rmsprop",
        {"lr": 0.5, "alpha": 0.75, "eps": 1.0},
        2,
        [1.0],
        [2.0],
        {"square_avg": [20.0]},
        [0.8],
        {"square_avg": [16.0]},
    ),
    # v = 23 + 2 = 25, mean = 2 + 1 = 3, root of 25 - 9 is 4; g / 5 = 0.4; buffer 0.5 * 1 + 0.4 = 0.9; 1 - 0.1 * 0.9
    "rmsprop, centered": Step(
        "rmsprop",
        {"lr": 0.1, "alpha": 0.5, "eps": 1.0, "momentum": 0.5, "centered": True},
        2,
        [1.0],
        [2.0],
        {"square_avg": [46.0], "grad_avg": [4.0], "momentum_buffer": [1.0]},
        [0.91],
        {"square_avg": [25.0], "grad_avg": [3.0], "momentum_buffer": [0.9]},
    ),
    # v = 13 + 2 = 15; delta = sqrt(3 + 1) / sqrt(15 + 1) * 2 = 1; acc = 1.5 + 0.5 = 2; 1 - 0.5 * 1
    "adadelta": Step(
        "adadelta",
        {"lr": 0.5, "rho": 0.5, "eps": 1.0},
        2,
        [1.0],
        [2.0],
        {"square_avg": [26.0], "acc_delta": [3.0]},
        [0.5],
        {"square_avg": [15.0], "acc_delta": [2.0]},
    ),
    # m = 0.5 + 1 = 1.5, over 1 - 0.25 is 2; v = 6 + 1 = 7, over 1 - 0.5625 is 16; 1 - 0.1 * 2 / (4 + 1)
    "adam": Step(
        "adam",
        HALF,
        2,
        [1.0],
        [2.0],
        {"exp_avg": [1.0], "exp_avg_sq": [8.0]},
        [0.96],
        {"exp_avg": [1.5], "exp_avg_sq": [7.0]},
    ),
    # the same, with g = 1 + 1 * 1 = 2
    "adam, coupled decay": Step(
        "adam",
        {**HALF, "weight_decay": 1.0},
        2,
        [1.0],
        [1.0],
        {"exp_avg": [1.0], "exp_avg_sq": [8.0]},
        [0.96],
        {"exp_avg": [1.5], "exp_avg_sq": [7.0]},
    ),
    # the same, from 1 - 0.1 * 0.5 * 1 = 0.95
    "adamw": Step(
        "adamw",
        {**HALF, "weight_decay": 0.5},
        2,
        [1.0],
        [2.0],
        {"exp_avg": [1.0], "exp_avg_sq": [8.0]},
        [0.91],
        {"exp_avg": [1.5], "exp_avg_sq": [7.0]},
    ),
    # the largest is 28, over 0.4375 is 64; 1 - 0.1 * 2 / (8 + 1)
    "adam, AMSGrad": Step(
        "adam",
        {**HALF, "amsgrad": True},
        2,
        [1.0],
        [2.0],
        {"exp_avg": [1.0], "exp_avg_sq": [8.0], "max_exp_avg_sq": [28.0]},
        [1 - 0.2 / 9],
        {"exp_avg": [1.5], "exp_avg_sq": [7.0], "max_exp_avg_sq": [28.0]},
    ),
    # u = max(0.75 * 16 / 3, 2 + 1) = 4; 1 - 0.1 / 0.75 * 1.5 / 4
    "adamax": Step(
        "adamax", HALF, 2, [1.0], [2.0], {"exp_avg": [1.0], "exp_inf": [16 / 3]}, [0.95], {"exp_avg": [1.5], "exp_inf": [4.0]}
    ),
    # without decay of the schedule mu = 0.5 * (1 - 0.5) = 0.25 for every t; the product 0.25 * 0.25 = 0.0625;
    # (0.75 / 0.9375) * 2 + (0.25 / 0.984375) * 1.5 = 1.6 + 8 / 21; 1 - 0.1 * that / (4 + 1)
    "nadam": Step(
        "nadam",
        {**HALF, "momentum_decay": 0.0},
        2,
        [1.0],
        [2.0],
        {"exp_avg": [1.0], "exp_avg_sq": [8.0], "mu_product": 0.25},
        [1 - 0.02 * (1.6 + 8 / 21)],
        {"exp_avg": [1.5], "exp_avg_sq": [7.0], "mu_product": 0.0625},
    ),
    # rho_inf = 2 / 0.25 - 1 = 7; rho = 7 - 4 * 0.5625 / 0.4375 = 13 / 7 is not above 5; 1 - 0.1 * 2
    "radam, not rectified": Step(
        "radam",
        HALF,
        2,
        [1.0],
        [2.0],
        {"exp_avg": [1.0], "exp_avg_sq": [8.0]},
        [0.8],
        {"exp_avg": [1.5], "exp_avg_sq": [7.0]},
    ),
    # With beta2 = s / 2, s = sqrt(3): v = (1 - s / 2) * 4, its root s - 1, plus eps s.
    # t = 16: 0.75^8 = 0.1001129150390625; rho_inf = 2 / (1 - s / 2) - 1 = 7 + 4 s = 13.928203230275509;
    # rho = rho_inf - 32 * 0.1001129150390625 / 0.8998870849609375 = 10.368186273938078, above 5;
    # r = sqrt(6.368186273938078 * 8.368186273938078 * rho_inf / (9.928203230275509 * 11.928203230275509 * rho))
    #   = 0.777493660109077; l = sqrt(0.8998870849609375) / s = 0.547688197475211; m_hat = 1.5 / (1 - 2^-16) = 1.500022888532845;
    # 1 - 0.1 * 1.500022888532845 * 0.777493660109077 * 0.547688197475211
    "radam, rectified": Step(
        "radam",
        {"lr": 0.1, "betas": (0.5, 0.75**0.5), "eps": 1.0},
        16,
        [1.0],
        [2.0],
        {"exp_avg": [1.0], "exp_avg_sq": [0.0]},
        [0.9361254101630755],
        {"exp_avg": [1.5], "exp_avg_sq": [4 - 2 * 3**0.5]},
    ),
    # 1 * (1 - 0.5 * 0.2) - 0.2 * 2 = 0.5; ax = 0.1 + 0.5 * 0.4 = 0.3; eta = 0.2 / sqrt(1 + 0.5 * 0.2 * 30); mu = 1 / (30 - 20)
    "asgd": Step(
        "asgd",
        {"lr": 0.2, "lambd": 0.5, "alpha": 0.5, "t0": 20.0},
        30,
        [1.0],
        [2.0],
        {"eta": 0.2, "mu": 0.5, "ax": [0.1]},
        [0.5],
        {"eta": 0.1, "mu": 0.1, "ax": [0.3]},
    ),
    # same sign: 0.1 * 1.2; turned: 0.1 * 0.5 and no step; zero: 0.1; at the end of the range: 0.15 * 1.2 is cut to 0.16
    "rprop": Step(
        "rprop",
        {"etas": (0.5, 1.2), "step_sizes": (0.01, 0.16)},
        2,
        [1.0, 1.0, 1.0, 1.0],
        [2.0, 2.0, -2.0, 2.0],
        {"prev": [1.0, -1.0, 0.0, 3.0], "step_size": [0.1, 0.1, 0.1, 0.15]},
        [0.88, 1.0, 1.1, 0.84],
        {"prev": [2.0, 0.0, -2.0, 2.0], "step_size": [0.12, 0.05, 0.1, 0.16]},
    ),
    # c = 0.5 * -3 + 0.5 * 2 = -0.5; 1 - 0.1 * (-1 + 0.5 * 1); m = 0.75 * -3 + 0.25 * 2
    "lion": Step(
        "lion",
        {"lr": 0.1, "betas": (0.5, 0.75), "weight_decay": 0.5},
        2,
        [1.0],
        [2.0],
        {"exp_avg": [-3.0]},
        [1.05],
        {"exp_avg": [-1.75]},
    ),
    # half of the mean squares (2, 2) of rows and columns: 1 each; v = 1 * 1 / 1, so u = g, its rms sqrt(8 / 4);
    # alpha = max(0.001, 1) * min(0.1, 1 / sqrt(2)); 1 - 0.1 * 2 / sqrt(2) on the diagonal
    "adafactor": Step(
        "adafactor",
        {"lr": 0.1, "beta2_decay": -1.0},
        2,
        [[1.0, 1.0], [1.0, 1.0]],
        [[2.0, 0.0], [0.0, 2.0]],
        {"row_var": [[0.0], [0.0]], "col_var": [[0.0, 0.0]]},
        [[1 - 0.1 * ROOT2, 1.0], [1.0, 1 - 0.1 * ROOT2]],
        {"row_var": [[1.0], [1.0]], "col_var": [[1.0, 1.0]]},
    ),
    # v = g^2, u = (1, -1), rms 1; alpha = rms (7, 1) = 5 times 0.1; (7, 1) * (1 - 0.1 * 0.5) less 0.5 (1, -1)
    "adafactor of a vector": Step(
        "adafactor",
        {"lr": 0.1, "weight_decay": 0.5},
        1,
        [7.0, 1.0],
        [3.0, -4.0],
        {"variance": [0.0, 0.0]},
        [6.15, 1.45],
        {"variance": [9.0, 16.0]},
    ),
    # B = g / 2 = diag(1.5, 2); half g, half B: diag(2.25, 3), over its norm 3.75: diag(0.6, 0.8); 2 x - x^3: 0.984, 1.088;
    # 1 - 0.05 - 0.1 * that
    "muon": Step(
        "muon",
        {"lr": 0.1, "weight_decay": 0.5, "momentum": 0.5, "ns_coefficients": (2.0, -1.0, 0.0), "ns_steps": 1},
        1,
        [[1.0, 0.0], [0.0, 1.0]],
        [[3.0, 0.0], [0.0, 4.0]],
        {"momentum_buffer": [[0.0, 0.0], [0.0, 0.0]]},
        [[0.8516, 0.0], [0.0, 0.8412]],
        {"momentum_buffer": [[1.5, 0.0], [0.0, 2.0]]},
    ),
    # as adam, r = 2 / 5 = 0.4 for both, plus 0.1 * (3, 4) = (0.7, 0.8); |theta| = 5, |r| = sqrt(1.13);
    # theta - 0.1 * 5 / sqrt(1.13) * r
    "lamb": Step(
        "lamb",
        {**HALF, "weight_decay": 0.1},
        2,
        [3.0, 4.0],
        [2.0, 2.0],
        {"exp_avg": [1.0, 1.0], "exp_avg_sq": [8.0, 8.0]},
        [3 - 0.35 / 1.13**0.5, 4 - 0.4 / 1.13**0.5],
        {"exp_avg": [1.5, 1.5], "exp_avg_sq": [7.0, 7.0]},
    ),
    # nothing to trust: theta = 0 takes the step as it is, 0 - 0.1 * 0.4
    "lamb from zero": Step(
        "lamb",
        HALF,
        2,
        [0.0],
        [2.0],
        {"exp_avg": [1.0], "exp_avg_sq": [8.0]},
        [-0.04],
        {"exp_avg": [1.5], "exp_avg_sq": [7.0]},
    ),
}


def tensor(value: Any) -> Any:
    """Return lists as float64 tensors, numbers as they are."""
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, list) else value


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_as_worked_out_by_hand(name: str) -> None:
    step = STEPS[name]
    rule = textbook.rule(step.rule)
    tensors = Arithmetic.of(torch.float64)
    scalars = Arithmetic.of(torch.float64, scalar=True)

    def operand(value: Any) -> Operand:
        return tensors.exact(tensor(value)) if isinstance(value, list) else scalars.exact(value)

    hyper = rule.hyper(**step.hyper)
    state = {key: tensor(value) for key, value in step.state.items()}
    plain, new_state = rule.step(tensor(step.param), tensor(step.grad), state, hyper, step.t)
    with_bound, bounded_state = rule.step(
        operand(step.param),
        operand(step.grad),
        {key: operand(value) for key, value in step.state.items()},
        {**hyper, **({"eps": (2.0**-52, 1e-3)} if step.rule == "adafactor" else {})},
        operand(step.t),
    )
    assert set(new_state) - {"step"} == set(step.new_state)
    for found, bounded, by_hand in (
        (plain, with_bound, step.new_param),
        *((new_state[key], bounded_state[key], value) for key, value in step.new_state.items()),
    ):
        want = torch.as_tensor(tensor(by_hand), dtype=torch.float64)
        # The numbers by hand are rounded too, each once or twice: the bound of the step's own roundings has room for that.
        bound = bounded.bound if bool(bounded.bound.isfinite().all()) else torch.full_like(want, 2.0**-48)
        assert bool(((torch.as_tensor(found, dtype=torch.float64) - want).abs() <= bound).all()), (found, want)
        assert bool(((bounded.value - want).abs() <= bound).all())


def test_every_rule_is_worked_out_at_least_once() -> None:
    assert {step.rule for step in STEPS.values()} == set(textbook.RULES)


@pytest.mark.parametrize("name", sorted(textbook.RULES))
def test_the_state_before_the_first_step_is_zero_but_for_what_the_rule_says(name: str) -> None:
    rule = textbook.rule(name)
    param = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    state = rule.init(param, rule.hyper())
    exceptions = {"mu_product": 1.0, "eta": 1e-2, "mu": 1.0, "step_size": 1e-2}
    for key, value in state.items():
        want = exceptions.get(key, 0.0)
        assert bool((torch.as_tensor(value) == want).all()), key
        assert not isinstance(value, Tensor) or value.dtype == torch.float64
