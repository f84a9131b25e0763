"""Containers of state, flattened to key paths and put together again: ``{"Q": [a, b]}`` is ``{"Q/0": a, "Q/1": b}``."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

from torch import Tensor

# One step of a key path: what the container is ("dict", "list", "tuple", or "deque" with its maxlen), and the key in it as it is.
Level: TypeAlias = tuple[str, "int | None", Any]

PLAIN: Final = (bool, int, float, complex, str, type(None))
_SEQUENCES: Final = (list, tuple, deque)


def is_plain(value: Any) -> bool:
    """Tell whether a value is a plain one, a sequence of such, or an empty dict."""
    if isinstance(value, _SEQUENCES):
        return all(isinstance(inner, PLAIN) for inner in value)
    return isinstance(value, PLAIN) or (isinstance(value, dict) and not value)


def parts(value: Any) -> list[tuple[Level, Any]] | None:
    """Return what a container is flattened to; None where it is one value: no container, an empty one, or one of plain values."""
    if isinstance(value, Mapping):
        return [(("dict", None, key), inner) for key, inner in value.items()] or None
    if not isinstance(value, _SEQUENCES) or is_plain(value):
        return None
    kind = "deque" if isinstance(value, deque) else "tuple" if isinstance(value, tuple) else "list"
    return [((kind, getattr(value, "maxlen", None), index), inner) for index, inner in enumerate(value)]


class _Open(dict[Any, Any]):
    """A container in the making."""

    def __init__(self, kind: str, most: int | None) -> None:
        super().__init__()
        self.kind = kind
        self.most = most

    def closed(self) -> Any:
        inner = {key: value.closed() if isinstance(value, _Open) else value for key, value in self.items()}
        if self.kind == "dict":
            return inner
        if self.kind == "deque":
            return deque(inner.values(), self.most)
        return tuple(inner.values()) if self.kind == "tuple" else list(inner.values())


def nested(flat: Mapping[str, Any], within: Mapping[str, tuple[Level, ...]]) -> dict[str, Any]:
    """Return state with its containers, from values by key path and the levels of each path. All is copied.

    >>> nested({"Q/0": 1, "Q/1": 2, "step": 3}, {"Q/0": (("list", None, 0),), "Q/1": (("list", None, 1),)})
    {'Q': [1, 2], 'step': 3}
    """
    result = _Open("dict", None)
    for path, value in flat.items():
        levels = within.get(path, ())
        inner, key = result, path.removesuffix("".join(f"/{level[2]}" for level in levels))
        for kind, most, below in levels:
            inner, key = inner.setdefault(key, _Open(kind, most)), below
        inner[key] = value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
    made: dict[str, Any] = result.closed()
    return made


def by_path(flat: Mapping[str, Any]) -> dict[str, tuple[Level, ...]]:
    """Return the levels that paths alone let suppose: a container of the keys 0, 1, .. is a list, any other a dict."""
    keys_by_prefix: dict[str, list[str]] = {}
    for prefix, key in (pair for path in flat for pair in _prefixes(path)):
        keys_by_prefix.setdefault(prefix, []).append(key)
    lists = {
        prefix for prefix, keys in keys_by_prefix.items() if list(dict.fromkeys(keys)) == [str(i) for i in range(len(set(keys)))]
    }
    return {
        path: tuple(("list", None, int(key)) if prefix in lists else ("dict", None, key) for prefix, key in _prefixes(path))
        for path in flat
    }


def _prefixes(path: str) -> Iterator[tuple[str, str]]:
    names = path.split("/")
    for count in range(1, len(names)):
        yield "/".join(names[:count]), names[count]
