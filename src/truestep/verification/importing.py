"""How what a user names becomes an object, here and again in every rank process: files, modules, and objects in them."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from truestep.words.errors import TrueStepError

_PRIVATE: Final = "_truestep_recipe_"
_loading: list[Path] = []  # files that are being imported
_beside: dict[str, Path] = {}  # modules that recipes found beside them -> the folder


def resolve(
    text: str, what: str, expected: str, known: Iterable[str], error_class: type[TrueStepError]
) -> tuple[ModuleType, Any, str]:
    """Import what ``FILE.py``, ``FILE.py:OBJECT``, ``MODULE`` or ``MODULE:OBJECT`` names.

    Args:
        text: The reference.
        what: What it is to be, for messages.
        expected: What may be given, for messages.
        known: Names that could have been meant.
        error_class: Raised if it is not there or fails to import.

    Returns:
        The module, the object (the module itself if none is named), and the text with its path made absolute.
    """
    where, colon, attribute = text.rpartition(":")
    if not colon or not all(part.isidentifier() for part in attribute.split(".")):
        where, attribute = text, ""
    if where.endswith(".py") or "/" in where or os.sep in where:
        path = Path(where).expanduser().resolve()
        if not path.is_file():
            raise error_class(f"{what} {text!r}: there is no file {path}. Expected {expected}.")
        module, again = _import_file(path, what, error_class), str(path)
    else:
        module, again = _import_module(where, text, what, expected, known, error_class), where
    found: Any = module
    for part in filter(None, attribute.split(".")):
        if not hasattr(found, part):
            near = meant(part, vars(module))
            raise error_class(f"{what} {text!r}: {where} has no {attribute!r}.{near} Expected {expected}.")
        found = getattr(found, part)
    return module, found, f"{again}:{attribute}" if attribute else again


def reference(target: object) -> str:
    """Return the text by which another process loads an object: ``FILE.py[:NAME]`` or ``MODULE[:NAME]``, empty if none does."""
    if isinstance(target, ModuleType):
        return _module_reference(target)
    own = getattr(target, "__module__", None)
    holders = [sys.modules.get(name) for name in (own, "__main__") if name] + list(sys.modules.values())
    for module in holders:
        if not isinstance(module, ModuleType):
            continue
        name = next((name for name, value in list(vars(module).items()) if value is target), None)
        if name and (where := _module_reference(module)):
            return f"{where}:{name}"
    return ""


def _module_reference(module: ModuleType) -> str:
    # A file outside a package is loaded again by its path: a rank process may not find its folder, and __main__ has no name.
    path = Path(getattr(module, "__file__", None) or "")
    if path.suffix == ".py" and not (path.parent / "__init__.py").is_file():
        return str(path.resolve())
    return "" if module.__name__ in ("__main__", "__mp_main__") else module.__name__


def _import_file(path: Path, what: str, error_class: type[TrueStepError]) -> ModuleType:
    name = _PRIVATE + blake2b(os.fsencode(path), digest_size=8).hexdigest()
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise error_class(f"{what} {path} is no Python file. Give a .py file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Before it runs: dataclasses and pickle look a class's module up there.
    _forget_namesakes(path.parent)
    before = set(sys.modules)
    _loading.append(path)
    try:
        with on_path(path.parent):
            spec.loader.exec_module(module)
    except TrueStepError:
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise error_class(failed(f"{what} {path} cannot be imported", error, path.parent)) from error
    finally:
        _loading.pop()
        _beside.update({name: path.parent for name in set(sys.modules) - before if _is_beside(name, path.parent)})
    return module


def _is_beside(name: str, folder: Path) -> bool:
    return "." not in name and ((folder / f"{name}.py").is_file() or (folder / name).is_dir())


def _forget_namesakes(folder: Path) -> None:
    """Drop modules that another recipe found beside it, where this one has others of the same name beside it."""
    for name in [name for name, where in _beside.items() if where != folder and _is_beside(name, folder)]:
        del _beside[name]
        for stale in [each for each in sys.modules if f"{each}.".startswith(f"{name}.")]:
            del sys.modules[stale]


def being_loaded() -> Path | None:
    """Return the file that is being imported as a recipe right now, or None."""
    return _loading[-1] if _loading else None


def _import_module(
    name: str, text: str, what: str, expected: str, known: Iterable[str], error_class: type[TrueStepError]
) -> ModuleType:
    absent = f"there is no {what} {text!r}.{meant(text, known)} Expected {expected}."
    if not all(part.isidentifier() for part in name.split(".")):
        raise error_class(absent)
    try:
        with on_path(Path.cwd()):
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise error_class(absent) from error
        raise error_class(failed(f"{what} {name} cannot be imported", error, Path.cwd())) from error


def failed(what: str, error: BaseException, folder: Path) -> str:
    """Return one sentence: what failed, the error, and the innermost line of the code in `folder` that led to it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_file()]
    own = [frame for frame in frames if folder in Path(frame.filename).parents] or frames
    file, line, said = (own[-1].filename, own[-1].lineno, str(error)) if own else ("", None, str(error))
    if isinstance(error, SyntaxError) and error.filename:
        file, line, said = error.filename, error.lineno, error.msg
    return f"{what}: {type(error).__name__}: {' '.join(said.split())} ({file}, line {line}). Mend it, or give another."


@contextmanager
def on_path(folder: Path) -> Iterator[None]:
    """Put a folder first on ``sys.path``."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:  # The user's code may have changed the list.
            sys.path.remove(str(folder))


def meant(name: str, known: Iterable[str]) -> str:
    """Return the question whether one of the known names was meant, where some are near."""
    by_lower = {key.lower(): key for key in sorted(known, reverse=True)}  # Of `AdamW` and `adamw` the first.
    near = difflib.get_close_matches(name.lower(), by_lower, n=5, cutoff=0.6)
    return f" Did you mean {' or '.join(by_lower[key] for key in near)}?" if near else ""
