"""Rounding is let through and faults are not: the sensitivity of a step, and the judge of an update."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from truestep.optimizers.replica import replica
from truestep.proof.update import ZERO_GRADIENT, Judgement, UlpNoise, judge, sensitivity

Slots = dict[tuple[str, str], Any]
SHAPES = {"embed": (9, 4), "weight": (17, 6), "bias": (11,)}
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def ulps_apart(a: Tensor, b: Tensor) -> list[int]:
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[a.element_size()]
    return (a.view(bits).long() - b.view(bits).long()).abs().unique().tolist()


# -- noise


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_result_moves_by_one_ulp_up_or_down_or_not_at_all(dtype: torch.dtype) -> None:
    a, b = (torch.arange(1, 400, dtype=torch.float32).to(dtype) / 7 for _ in range(2))
    with UlpNoise(1):
        moved = a * b
    assert ulps_apart(moved, a * b) == [0, 1]
    above = (moved.double() > (a * b).double()).sum()
    below = (moved.double() < (a * b).double()).sum()
    assert 80 < above < 190
    assert 80 < below < 190


def test_what_is_changed_in_place_moves_too_in_lists_and_through_views() -> None:
    whole = torch.full((6, 50), 0.3)
    others = [torch.full((40,), 0.7), torch.full((3, 30), 1.3)]
    with UlpNoise(2):
        whole[2:4].mul_(3.0)
        torch._foreach_add_(others, 1.0)
    assert ulps_apart(whole[2:4], torch.full((2, 50), 0.3) * 3.0) == [0, 1]
    assert ulps_apart(others[0], torch.full((40,), 0.7) + 1.0) == [0, 1]
    assert ulps_apart(others[1], torch.full((3, 30), 1.3) + 1.0) == [0, 1]
    assert torch.equal(whole[:2], torch.full((2, 50), 0.3))


def test_inputs_views_copies_zeros_integers_and_what_is_not_finite_stay() -> None:
    a = torch.tensor([0.0, math.inf, -math.inf, math.nan, 0.3])
    kept, whole, step = a.clone(), torch.tensor([5, 7]), torch.tensor(3.0)
    with UlpNoise(3):
        product = a * 1.0
        view, copied, total = a[1:], a.clone(), whole * 3
        step += 1
        largest = torch.finfo(torch.float32).max * torch.ones(30)
    assert torch.equal(product[:4].nan_to_num(7.0), a[:4].nan_to_num(7.0))
    assert torch.equal(a.nan_to_num(7.0), kept.nan_to_num(7.0))
    assert view.data_ptr() == a[1:].data_ptr()
    assert torch.equal(copied.nan_to_num(7.0), kept.nan_to_num(7.0))
    assert total.tolist() == [15, 21]
    assert step == 4
    assert largest.isfinite().all()


def test_a_cast_moves_only_where_it_rounds() -> None:
    wide = torch.linspace(0.1, 3.0, 200)
    with UlpNoise(4):
        narrow = wide.bfloat16()
        back = narrow.float()
    assert ulps_apart(narrow, wide.bfloat16()) == [0, 1]
    assert torch.equal(back, narrow.float())


def test_sparse_values_and_complex_parts_move() -> None:
    sparse = torch.sparse_coo_tensor(torch.arange(60)[None], torch.full((60,), 0.3), (99,), check_invariants=True)
    turned = torch.full((70,), 0.3 + 0.7j)
    with UlpNoise(5):
        scaled = sparse * 1.1
        turned = turned * 1.1
    assert ulps_apart(scaled.coalesce().values(), torch.full((60,), 0.3) * 1.1) == [0, 1]
    assert (turned != torch.full((70,), 0.3 + 0.7j) * 1.1).any()


def test_noise_is_its_seed_s_and_leaves_the_global_generator_alone() -> None:
    a = torch.linspace(0.1, 2.0, 64)
    state = torch.random.get_rng_state()

    def moved(seed: int) -> Tensor:
        with UlpNoise(seed):
            return a.exp()

    assert torch.equal(moved(6), moved(6))
    assert not torch.equal(moved(6), moved(7))
    assert torch.equal(torch.random.get_rng_state(), state)


# -- a step to judge


class Training:
    """Params with a state after two steps, and the gradient of the third."""

    def __init__(self, make: Callable[[list[Any]], torch.optim.Optimizer], absent: str = "") -> None:
        generator = torch.Generator().manual_seed(3)
        self.params = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}
        self.optimizer = make(list(self.params.values()))
        for step in range(3):
            self.gradients = {name: torch.randn(shape, generator=generator) * 10.0**step for name, shape in SHAPES.items()}
            self.gradients.pop(absent, None)
            if step < 2:
                for name, param in self.params.items():
                    param.grad = self.gradients.get(name)
                self.optimizer.step()

    def slots(self, optimizer: torch.optim.Optimizer, params: dict[str, Any]) -> Slots:
        return {
            slot: value
            for name, param in params.items()
            for slot, value in [
                ((name, "param"), param),
                *(((name, key), value) for key, value in optimizer.state.get(param, {}).items()),
            ]
        }

    @property
    def old(self) -> Slots:
        return self.slots(self.optimizer, self.params)

    def step(self, change: Callable[[str, Tensor], Tensor] = lambda _, gradient: gradient, **settings: Any) -> Slots:
        plain: dict[Tensor, Tensor] = {param: param.detach().clone() for param in self.params.values()}
        stepping = replica(self.optimizer, plain)
        for group in stepping.param_groups:
            group.update(settings)
        for name, param in self.params.items():
            if name in self.gradients:
                plain[param].grad = change(name, self.gradients[name].clone())
        stepping.step()
        return self.slots(stepping, {name: plain[param] for name, param in self.params.items()})


def verdicts(judged: list[Judgement]) -> set[str]:
    return {judgement.verdict for judgement in judged}


def adamw(params: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, foreach=False)


MAKERS: list[Callable[[list[Any]], torch.optim.Optimizer]] = [
    adamw,
    lambda params: torch.optim.Adagrad(params, lr=0.1, foreach=False),
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
]


@pytest.mark.parametrize("make", MAKERS)
def test_the_same_step_is_bitwise_and_another_kernel_s_within_the_step_s_own_sensitivity(make: Any) -> None:
    training = Training(make)
    expected, moves = training.step(), sensitivity(training.step)
    assert verdicts(judge(training.step(), expected, old=training.old)) == {"bitwise"}
    judged = judge(training.step(fused=True), expected, old=training.old, moves=moves)
    assert verdicts(judged) <= {"bitwise", "within"}
    assert all(judgement.ratio <= 1 for judgement in judged)


class ProductsInHalves(TorchDispatchMode):
    """Sums each matrix product as two ranks would: half of the terms each, the halves added in the product's own dtype."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            return func(*args, **kwargs)
        *added, a, b = args
        half = a.shape[1] // 2
        product = a[:, :half] @ b[:half] + a[:, half:] @ b[half:]
        return added[0] * kwargs.get("beta", 1) + product * kwargs.get("alpha", 1) if added else product


