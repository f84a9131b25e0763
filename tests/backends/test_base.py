"""Finding the backend: by name, or by what the user holds; and one clear message where there is none."""

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import truestep as ts
from truestep.backends import base
from truestep.words.errors import UnsupportedError


@pytest.mark.parametrize("name", base.BACKENDS)
def test_every_row_names_a_module_that_wraps_recognises_and_attaches(name):
    row = base.BACKENDS[name]
    if row.vendor is not None:
        pytest.importorskip(row.vendor)
    module = __import__(f"truestep.backends.{row.module}", fromlist=["wrap"])
    assert all(callable(getattr(module, act)) for act in ("wrap", "recognises", "attach"))
    assert (row.vendor is None) == (row.extra is None)
    assert row.about


def test_an_unknown_backend_is_refused_with_the_names_of_all():
    with pytest.raises(UnsupportedError) as caught:
        base.row("fsdp3")
    assert "unknown backend 'fsdp3'" in str(caught.value)
    assert all(name in str(caught.value) for name in base.BACKENDS)


@pytest.mark.parametrize(
    ("name", "vendor"), [("zero2", "deepspeed"), ("accelerate-ddp", "accelerate"), ("accelerate-zero2", "deepspeed")]
)
def test_a_vendor_that_is_not_installed_is_named_with_its_extra(name, vendor, monkeypatch):
    there = base.importlib.util.find_spec
    monkeypatch.setattr(base.importlib.util, "find_spec", lambda module: None if module == vendor else there(module))
    with pytest.raises(UnsupportedError, match=rf"needs {vendor}.*truestep\[{vendor}\]"):
        base.wrap(name, nn.Linear(2, 3), lambda params: None, base.Settings())


@pytest.mark.parametrize(
    ("model", "optimizer", "told"),
    [
        (3, None, "int with no optimizer"),
        ("checkpoint", None, "str with no optimizer"),
        (nn.Linear, None, "the class Linear with"),
        ([], None, "a list of nothing with"),
        ({}, None, "a dict of nothing with"),
        ([nn.Linear(2, 3), "x"], None, "a list of Linear and str with"),
        ({"a": nn.Linear(2, 3), "b": 4}, None, "a dict of Linear and int with"),
        (nn.Linear(2, 3), "adam", "Linear with str"),
        (nn.Linear(2, 3), torch.optim.AdamW, "Linear with the class AdamW"),
        (nn.Linear(2, 3).parameters(), None, "generator with"),
    ],
)
def test_what_no_backend_knows_is_refused_in_one_message(model, optimizer, told):
    with pytest.raises(UnsupportedError) as caught:
        ts.inspect(model, optimizer)
    assert f"no backend knows {told}" in str(caught.value)
    assert "Pass what the training loop uses." in str(caught.value)


def test_a_model_alone_is_looked_at():
    module = nn.Linear(2, 3)
    view = ts.inspect(module)
    assert list(view) == [("weight", "param"), ("bias", "param")]
    assert (base.attach(module).optimizers, view.orphans) == ([], ())


def test_what_copies_or_flattens_params_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="DataParallel copies the model"):
        ts.inspect(nn.Sequential(nn.Linear(2, 3), nn.DataParallel(nn.Linear(3, 4))))


def test_vendors_that_nobody_imported_stay_out():
    program = textwrap.dedent("""
        import sys, torch, truestep as ts
        model = torch.nn.Linear(2, 3)
        ts.inspect(model, torch.optim.SGD(model.parameters(), lr=0.1))
        print([name for name in ("deepspeed", "accelerate") if name in sys.modules])
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
