"""What is known of the classes of torch.optim, pytorch-optimizer, schedulefree and lion-pytorch, the probe finds."""

from __future__ import annotations

import importlib

import pytest

from truestep.optimizers.probe import probe
from truestep.words.scope import Scope

ELEMENT, TENSOR, GROUP, MODEL, COLUMN = (
    one.value for one in (Scope.ELEMENT, Scope.TENSOR, Scope.GROUP, Scope.MODEL, Scope.COLUMN)
)
ELEMENTWISE = {
    "torch.optim": "SGD Adam AdamW Adagrad Adadelta Adamax NAdam RAdam RMSprop ASGD Rprop",
    "pytorch_optimizer": "Lion Tiger AdEMAMix MADGRAD AdamG",  # the last two round differently in pieces
    "schedulefree": "AdamWScheduleFree SGDScheduleFree",
    "lion_pytorch": "Lion",
}
FLAT_AND_WIDE = {"first.bias": (13,), "first.weight": (7, 4), "second.weight": (4, 9), "second.bias": (5,)}
# The scope overall, in 2 dims and in 1 dim.
WIDER = {
    "torch.optim:Adafactor": (TENSOR, TENSOR, TENSOR),
    "pytorch_optimizer:TAM": (TENSOR, COLUMN, TENSOR),
    "pytorch_optimizer:AdaTAM": (TENSOR, COLUMN, TENSOR),
    "pytorch_optimizer:LARS": (TENSOR, TENSOR, ELEMENT),
    "pytorch_optimizer:SOAP": (TENSOR, TENSOR, ELEMENT),
    "pytorch_optimizer:AdamP": (TENSOR, TENSOR, ELEMENT),
    "pytorch_optimizer:SM3": (TENSOR, TENSOR, ELEMENT),
    "pytorch_optimizer:Lamb": (TENSOR, TENSOR, TENSOR),
    "pytorch_optimizer:Shampoo": (TENSOR, TENSOR, TENSOR),
    "pytorch_optimizer:CAME": (TENSOR, TENSOR, TENSOR),
    "pytorch_optimizer:NovoGrad": (TENSOR, TENSOR, TENSOR),
    "pytorch_optimizer:AvaGrad": (GROUP, GROUP, GROUP),
    "pytorch_optimizer:Adai": (MODEL, MODEL, MODEL),
    "pytorch_optimizer:Prodigy": (MODEL, MODEL, MODEL),
    "pytorch_optimizer:DAdaptAdam": (MODEL, MODEL, MODEL),
    "pytorch_optimizer:DAdaptAdaGrad": (MODEL, MODEL, MODEL),
    "pytorch_optimizer:DAdaptAdan": (MODEL, MODEL, MODEL),
    "pytorch_optimizer:DAdaptLion": (MODEL, MODEL, MODEL),
    "pytorch_optimizer:DAdaptSGD": (MODEL, MODEL, MODEL),
}


def class_of(package: str, name: str) -> type:
    return getattr(pytest.importorskip(package), name)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure anew, whatever is remembered on this machine."""
    monkeypatch.setenv("TRUESTEP_CACHE", "off")


@pytest.mark.parametrize(
    ("package", "name"), [(package, name) for package, names in ELEMENTWISE.items() for name in names.split()]
)
def test_an_element_wise_class_is_found_so_in_every_number_of_dims(package: str, name: str) -> None:
    found = probe(class_of(package, name))
    assert (found.scope, set(found.scope_by_ndim)) == (ELEMENT, {0, 1, 2, 4})
    assert not found.shape_sensitive


@pytest.mark.parametrize("where", WIDER)
def test_a_wider_class_is_found_as_wide_as_it_is(where: str) -> None:
    found = probe(class_of(*where.split(":")), params=FLAT_AND_WIDE)
    assert (found.scope, found.scope_by_ndim[2], found.scope_by_ndim[1]) == WIDER[where]


@pytest.mark.parametrize("name", ["Kron", "Gravity"])
def test_classes_that_draw_are_found_to(name: str) -> None:
    assert probe(class_of("pytorch_optimizer", name), params="2d").draws


def test_scalable_shampoo_which_is_exact_for_a_thousand_steps_is_seen_through() -> None:
    found = probe(class_of("pytorch_optimizer", "ScalableShampoo"), params="2d")
    assert found.scope == TENSOR
    assert "preconditioning_compute_steps" in found.not_reached


@pytest.mark.parametrize("name", ["LOMO", "DistributedMuon", "SAM", "Ranger21", "AdaHessian", "Lookahead"])
def test_a_class_that_cannot_be_measured_says_why(name: str) -> None:
    found = probe(class_of("pytorch_optimizer", name))
    assert (found.checked, found.scope) == (False, MODEL)
    assert found.why


def test_a_wrapper_is_measured_in_a_function() -> None:
    lookahead = class_of("pytorch_optimizer", "Lookahead")
    adamw = importlib.import_module("torch.optim").AdamW
    assert probe(lambda named: lookahead(adamw([param for _, param in named]))).scope == ELEMENT