@pytest.mark.parametrize("seed", range(4))
def test_a_muon_step_whose_products_are_summed_in_halves_is_within_its_sensitivity_and_one_of_another_gradient_is_not(
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    param = nn.Parameter(torch.randn(32, 20, generator=generator))
    gradient = torch.randn(32, 20, generator=generator)
    optimizer = torch.optim.Muon([param], lr=0.02)

    def step(change: float = 0.0) -> Slots:
        plain = param.detach().clone()
        stepping = replica(optimizer, {param: plain})
        plain.grad = gradient.clone()
        plain.grad[0, 0] += change
        stepping.step()
        return {("w", "param"): plain}

    moves = sensitivity(step)
    with ProductsInHalves():
        halves = step()
    [in_halves] = judge(halves, step(), moves=moves)
    [other_gradient] = judge(step(change=5.0), step(), moves=moves)
    assert in_halves.verdict == "within"
    assert in_halves.distance > 1e-4
    assert other_gradient.verdict == "differs"


@pytest.mark.parametrize("make", MAKERS)
def test_a_gradient_that_is_off_by_a_thousandth_differs(make: Any) -> None:
    training = Training(make)
    expected, moves = training.step(), sensitivity(training.step)
    found = training.step(lambda name, gradient: gradient * (1.001 if name == "bias" else 1.0))
    judged = {j.slot: j.verdict for j in judge(found, expected, old=training.old, moves=moves)}
    assert {slot for slot, verdict in judged.items() if verdict == "differs"} >= {s for s in judged if s == ("bias", "param")}
    assert {verdict for (name, _), verdict in judged.items() if name != "bias"} == {"bitwise"}


def test_a_moment_fed_with_another_gradient_differs_at_its_slot_alone() -> None:
    training = Training(MAKERS[1])
    expected, moves = training.step(), sensitivity(training.step)
    found = training.step()
    found["weight", "sum"] = found["weight", "sum"] + 3 * training.gradients["weight"] ** 2
    judged = {j.slot: j for j in judge(found, expected, old=training.old, moves=moves)}
    assert [slot for slot, judgement in judged.items() if judgement.verdict == "differs"] == [("weight", "sum")]
    assert judged["weight", "sum"].ratio > 100


def test_counters_are_exact_though_the_step_is_sensitive() -> None:
    training = Training(adamw)
    expected, found = training.step(), training.step()
    found["bias", "step"] = found["bias", "step"] + 1
    judged = {j.slot: j for j in judge(found, expected, old=training.old, moves=dict.fromkeys(expected, 1e9))}
    assert judged["bias", "step"] == Judgement(("bias", "step"), "differs", math.inf, 1.0, "a counter")


def test_numbers_integers_and_kinds_are_judged_too() -> None:
    w = "w"
    old: Slots = {(w, "k"): 4, (w, "d"): 0.5, (w, "n"): torch.tensor([1, 2])}
    expected: Slots = {(w, "k"): 5, (w, "d"): 0.25, (w, "n"): torch.tensor([2, 2]), (w, "mode"): "a", (w, "half"): torch.ones(2)}
    assert verdicts(judge(dict(expected), expected, old=old)) == {"bitwise"}
    found: Slots = {
        (w, "k"): 6,
        (w, "d"): 0.2500001,
        (w, "n"): torch.tensor([3, 2]),
        (w, "mode"): "b",
        (w, "half"): torch.ones(2).bfloat16(),
    }
    judged = {j.slot[1]: j for j in judge(found, expected, old=old, moves={(w, "d"): 1e-6, (w, "n"): 9.0})}
    assert {key for key, j in judged.items() if j.verdict == "differs"} == {"k", "n", "mode", "half"}
    assert judged["d"].verdict == "within"
    assert judged["d"].ratio == pytest.approx(0.05, rel=1e-3)
    assert judged["half"].why == "torch.bfloat16, expected torch.float32"
    assert judged["mode"].why == "'b', expected 'a'"


def test_absent_is_not_zero() -> None:
    zeros = torch.zeros(3)
    judged = judge({("w", "b"): zeros}, {("w", "a"): zeros})
    assert [(j.slot[1], j.verdict, j.why) for j in judged] == [
        ("a", "differs", "absent, expected present"),
        ("b", "differs", "present, expected absent"),
    ]


@pytest.mark.parametrize(("decay", "verdict"), [(0.0, "harmless"), (0.1, "differs")])
def test_an_absent_gradient_taken_for_zero_is_harmless_only_where_no_param_moves(decay: float, verdict: str) -> None:
    training = Training(lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=decay), absent="embed")
    expected = training.step()
    training.gradients["embed"] = torch.zeros(SHAPES["embed"])
    found = training.step()
    judged = judge(found, expected, old=training.old, moves=sensitivity(training.step), without_gradient=["embed"])
    apart = [j for j in judged if j.verdict != "bitwise"]
    assert {j.slot[0] for j in apart} == {"embed"}
    assert {j.verdict for j in apart} == {verdict}
    assert {j.why for j in apart} == {ZERO_GRADIENT}


