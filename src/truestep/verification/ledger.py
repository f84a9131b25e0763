"""What is done of a long chore: a file of JSON lines, appended to as each ends, so that a run that was stopped goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, Final, Generic, TypeAlias, TypeVar

from truestep.words.errors import VerifyError

Key = TypeVar("Key", bound=Hashable)
Line: TypeAlias = dict[str, Any]
SCHEMA_VERSION: Final = 1


class Ledger(Generic[Key]):
    """The file, and its lines by what they are of.

    Args:
        path: A line is appended for each cell.
        read: From a line to what it is of, and the line as it counts today; raises KeyError, TypeError or ValueError for others.
        versions: What the lines hold for: those of other versions are passed by.

    Raises:
        VerifyError: If the file is there and is no such file, or cannot be read.
    """

    def __init__(self, path: Path, read: Callable[[Line], tuple[Key, Line]], versions: Mapping[str, str]) -> None:
        self._path = path
        self._read = read
        self._versions = dict(versions)
        self.lines: dict[Key, Line] = {}
        try:
            data = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise VerifyError(f"cannot read {path}: {error.strerror}. Give another --out.") from error
        whole = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            self._take(number, line)
        if len(whole) < len(data):  # of a run that was killed as it wrote
            with path.open("r+b") as file:
                file.truncate(len(whole))

    def _take(self, number: int, text: bytes) -> None:
        try:
            line = json.loads(text)
            if line["schema_version"] != SCHEMA_VERSION:
                raise ValueError(f"schema_version {line['schema_version']}")
            key, read = self._read(line)
            versions = line["versions"]
        except (ValueError, KeyError, TypeError) as error:
            raise VerifyError(
                f"{self._path}, line {number}: expected a cell of the matrix with schema_version {SCHEMA_VERSION}, "
                f"found {error!r}. Give another --out, or remove the file."
            ) from error
        if versions == self._versions:  # of other releases, it says nothing about these
            self.lines[key] = read

    def add(self, key: Key, line: Mapping[str, Any]) -> None:
        """Append a line; its schema and versions are put in.

        Raises:
            VerifyError: If the file cannot be written.
        """
        whole = {"schema_version": SCHEMA_VERSION, **line, "versions": self._versions}
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(whole, allow_nan=False) + "\n")
        except OSError as error:
            raise VerifyError(f"cannot write to {self._path}: {error.strerror}. Give another --out.") from error
        self.lines[key] = whole
