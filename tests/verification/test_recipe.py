"""Finding, importing and checking what is verified."""

import pickle
import subprocess
import sys
import types

import pytest
import torch

from truestep.verification import recipe as recipes
from truestep.verification.recipe import GIVEN_BY_NAME, PIECES, Recipe, load, optimizer_factory
from truestep.words.errors import UnsupportedError, VerifyError

WHOLE = """
import torch
def model(): return torch.nn.Linear(3, 2)
def optimizer(named_params): return torch.optim.SGD([p for _, p in named_params], lr=0.5)
def batches(dp_rank, dp_size): yield torch.ones(1, 3)
def loss(model, batch): return model(batch).mean()
"""


def model():
    return torch.nn.Linear(5, 3)


def batches(dp_rank, dp_size):
    yield torch.ones(1, 5)


def loss(model, batch):
    return model(batch).mean()


class ByClass:
    """A recipe as a class with a setting."""

    max_norm = 2.0

    def model(self):
        return model()

    def batches(self, dp_rank, dp_size):
        return batches(dp_rank, dp_size)

    def loss(self, model, batch):
        return loss(model, batch)


BY_INSTANCE = ByClass()


def by_function():
    return ByClass()


def written(folder, text=WHOLE, name="mine.py"):
    path = folder / name
    path.write_text(text)
    return path


# -- where recipes come from


def test_a_file_is_loaded_relative_to_the_current_folder(tmp_path, monkeypatch):
    written(tmp_path)
    monkeypatch.chdir(tmp_path)
    recipe = load("mine.py")
    assert (recipe.name, recipe.source) == ("mine", str(tmp_path / "mine.py"))
    assert tuple(recipe.model().weight.shape) == (2, 3)
    assert recipe.optimizer is recipe.module.optimizer


def test_a_file_may_import_its_neighbours_and_leaves_the_path_as_it_was(tmp_path):
    written(tmp_path, "SIZE = 7", "neighbour_of_mine.py")
    path = written(tmp_path, WHOLE + "from neighbour_of_mine import SIZE\nmax_norm = SIZE\n")
    before = list(sys.path)
    assert load(path).max_norm == 7
    assert sys.path == before


def test_a_file_does_not_take_the_place_of_a_module_of_its_name(tmp_path):
    written(tmp_path, name="json.py")
    import json

    assert load(str(tmp_path / "json.py")).module is not json
    assert sys.modules["json"] is json


def test_modules_and_objects_are_loaded_by_name(tmp_path, monkeypatch):
    written(tmp_path, WHOLE + "class Inner:\n    pass\nInner.recipe = __import__('sys').modules[__name__]\n", "found_by_name.py")
    monkeypatch.chdir(tmp_path)
    assert load("found_by_name").spec == "found_by_name"
    assert load("found_by_name:Inner.recipe").model().in_features == 3
    assert load("found_by_name.py:Inner.recipe").spec == f"{tmp_path / 'found_by_name.py'}:Inner.recipe"


@pytest.mark.parametrize("given", [ByClass, BY_INSTANCE, by_function])
def test_python_objects_are_recipes_and_other_processes_can_load_them(given):
    recipe = load(given)
    again = pickle.loads(pickle.dumps(recipe))
    for one in (recipe, again):
        assert (one.max_norm, one.optimizer, one.spec) == (2.0, None, recipe.spec)
        assert one.model().in_features == 5
    assert recipe.spec.startswith(f"{__file__}:")


def test_a_module_object_is_a_recipe():
    recipe = load(sys.modules[__name__])
    assert recipe.spec == __file__
    assert recipe.model is model


def test_a_recipe_made_by_hand_is_found_again_where_it_is_bound(monkeypatch):
    made = Recipe(model, None, batches, loss, name="by hand")
    monkeypatch.setitem(globals(), "MADE", made)
    assert load(made).spec == f"{__file__}:MADE"


