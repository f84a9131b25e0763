"""Remembering probes: in memory, and of classes as JSON files, by all that a probe depends on.

A class is known by its name, the source of every module that it inherits from, the versions of torch and of what it comes from,
and its settings; and by the source of the probe itself. Of a function the source says too little (it looks into its
surroundings), and of a class that is not installed too (what its module imports may change, and has no version): they are
remembered in memory only, as long as they live. ``TRUESTEP_CACHE`` names the folder; ``off`` turns the
files off.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

import truestep
from truestep.optimizers.probe.result import Probe
from truestep.words.errors import TrueStepError

OFF: Final = "off"
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
_PLAIN: Final = (bool, int, float, str, type(None))
_probe_by_mark: dict[str, Probe] = {}
_probes_by_function: weakref.WeakKeyDictionary[Any, dict[str, Probe]] = weakref.WeakKeyDictionary()


class Place:
    """Where the probe of one target, with these settings and params, is remembered.

    Args:
        target: The class or function.
        settings: Its settings.
        params: The params that it is probed on, in any form whose `repr` tells them.
    """

    def __init__(self, target: Any, settings: Mapping[str, Any], params: Any) -> None:
        told = repr((sorted(settings.items()), params))
        self._is_plain = all(_is_plain(value) for value in settings.values())
        source = _source(target) if isinstance(target, type) else None
        self._function = target
        self._told = told
        self._mark = None
        if source is not None and self._is_plain:
            parts = (f"{target.__module__}.{target.__qualname__}", told, source, _own_source(), sorted(versions(target).items()))
            self._mark = hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    def read(self) -> Probe | None:
        """Return what is remembered, if anything is."""
        if self._mark is None:
            return self._of_function().get(self._told)
        if self._mark not in _probe_by_mark and (file := self._file()) is not None:
            try:
                _probe_by_mark[self._mark] = Probe.from_json(file)
            except (TrueStepError, TypeError, KeyError):  # none there, or damaged: it is measured anew
                return None
        return _probe_by_mark.get(self._mark)

    def write(self, probe: Probe) -> None:
        """Remember a probe; a folder that cannot be written costs time later, nothing else."""
        if self._mark is None:
            if self._is_plain:
                self._of_function()[self._told] = probe
            return
        _probe_by_mark[self._mark] = probe
        if (file := self._file()) is not None:
            apart = file.with_suffix(f".{os.getpid()}")  # whole or not at all, whoever else writes it
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                apart.write_text(json.dumps(probe.to_json()), encoding="utf-8")
                apart.replace(file)
            except OSError:
                with contextlib.suppress(OSError):
                    apart.unlink()

    def _of_function(self) -> dict[str, Probe]:
        if not self._is_plain:
            return {}
        try:
            return _probes_by_function.setdefault(self._function, {})
        except TypeError:  # it cannot be referred to weakly
            return {}

    def _file(self) -> Path | None:
        folder = cache_folder()
        return None if folder is None else folder / "probes" / f"{self._mark}.json"


def cache_folder() -> Path | None:
    """Return where files are kept: ``TRUESTEP_CACHE``, or truestep's part of the user's cache folder; None if that is ``off``."""
    if told := os.environ.get("TRUESTEP_CACHE"):
        return None if told.lower() == OFF else Path(told)
    if sys.platform == "win32":
        root = os.environ.get("LOCALAPPDATA")
        return Path(root) / "truestep" / "cache" if root else None
    try:
        home = Path.home()
    except RuntimeError:  # nobody's home
        return None
    default = home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or default) / "truestep"


def forget() -> None:
    """Forget what is remembered in memory."""
    _probe_by_mark.clear()
    _probes_by_function.clear()


def versions(target: Any) -> dict[str, str]:
    """Return the versions of torch and of the distribution that a class or function comes from."""
    found = {"truestep": truestep.__version__, "torch": torch.__version__}
    top = str(getattr(target, "__module__", "")).partition(".")[0]
    for name in _distributions().get(top, ()):
        found.setdefault(name, importlib.metadata.version(name))
    return found


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def _is_plain(value: Any) -> bool:
    """Tell whether `repr` says all about a value."""
    if isinstance(value, (tuple, list)):
        return all(_is_plain(part) for part in value)
    return isinstance(value, _PLAIN)


def _source(cls: type) -> list[str] | None:
    """Return a digest of each module that the class inherits from; None if one is not of an installed version."""
    found = []
    for base in cls.__mro__:
        if base is object:
            continue
        try:
            file = Path(inspect.getfile(base))
            if _INSTALLED.isdisjoint(file.parts):
                return None
            found.append(_digest(file))
        except (TypeError, OSError):  # it has no file, as in a notebook
            return None
    return found


@functools.cache
def _own_source() -> str:
    return "".join(_digest(file) for file in sorted(Path(__file__).parent.glob("*.py")))


def _digest(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