def test_a_counter_that_a_zero_gradient_raised_is_harmless_and_one_raised_twice_is_not() -> None:
    slot = ("w", "step")
    for raised, verdict in [(4.0, "harmless"), (5.0, "differs")]:
        judged = judge({slot: torch.tensor(raised)}, {slot: torch.tensor(3.0)}, without_gradient={"w"})
        assert [j.verdict for j in judged] == [verdict]


def test_not_a_number_where_the_replica_has_it_too_is_no_difference_and_elsewhere_is() -> None:
    slot = ("w", "param")
    theirs = torch.tensor([math.nan, math.inf, 1.0])
    mine = torch.tensor([math.nan, math.inf, 1.0 + 1e-6])
    assert verdicts(judge({slot: mine}, {slot: theirs}, moves={slot: 1e-6})) == {"within"}
    assert verdicts(judge({slot: torch.tensor([1.0, math.inf, 1.0])}, {slot: theirs}, moves={slot: 1e9})) == {"differs"}


def test_a_step_that_writes_to_the_same_memory_each_time_is_no_trouble() -> None:
    memory = torch.full((50,), 0.3)

    def step() -> Slots:
        memory.fill_(0.3)
        memory.mul_(1.7)
        return {("w", "param"): memory}

    ulp = 2.0**-24 * 1.0
    assert 0 < sensitivity(step)["w", "param"] <= ulp * math.sqrt(50)


def test_a_step_that_rounds_nothing_is_not_sensitive() -> None:
    old = torch.linspace(0.1, 1.0, 30)
    assert sensitivity(lambda: {("w", "param"): old.clone().neg_(), ("w", "step"): 3}) == {
        ("w", "param"): 0.0,
        ("w", "step"): 0.0,
    }