def test_an_object_that_no_module_holds_can_be_used_but_not_sent():
    recipe = load(types.SimpleNamespace(model=model, batches=batches, loss=loss))
    assert recipe.model().out_features == 3
    with pytest.raises(VerifyError, match="top level"):
        pickle.dumps(recipe)


def test_a_recipe_of_a_script_is_sent_by_its_path(tmp_path):
    script = written(
        tmp_path,
        WHOLE
        + "if __name__ == '__main__':\n    import sys\n    from truestep.verification.recipe import load\n"
        + "    print(load(sys.modules['__main__']).spec)\n",
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(script)


# -- what is wrong with them


def complaint(spec):
    with pytest.raises(VerifyError) as caught:
        load(spec)
    return str(caught.value)


def test_an_unknown_name_lists_what_is_near():
    message = complaint("byte-gpt")
    assert "there is no recipe 'byte-gpt'. Did you mean bytes-gpt" in message
    assert "MODULE:OBJECT" in message


def test_a_file_that_is_not_there_is_named(tmp_path):
    assert f"there is no file {tmp_path / 'none.py'}" in complaint(str(tmp_path / "none.py"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n\nnonsense\n", r"NameError: name 'nonsense' is not defined ({path}, line 3)"),
        ("\ndef f(:\n", r"SyntaxError: invalid syntax ({path}, line 2)"),
        ("import sys\nsys.exit(4)\n", r"SystemExit: 4 ({path}, line 2)"),
        ("import absent_vendor\n", r"ModuleNotFoundError: No module named 'absent_vendor' ({path}, line 1)"),
        ("import torch\ntorch.zeros(2).view(3)\n", r"({path}, line 2)"),
    ],
)
def test_a_file_that_fails_to_import_is_told_with_the_line(tmp_path, text, said):
    path = written(tmp_path, text)
    message = complaint(path)
    assert said.format(path=path) in message
    assert message.startswith(f"recipe {path} cannot be imported: ")
    assert "Traceback" not in message


def test_a_module_that_raises_is_not_called_absent(tmp_path, monkeypatch):
    written(tmp_path, "raise ValueError('of its own')", "raises_at_import.py")
    monkeypatch.chdir(tmp_path)
    assert "recipe raises_at_import cannot be imported: ValueError: of its own" in complaint("raises_at_import")


@pytest.mark.parametrize("piece", ["model", "batches", "loss"])
def test_a_missing_piece_is_named_with_its_signature(tmp_path, piece):
    path = written(tmp_path, WHOLE + f"del {piece}\n")
    assert complaint(path) == f"recipe 'mine' lacks {piece}({', '.join(PIECES[piece])}). Define it there."


def test_all_missing_pieces_are_named_at_once(tmp_path):
    said = "lacks model() and batches(dp_rank, dp_size) and loss(model, batch). Define them there."
    assert said in complaint(written(tmp_path, "x = 1"))


@pytest.mark.parametrize("piece", sorted(PIECES))
def test_a_piece_that_takes_other_arguments_is_named(tmp_path, piece):
    path = written(tmp_path, WHOLE + f"def {piece}(one, two, three, four, five): pass\n")
    expected = f"expected {piece}({', '.join(PIECES[piece])}), found {piece}(one, two, three, four, five)"
    assert expected in complaint(path)


@pytest.mark.parametrize("piece", sorted(PIECES))
def test_a_piece_that_is_no_function_is_named(tmp_path, piece):
    assert f"expected {piece}({', '.join(PIECES[piece])}), found a int" in complaint(written(tmp_path, WHOLE + f"{piece} = 3\n"))


@pytest.mark.parametrize("line", ["max_norm = -1", "max_norm = 'a'", "reduction = 'median'", "deepspeed_config = 4"])
def test_a_wrong_value_is_named(tmp_path, line):
    name = line.partition(" ")[0]
    assert f"recipe 'mine': expected {name} to be " in complaint(written(tmp_path, WHOLE + line))


def test_an_object_that_is_not_there_lists_what_is_near(tmp_path):
    path = written(tmp_path, WHOLE + "best_recipe = None\n")
    assert "has no 'best_recip'. Did you mean best_recipe?" in complaint(f"{path}:best_recip")


def test_a_function_that_fails_to_make_a_recipe_is_told_with_the_line(tmp_path, monkeypatch):
    path = written(tmp_path, "def make():\n    raise RuntimeError('no data')\n")
    monkeypatch.chdir(tmp_path)
    assert f"recipe 'mine' cannot be made: RuntimeError: no data ({path}, line 2)" in complaint(f"{path}:make")


# -- train_step


def test_a_train_step_gets_by_name_what_it_asks_for(tmp_path):
    text = WHOLE + "def train_step(model, optimizer, batches, scheduler, *, accelerator, log=None): pass\n"
    recipe = load(written(tmp_path, text))
    assert recipe.asks_for == ("scheduler", "accelerator")
    assert set(recipe.asks_for) <= set(GIVEN_BY_NAME)


@pytest.mark.parametrize("arguments", ["model, optimizer, batches, unknown", "model, accelerator, batches", "model, optimizer"])
def test_a_train_step_that_cannot_be_called_is_refused(tmp_path, arguments):
    path = written(tmp_path, WHOLE + f"def train_step({arguments}): pass\n")
    assert f"found train_step({arguments})" in complaint(path)


# -- optimizers


@pytest.mark.parametrize(
    ("name", "made"), [("adamw", torch.optim.AdamW), ("Adagrad", torch.optim.Adagrad), ("SGD", torch.optim.SGD)]
)
def test_a_class_of_torch_is_found_in_any_case(name, made):
    linear = torch.nn.Linear(5, 3)
    optimizer = optimizer_factory(name)(linear.named_parameters())
    assert type(optimizer) is made
    assert [id(param) for param in optimizer.param_groups[0]["params"]] == [id(param) for param in linear.parameters()]


def test_every_optimizer_class_of_torch_is_known():
    names = [name for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name), type) and name != "Optimizer"]
    assert len(names) > 10
    for name in names:
        assert callable(optimizer_factory(name.lower()))


