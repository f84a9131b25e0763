"""What a probe found: plain data, its text, and its JSON form."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from truestep.optimizers.probe.keys import Key
from truestep.optimizers.probe.plan import LOWERED, STEPS
from truestep.words.errors import TrueStepError
from truestep.words.scope import Scope, Traits

SCHEMA_VERSION: Final = 1
_TUPLES: Final = ("accepts", "needs", "group_state", "not_reached", "notes")


@dataclass(frozen=True)
class Probe:
    """What was measured of an optimizer, in float32 on the CPU: evidence, not proof.

    Attributes:
        optimizer: Qualified name of the class or function.
        settings: The settings that were given, as text; the others are the class's own.
        checked: Whether anything could be measured. If not, `scope` is the widest, for those who do not look here.
        why: Why not.
        scope: How far one element's update looks, the widest over all ndims: ``element``, ``row``, ``column``, ``tensor``,
            ``group`` or ``model``.
        scope_by_ndim: The same for each ndim of params that it stepped.
        draws: It draws random numbers. Its scope is then what one element was seen to reach.
        shape_sensitive: A reshape of a param to 1-D changes its updates (or raises).
        none_sensitive: An absent gradient is not a zero one, or raises.
        needs: What it must be given beside params with gradients: ``closure``, ``names``, ``model``, ``2d``, ``train`` (its
            training mode), ``sparse``, or the name of a flag that each group must have.
        accepts: Which params it steps to finite ones, each tried alone: ``0d`` to ``4d``, ``empty``, ``strided`` (not
            contiguous), ``sparse`` (gradients), ``float64``, ``bfloat16``, ``float16``, ``complex64``.
        keys: What it keeps.
        lazy: Its state is created by the first steps, not by the constructor.
        group_state: The entries of param groups that a step changes.
        inert: A step with zero gradients at lr 0 changes nothing, then or later; None where groups have no lr.
        not_reached: Whole-number settings above 64, which 64 steps may not reach. Where the scope could be wider than it looks,
            it was measured with them at 3 too, alone and together.
        notes: What else was seen.
        versions: Of torch and of what the class comes from.
    """

    optimizer: str
    settings: Mapping[str, str] = field(default_factory=dict)
    checked: bool = True
    why: str = ""
    scope: str = Scope.MODEL.value
    scope_by_ndim: Mapping[int, str] = field(default_factory=dict)
    draws: bool = False
    shape_sensitive: bool = False
    none_sensitive: bool = False
    needs: tuple[str, ...] = ()
    accepts: tuple[str, ...] = ()
    keys: tuple[Key, ...] = ()
    lazy: bool = False
    group_state: tuple[str, ...] = ()
    inert: bool | None = None
    not_reached: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def traits(self) -> Traits:
        """The four traits as one word."""
        return Traits(self.draws, self.shape_sensitive, self.none_sensitive, self.needs)

    def __str__(self) -> str:
        """Return what was found, in lines."""
        given = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        head = f"{self.optimizer}({given})"
        if not self.checked:
            return f"{head}: not checked: {self.why}"
        by_ndim = ", ".join(f"{ndim}-D {scope}" for ndim, scope in self.scope_by_ndim.items())
        lines = [f"{head}: scope {self.scope} ({by_ndim})", *(f"  {line}" for line in _lines(self))]
        lines.append(f"Measured over {STEPS} steps of three kinds of gradients, in float32: evidence, not proof.")
        return "\n".join(lines)

    def to_json(self, path: str | Path | None = None) -> dict[str, Any]:
        """Return plain data with a ``schema_version``, written to `path` too.

        Raises:
            TrueStepError: If the file cannot be written.
        """
        data: dict[str, Any] = json.loads(json.dumps({"schema_version": SCHEMA_VERSION, **dataclasses.asdict(self)}))
        if path is not None:
            try:
                Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
            except OSError as error:
                raise TrueStepError(
                    f"cannot write the probe to {path}: {error.strerror}. Give a file in a folder that exists."
                ) from error
        return data

    @classmethod
    def from_json(cls, source: str | Path | Mapping[str, Any]) -> Probe:
        """Rebuild a probe from `to_json`, its data or its file; unknown entries are passed by.

        Raises:
            TrueStepError: If it is no probe, or of another schema.
        """
        try:
            data = source if isinstance(source, Mapping) else json.loads(Path(source).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise TrueStepError(f"cannot read a probe from {source}: {error}. Give a file that to_json wrote.") from error
        found = data.get("schema_version") if isinstance(data, Mapping) else None
        if found != SCHEMA_VERSION:
            raise TrueStepError(f"expected a probe with schema_version {SCHEMA_VERSION}, found {found}. Give a file of to_json.")
        kept = {one.name: data[one.name] for one in dataclasses.fields(cls) if one.name in data}
        kept |= {name: tuple(kept[name]) for name in _TUPLES if name in kept}
        kept["scope_by_ndim"] = {int(ndim): scope for ndim, scope in kept.get("scope_by_ndim", {}).items()}
        kept["keys"] = tuple(_key_of(key) for key in kept.get("keys", ()))
        return cls(**kept)


def _key_of(data: Mapping[str, Any]) -> Key:
    return Key(**{**data, "dims_by_ndim": {int(ndim): tuple(dims) for ndim, dims in data["dims_by_ndim"].items()}})


_TRAITS: Final = {
    "draws": "draws random numbers; its scope is what one element was seen to reach",
    "shape_sensitive": "a reshape of a param changes its updates",
    "none_sensitive": "an absent gradient is not a zero one",
}


def _lines(probe: Probe) -> list[str]:
    lines = [text for trait, text in _TRAITS.items() if getattr(probe, trait)]
    if probe.needs:
        lines.append(f"needs {', '.join(probe.needs)}")
    if probe.keys:
        lines.append(f"keeps {', '.join(_key_texts(probe.keys))}{'; created by the first steps' if probe.lazy else ''}")
    if probe.inert is not None:
        lines.append(f"a step with zero gradients at lr 0 {'changes nothing' if probe.inert else 'is felt'}")
    lines.append(f"accepts {', '.join(probe.accepts) or 'nothing that was tried'}")
    if probe.not_reached:
        too = "" if probe.scope == Scope.MODEL.value else f", and measured at {LOWERED} too"
        lines.append(f"not reached in {STEPS} steps{too}: {', '.join(probe.not_reached)}")
    return [*lines, *(f"note: {note}" for note in probe.notes)]


def _key_texts(keys: Sequence[Key]) -> list[str]:
    """Return the keys in words, those of one container that are alike as one."""
    names_by_text: dict[tuple[str, str], list[str]] = {}
    for key in keys:
        stem, _, rest = key.key.partition("/")
        names_by_text.setdefault((stem if rest else key.key, _about(key)), []).append(key.key)
    return [f"{names[0]}{f' to {names[-1]}' if len(names) > 1 else ''} ({about})" for (_, about), names in names_by_text.items()]


def _about(key: Key) -> str:
    if key.owner != "param":
        return f"{key.dtype}, of the {key.owner}"
    if key.kind != "tensor" or not key.dims_by_ndim:
        return key.dtype
    if key.is_like_param:
        return f"{key.dtype}, as the param"
    if not any(key.dims_by_ndim.values()):
        return f"{key.dtype}, 0-D"
    return f"{key.dtype}, " + ", ".join(f"[{', '.join(dims)}] of {ndim}-D" for ndim, dims in key.dims_by_ndim.items())
