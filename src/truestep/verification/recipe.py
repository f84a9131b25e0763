"""Recipes: what is verified. A model, its optimizer, its data and its loss, as a file, an object or a built-in name.

Loading imports the user's code, nothing is built yet. A recipe pickles as its `spec`, the text that loads it again: each rank
process does so by itself, and the user's functions never travel.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from truestep.verification.importing import failed, on_path, reference, resolve
from truestep.verification.recipes import BUILT_IN
from truestep.words.errors import TrueStepError, UnsupportedError, VerifyError

if TYPE_CHECKING:
    from torch import Tensor, nn

NamedParams: TypeAlias = "Iterable[tuple[str, nn.Parameter]]"
MakeOptimizer: TypeAlias = Callable[[Any], Any]  # named_params -> an optimizer, or a list of them
Reduction: TypeAlias = Literal["mean", "sum"]

# What a recipe may hold -> the arguments that it is called with. `optimizer` is needed too, unless the call names one.
PIECES: Final[Mapping[str, tuple[str, ...]]] = {
    "model": (),
    "optimizer": ("named_params",),
    "batches": ("dp_rank", "dp_size"),
    "loss": ("model", "batch"),
    "train_step": ("model", "optimizer", "batches"),
    "num_items": ("batch",),
    "scheduler": ("optimizer",),
    "reference_optimizer": ("named_params",),
    "wrap": ("model", "backend"),
}
NEEDED: Final = ("model", "batches", "loss")
GIVEN_BY_NAME: Final = ("accelerator", "scheduler", "scaler")  # what else a train_step may ask for
# The other entries -> what each may be, in words and as a test.
_VALUES: Final[Mapping[str, tuple[str, Callable[[Any], bool]]]] = {
    "max_norm": ("a number above 0", lambda value: value is None or (isinstance(value, (int, float)) and value > 0)),
    "reduction": ("'mean', 'sum' or None", lambda value: value in ("mean", "sum", None)),
    "deepspeed_config": ("a mapping", lambda value: isinstance(value, Mapping)),
}
_EXPECTED: Final = f"a built-in recipe ({', '.join(BUILT_IN)}), a .py file, FILE.py:OBJECT, MODULE or MODULE:OBJECT"


@dataclass(frozen=True, eq=False)
class Recipe:
    """What is verified. Made by `load`, which checks it; pickles as its `spec`.

    Attributes:
        model: ``() -> module``, whole and on the CPU, the same on every call; or a list of modules.
        optimizer: ``named_params -> optimizer``, or a list of them; None if the call names one.
        batches: ``(dp_rank, dp_size) -> iterable`` of this rank's micro-batches.
        loss: ``(model, batch) -> tensor``, 0-d.
        train_step: ``(model, optimizer, batches, ..) -> loss``: the user's own loop over one window, which is then what is
            judged. `batches` is the list of this rank's micro-batches.
        num_items: ``batch -> int``: how many items the loss of a micro-batch is over.
        max_norm: Global gradient norm to clip at.
        scheduler: ``optimizer -> scheduler``.
        reference_optimizer: What one process should run where `optimizer` is itself distributed.
        wrap: ``(model, backend) -> model``, instead of the backend's own wrapping.
        reduction: What the loss is over its own items: ``mean`` or ``sum``; None: found out by trying.
        deepspeed_config: Entries to merge over the DeepSpeed config of the backend.
        name: For people.
        source: The file or dotted name it came from.
        module: The module it came from.
        spec: The text that loads it again; empty where there is none.
    """

    model: Callable[[], Any]
    optimizer: MakeOptimizer | None
    batches: Callable[[int, int], Iterable[Any]]
    loss: Callable[[Any, Any], Tensor]
    train_step: Callable[..., Any] | None = None
    num_items: Callable[[Any], int] | None = None
    max_norm: float | None = None
    scheduler: Callable[[Any], Any] | None = None
    reference_optimizer: MakeOptimizer | None = None
    wrap: Callable[[Any, str], Any] | None = None
    reduction: Reduction | None = None
    deepspeed_config: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    source: str = ""
    module: ModuleType | None = None
    spec: str = ""

    def __reduce__(self) -> tuple[Callable[[str], Recipe], tuple[str]]:
        if not self.spec:
            raise VerifyError(
                f"recipe {self.name or 'without a name'!r} cannot be sent to rank processes: expected one that they can load by "
                "name, found an object that no module holds. Bind it to a name at the top level of its file, or give the file."
            )
        return load, (self.spec,)

    @contextmanager
    def importable(self) -> Iterator[None]:
        """Keep what lies beside it importable: for the imports that its functions make when they run."""
        with on_path(Path(self.source).parent if self.source.endswith(".py") else Path.cwd()):
            yield

    @property
    def asks_for(self) -> tuple[str, ...]:
        """What its `train_step` takes by name beyond model, optimizer and batches: some of `GIVEN_BY_NAME`."""
        if self.train_step is None:
            return ()
        return tuple(name for name in list(inspect.signature(self.train_step).parameters)[3:] if name in GIVEN_BY_NAME)

    def optimizer_named(self, name: str | None) -> MakeOptimizer:
        """Return ``named_params -> optimizer``: the one of this name, or with None the recipe's own.

        Raises:
            VerifyError: If none is named and the recipe has none.
            UnsupportedError: If there is none of this name.
        """
        if name is not None:
            return optimizer_factory(name)
        if self.optimizer is None:
            raise VerifyError(f"recipe {self.name!r} has no optimizer(named_params). Add it, or name one: --optimizer adamw.")
        return self.optimizer


def load(spec: object) -> Recipe:
    """Load a recipe and check that its pieces are there and can be called as they will be.

    Args:
        spec: A built-in name, with settings after a colon (``bytes-gpt:width=32,layers=1``); a path of a .py file, relative to
            the current folder; ``MODULE``, ``MODULE:OBJECT`` or ``FILE.py:OBJECT``; or an object with the attributes of a recipe:
            a module, an instance, a class made without arguments, a function that returns one of these, a Recipe.

    Raises:
        VerifyError: If it cannot be found or imported (with the line), or a piece is missing or takes other arguments.
    """
    if isinstance(spec, Recipe):
        return _checked(spec if spec.spec else replace(spec, spec=reference(spec)))
    if isinstance(spec, (str, os.PathLike)):
        text = os.fspath(spec)
        built_in, _, settings = str(text).partition(":")
        if built_in in BUILT_IN:
            return _checked(_sized(built_in, settings))
        module, found, again = resolve(str(text), "recipe", _EXPECTED, BUILT_IN, VerifyError)
        return _recipe(found, module, again)
    module_name = spec.__name__ if isinstance(spec, ModuleType) else getattr(spec, "__module__", None)
    return _recipe(spec, sys.modules.get(str(module_name)), reference(spec))


def optimizer_factory(name: str) -> MakeOptimizer:
    """Return ``named_params -> optimizer`` for a name.

    Args:
        name: A class of torch.optim in any case, with its default settings; or ``MODULE:OBJECT`` or ``FILE.py:OBJECT``, an
            Optimizer class or a function ``named_params -> optimizer`` (or a list of them).

    Raises:
        UnsupportedError: If there is none, with the names near it.
    """
    import torch  # Here, not above: reading a command line must not load it.

    classes = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    made: Any = classes.get(name.lower())  # Any: a class of its own signature, or what the user wrote
    if made is None:
        expected = "a class of torch.optim in any case, MODULE:OBJECT or FILE.py:OBJECT"
        known = [value.__name__ for value in classes.values()]
        _, made, _ = resolve(name, "optimizer", expected, known, UnsupportedError)
    if isinstance(made, type) and issubclass(made, torch.optim.Optimizer):
        return _of_class(name, made)
    if not callable(made) or (complaint := _misfit(made, ("named_params",))):
        found = complaint if callable(made) else f"a {type(made).__name__}"
        raise UnsupportedError(f"optimizer {name!r}: expected an Optimizer class or a function of named_params, found {found}.")
    make: MakeOptimizer = made
    return make


def _of_class(name: str, optimizer_class: Callable[..., Any]) -> MakeOptimizer:
    def make(named_params: NamedParams) -> Any:
        params = [param for _, param in named_params]
        try:
            return optimizer_class(params)
        except Exception as error:
            raise UnsupportedError(
                f"optimizer {name!r} cannot be made of these params with its default settings: {error}. Choose another, or write "
                "an optimizer(named_params) that gives it what it takes."
            ) from error

    return make


def _sized(built_in: str, settings: str) -> Recipe:
    module = importlib.import_module(f"truestep.verification.recipes.{BUILT_IN[built_in]}")
    values = {}
    for setting in filter(None, settings.split(",")):
        key, _, value = setting.partition("=")
        if key not in module.SIZES or not value.isdecimal():
            takes = f"SIZE=NUMBER, SIZE one of {' '.join(module.SIZES)}" if module.SIZES else "nothing after its name"
            raise VerifyError(f"recipe {built_in!r}: expected {takes}, found {setting!r}.")
        values[key] = int(value)
    recipe: Recipe = module.sized(**values)
    return replace(recipe, module=module)


def _recipe(found: Any, module: ModuleType | None, spec: str) -> Recipe:
    source = spec.partition(":")[0]
    name = (Path(source).stem if source.endswith(".py") else spec) or getattr(found, "__name__", type(found).__name__)
    if isinstance(found, type) or (inspect.isroutine(found) and not hasattr(found, "model")):
        found = _call(found, name)
    if isinstance(found, Recipe):
        return _checked(replace(found, spec=spec, name=found.name or name))
    missing = [f"{piece}({', '.join(PIECES[piece])})" for piece in NEEDED if getattr(found, piece, None) is None]
    if missing:
        raise VerifyError(f"recipe {name!r} lacks {' and '.join(missing)}. Define {'them' if missing[1:] else 'it'} there.")
    pieces: dict[str, Any] = {piece: getattr(found, piece, None) for piece in PIECES}
    values = {value: getattr(found, value) for value in _VALUES if hasattr(found, value)}
    return _checked(Recipe(**pieces, **values, name=name, source=source, module=module, spec=spec))


def _call(make: Callable[[], Any], name: str) -> Any:
    if complaint := _misfit(make, ()):
        raise VerifyError(f"recipe {name!r}: expected what takes no arguments, found {complaint}. Give what it makes.")
    try:
        return make()
    except TrueStepError:
        raise
    except Exception as error:
        raise VerifyError(failed(f"recipe {name!r} cannot be made", error, Path.cwd())) from error


def _checked(recipe: Recipe) -> Recipe:
    for piece, arguments in PIECES.items():
        function = getattr(recipe, piece)
        if function is None and piece not in NEEDED:
            continue
        expected = f"recipe {recipe.name!r}: expected {piece}({', '.join(arguments)})"
        if not callable(function):
            raise VerifyError(f"{expected}, found a {type(function).__name__}. Make {piece} a function.")
        if complaint := _misfit(function, arguments, GIVEN_BY_NAME if piece == "train_step" else ()):
            raise VerifyError(f"{expected}, found {complaint}. Change what it takes.")
    for value, (right, is_right) in _VALUES.items():
        if not is_right(getattr(recipe, value)):
            raise VerifyError(f"recipe {recipe.name!r}: expected {value} to be {right}, found {getattr(recipe, value)!r}.")
    return recipe


def _misfit(function: Callable[..., Any], arguments: Sequence[str], by_name: Sequence[str] = ()) -> str:
    """Return the function's signature in words if it cannot be called with these arguments, else nothing."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Some builtins tell no signature.
        return ""
    names = list(signature.parameters)
    found = f"{getattr(function, '__name__', type(function).__name__)}({', '.join(map(str, signature.parameters.values()))})"
    if set(names[: len(arguments)]) & set(by_name):
        return found
    try:
        signature.bind(*arguments, **{name: name for name in names[len(arguments) :] if name in by_name})
    except TypeError:
        return found
    return ""