def test_a_class_or_a_function_is_found_by_its_module(tmp_path):
    text = WHOLE + "class Mine(torch.optim.SGD): pass\ndef two(named_params): return [Mine([p]) for _, p in named_params]\n"
    path = written(tmp_path, text)
    linear = torch.nn.Linear(5, 3)
    assert type(optimizer_factory(f"{path}:Mine")(linear.named_parameters())).__name__ == "Mine"
    assert len(optimizer_factory(f"{path}:two")(linear.named_parameters())) == 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("adamv", "there is no optimizer 'adamv'. Did you mean Adam"),
        ("torch.optim:AdamV", "torch.optim has no 'AdamV'. Did you mean Adam"),
        ("torch:float32", "expected an Optimizer class or a function of named_params, found a dtype"),
        ("absent_package:Adam", "there is no optimizer 'absent_package:Adam'"),
        ("", "there is no optimizer ''"),
    ],
)
def test_an_optimizer_that_is_not_there_lists_what_is_near(name, said):
    with pytest.raises(UnsupportedError) as caught:
        optimizer_factory(name)
    assert said in str(caught.value)


def test_a_recipe_without_optimizer_needs_one_named():
    recipe = load(BY_INSTANCE)
    with pytest.raises(VerifyError, match="--optimizer"):
        recipe.optimizer_named(None)
    assert type(recipe.optimizer_named("sgd")(model().named_parameters())) is torch.optim.SGD


def test_every_piece_is_a_field_of_a_recipe():
    assert set(PIECES) | set(recipes._VALUES) <= set(Recipe.__dataclass_fields__)
