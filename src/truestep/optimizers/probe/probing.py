"""The face of the probe: from a class or function to what was measured of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from truestep.optimizers.probe import cache, traits
from truestep.optimizers.probe.build import Refusal, Target, Way, has_modes, large_settings, name_of, target_of, ways_of
from truestep.optimizers.probe.ground import Ground, accepted, find_ground
from truestep.optimizers.probe.measure import Measured, measure
from truestep.optimizers.probe.plan import KINDS, LOWERED, RESHAPED, STEPS, Subject, subjects_of
from truestep.optimizers.probe.quiet import quiet
from truestep.optimizers.probe.result import Probe
from truestep.words.scope import Scope, widest


def probe(optimizer: Callable[..., Any], *, params: Mapping[str, Sequence[int]] | str | None = None, **settings: Any) -> Probe:
    """Measure how far an optimizer's updates look, what it keeps, and what it needs; in a second or so, on the CPU.

    It steps params of its own, whole and in shards, in float32, and compares their updates. Generators and defaults are left as
    they are. What was measured is remembered, see `truestep.optimizers.probe.cache`.

    Args:
        optimizer: An optimizer class, or a function ``named_params -> Optimizer`` (or a list of them), for groups with flags,
            wrappers and set-ups of several optimizers.
        params: Shapes to try, by name; ``"2d"`` for those of 2 dims only; None: of 0, 1, 2 (tall and wide) and 4 dims.
        settings: Keyword arguments of the class or function; all others are its own defaults.

    Returns:
        What was measured. Where nothing could be, `.checked` is False and `.why` says why.

    Raises:
        UnsupportedError: If it is no class or function, takes no such setting, or `params` are no shapes.

    >>> import torch
    >>> probe(torch.optim.Adafactor, params="2d").scope
    'tensor'
    """
    target, given = target_of(optimizer, settings)
    subjects = subjects_of(params)
    place = cache.Place(target, given, [(one.name, one.shape) for one in subjects])
    if (known := place.read()) is not None:
        return known
    told = {name: repr(value) for name, value in given.items()}
    start = Probe(f"{getattr(target, '__module__', '')}.{name_of(target)}", told, versions=cache.versions(target))
    with quiet():
        ground, why = find_ground(target, given, subjects)
        found = _unchecked(start, target, given, subjects, why) if ground is None else _probed(ground, start)
    place.write(found)
    return found


def _unchecked(start: Probe, target: Target, given: Mapping[str, Any], subjects: Sequence[Subject], why: str) -> Probe:
    ways, _ = ways_of(target, given)
    takes = accepted(ways[0], subjects) if ways else ()
    return replace(start, checked=False, why=why, accepts=takes, needs=takes if takes == ("sparse",) else ())


def _probed(ground: Ground, start: Probe) -> Probe:
    seen = Measured()
    measure(ground, seen, kinds=ground.kinds)
    if not seen.moved:
        return replace(
            start, checked=False, why=f"no param moved in {STEPS} steps", accepts=accepted(ground.way, ground.subjects)
        )
    drift = seen.whole_by_kind[KINDS[0]]
    large = large_settings(ground.way, drift.optimizers, STEPS)
    for names in lowerings(large):
        _measure_lowered(ground, seen, names)
    kept = traits.kept(ground, drift)
    scopes = {number: seen.scope(number, subject) for number, subject in enumerate(ground.subjects) if number in seen.moved}
    ndims = sorted({ground.subjects[number].ndim for number in scopes})
    accepts = accepted(ground.way, ground.subjects)
    return replace(
        start,
        scope=widest(list(scopes.values())).value,
        scope_by_ndim={
            ndim: widest([scope for number, scope in scopes.items() if ground.subjects[number].ndim == ndim]).value
            for ndim in ndims
        },
        draws=seen.draws,
        shape_sensitive=any(RESHAPED in broken for broken in seen.broken_by_subject.values()),
        none_sensitive=traits.is_none_sensitive(ground, drift),
        needs=_needs(ground.way, accepts),
        accepts=accepts,
        keys=kept.keys,
        lazy=kept.lazy,
        group_state=tuple(key.key for key in kept.keys if key.owner == "group"),
        inert=traits.is_inert(ground, drift),
        not_reached=tuple(large),
        notes=(*ground.notes, *_still(ground, seen), *seen.notes),
    )


def lowerings(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return which settings to lower together: all but one, all, and each alone.

    One may hide what another holds back (a period of 1,000 steps, and blocks of 512 that small tensors do not fill), and one may
    switch all of it off when it is low (the largest dim that is not left alone).

    >>> lowerings(["period", "block"])
    [('period',), ('block',), ('period', 'block')]
    """
    all_but_one = [tuple(name for name in names if name != left) for left in names]
    return [chosen for chosen in dict.fromkeys([*all_but_one[::-1], tuple(names), *((name,) for name in names)]) if chosen]


def _measure_lowered(ground: Ground, seen: Measured, names: Sequence[str]) -> None:
    """Measure once more with settings lowered, so that what they hold back is reached; adds to `seen`."""
    if seen.shared is Scope.MODEL:
        return
    way, low = ground.way, dict.fromkeys(names, LOWERED)
    if way.form == "function":
        lowered = replace(way, group_settings={**way.group_settings, **low})
    else:
        lowered = replace(way, settings={**way.settings, **low})
    try:
        measure(replace(ground, way=lowered), seen, kinds=KINDS[:1])
    except Refusal as error:  # settings that may not be so low
        seen.notes.append(f"not measured with {', '.join(names)} at {LOWERED}: {error}")


def _needs(way: Way, accepts: Sequence[str]) -> tuple[str, ...]:
    only_2d = [ndim for ndim in ("0d", "1d", "2d", "3d", "4d") if ndim in accepts] == ["2d"]
    return (*way.needs, *(["2d"] if only_2d else []), *(["train"] if has_modes(way.target) else []))


def _still(ground: Ground, seen: Measured) -> list[str]:
    still = sorted({one.ndim for number, one in enumerate(ground.subjects) if number not in seen.moved})
    return [f"a param of {ndim} dims did not move" for ndim in still]
