"""The public surface: frozen, complete, and out of reach of submodules."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import truestep

# Changing this list changes what users may write: it goes with an entry in the docs.
NAMES = [
    "Accumulator",
    "CheckpointError",
    "Finding",
    "GuardError",
    "OptimizerReport",
    "Probe",
    "Report",
    "Slot",
    "StateView",
    "TrueStepError",
    "UnsupportedError",
    "VerifyError",
    "Window",
    "WindowError",
    "__version__",
    "check_optimizer",
    "inspect",
    "optimizer_checks",
    "probe",
    "references",
    "verify",
]
PACKAGES = ["truestep", *(found.name for found in pkgutil.walk_packages(truestep.__path__, "truestep.") if found.ispkg)]
VENDORS = ("accelerate", "deepspeed", "jinja2", "matplotlib")
MISSING_VENDORS = {vendor for vendor in VENDORS if importlib.util.find_spec(vendor) is None}

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys, types
import truestep

missing = set(sys.argv[1:])
for found in pkgutil.walk_packages(truestep.__path__, "truestep."):
    if found.name == "truestep.__main__":
        continue
    try:
        importlib.import_module(found.name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in missing:
            raise
for name in truestep.__all__:
    assert not isinstance(getattr(truestep, name), types.ModuleType), f"truestep.{name} became a submodule"
assert type(truestep.verify) is types.FunctionType, truestep.verify
assert type(truestep.probe) is types.FunctionType, truestep.probe
"""


def test_the_public_names_are_exactly_these() -> None:
    assert truestep.__all__ == NAMES


def test_the_public_names_are_sorted_and_unique() -> None:
    assert truestep.__all__ == sorted(set(truestep.__all__))


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_there_and_is_listed(name: str) -> None:
    assert getattr(truestep, name) is not None
    assert name in dir(truestep)


def test_an_unknown_name_is_refused_by_a_message_that_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="no attribute 'verfy': expected one of .*verify"):
        truestep.verfy  # noqa: B018


def test_every_public_name_still_works_after_every_submodule_was_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING, *MISSING_VENDORS], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_no_name_that_a_package_exports_is_the_name_of_its_submodule(package: str) -> None:
    loaded = importlib.import_module(package)
    submodules = {found.name for found in pkgutil.iter_modules(loaded.__path__)}
    assert submodules.isdisjoint(getattr(loaded, "__all__", ()))


def test_the_version_is_the_one_that_is_installed() -> None:
    assert importlib.metadata.version("truestep") == truestep.__version__


def test_type_checkers_see_the_names_that_are_loaded_lazily() -> None:
    tree = ast.parse(Path(truestep.__file__).read_text(encoding="utf-8"))
    guarded = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {alias.name: node.module for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == truestep._MODULE_BY_NAME
