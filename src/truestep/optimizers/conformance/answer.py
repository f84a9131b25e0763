"""The author's question: where may this optimizer run?

What its scope predicts, and what stepping shows: FSDP2 rehearsed on DTensors of two ranks in one process, FSDP1 and ZeRO by
stepping flat shards, each rank's in an optimizer of its own. For proof there is ``truestep verify``, on real ranks.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor, nn

from truestep.backends import rehearsal
from truestep.optimizers.conformance.bench import PARAM, Bench, Slots
from truestep.optimizers.conformance.given import gradients, start
from truestep.optimizers.conformance.problem import first_line
from truestep.optimizers.conformance.subject import Subject
from truestep.optimizers.probe.result import Probe
from truestep.proof.update import judge, sensitivity

Verdict: TypeAlias = Literal["exact", "raises", "elsewhere", "not tried"]

FEW_STEPS: Final = 3  # on DTensors, which are slow
STEPS: Final = 12
RANKS: Final = 2
_OPERATION: Final = re.compile(r"\b(?:aten|_c10d_functional|c10d)\.\w+(?:\.\w+)?")
_WHOLE: Final = "DDP or ZeRO 0, which hand whole params over"
LABELS: Final = {"fsdp2": "FSDP2", "fsdp1": "FSDP1", "zero": "ZeRO"}


@dataclass(frozen=True)
class Place:
    """What becomes of the optimizer on one kind of backend.

    Attributes:
        backend: ``fsdp2``, ``fsdp1`` or ``zero``.
        verdict: ``exact``, ``raises``, ends ``elsewhere``, or ``not tried``.
        told: In words, with the operation and line, or the figure.
        instead: What to use where it is not exact.
    """

    backend: str
    verdict: Verdict
    told: str
    instead: str = ""

    def __str__(self) -> str:
        instead = f" Instead: {self.instead}." if self.instead else ""
        return f"{self.told}.{instead}"


@dataclass(frozen=True)
class Answer:
    """Where the optimizer may run.

    Attributes:
        scope: In words, from the probe.
        places: One a kind of backend.
    """

    scope: str
    places: tuple[Place, ...]

    def lines(self) -> list[tuple[str, str]]:
        """Return ``(label, text)`` lines for people."""
        return [("scope", f"{self.scope}."), *((LABELS[place.backend], str(place)) for place in self.places)]


def answered(subject: Subject, probe: Probe) -> Answer:
    """Return where the subject may run."""
    if subject.sparse:
        untried = "not tried: it takes sparse gradients only, and FSDP and ZeRO shard and reduce dense ones"
        return Answer(_scope(probe), tuple(Place(backend, "not tried", untried, "DDP") for backend in ("fsdp2", "fsdp1", "zero")))
    fsdp2 = _fsdp2(subject, probe)
    instead = "FSDP2, where it runs exactly, or DDP" if fsdp2.verdict == "exact" else _WHOLE
    fsdp1 = _on_shards(subject, probe, "fsdp1", _flat, "flat shards of each param", instead)
    zero = _zero(subject, probe, instead)
    return Answer(_scope(probe), (fsdp2, fsdp1, _with_zeros(subject, probe, zero)))


def _scope(probe: Probe) -> str:
    if not probe.checked:
        return f"not measured: {probe.why.removesuffix('.')}; taken for the widest"
    by_ndim = ", ".join(f"{ndim}-D {scope}" for ndim, scope in probe.scope_by_ndim.items())
    traits = [name for name in ("draws", "shape_sensitive", "none_sensitive") if getattr(probe, name)]
    return f"{probe.scope} ({by_ndim})" + (f"; {', '.join(traits)}" if traits else "")


# -- FSDP2


def _fsdp2(subject: Subject, probe: Probe) -> Place:
    """Return what becomes of it on DTensors."""
    predicted = "by its scope it runs exactly or raises, as long as it uses torch's own operations"
    if obstacle := rehearsal.obstacle():
        return Place("fsdp2", "not tried", f"predicted: {predicted}; not rehearsed: {obstacle}")
    values = start({name: shape for name, shape in subject.shapes.items() if shape})
    # Drawn before the stage opens: in the simulation each rank would draw its own.
    handed = [gradients(values, step) for step in range(subject.short(FEW_STEPS))]
    if not values:
        return Place("fsdp2", "not tried", "not rehearsed: fully_shard takes no 0-d params, and it takes no others")
    if rehearsal.can_simulate():
        try:
            return _simulated(subject, probe, values, handed)
        except Exception as error:  # whatever the class, DTensor or the simulation says
            if not rehearsal.is_own(error):
                return _raised("fsdp2", error, f"rehearsed on {RANKS} simulated ranks", _WHOLE)
    try:
        with rehearsal.stage(simulated=False) as stage:
            _rehearsed(subject, values, handed, stage)
    except Exception as error:
        return _raised("fsdp2", error, f"rehearsed as rank 0 of {RANKS}, without collectives", _WHOLE)
    return Place("fsdp2", "not tried", f"nothing raises, rehearsed as rank 0 of {RANKS}; predicted: {predicted}")


def _simulated(subject: Subject, probe: Probe, values: Mapping[str, Tensor], handed: Sequence[Mapping[str, Tensor]]) -> Place:
    with rehearsal.stage(simulated=True) as stage:
        bench = _rehearsed(subject, values, handed, stage)
        found = {(name, PARAM): stage.whole(param) for name, param in bench.params.items()}

    def one_process() -> Slots:
        return _params(subject.bench(values).run(0, subject.short(FEW_STEPS)).values())

    how = f"rehearsed on {RANKS} simulated ranks, {len(values)} params in rows, {subject.short(FEW_STEPS)} steps"
    apart = _apart(found, one_process, values)
    if apart is None:
        return Place("fsdp2", "exact", f"runs exactly: {how}{_not_reached(probe)}")
    return Place("fsdp2", "elsewhere", f"ends elsewhere, by {apart:.2g} of its path, without a word: {how}", _WHOLE)


def _rehearsed(
    subject: Subject, values: Mapping[str, Tensor], handed: Sequence[Mapping[str, Tensor]], stage: rehearsal.Stage
) -> Bench:
    bench = subject.bench({name: stage.shard(value) for name, value in values.items()})
    for step in handed:
        bench.step({name: stage.shard(gradient) for name, gradient in step.items()})
    return bench


# -- FSDP1 and ZeRO

Ranks: TypeAlias = list[dict[str, Tensor]]


def _flat(tensors: Mapping[str, Tensor]) -> Ranks:
    """Return what each rank holds: its range of each flattened param."""
    halves = {name: tensor.reshape(-1).tensor_split(RANKS) for name, tensor in tensors.items()}
    return [{name: parts[rank] for name, parts in halves.items() if parts[rank].numel()} for rank in range(RANKS)]


def _zero(subject: Subject, probe: Probe, instead: str) -> Place:
    """Return what becomes of it where each group's params lie end to end in one tensor, of which a rank holds a range."""
    if len(subject.usual.optimizers) > 1:
        return Place("zero", "not tried", "not tried: an engine takes one optimizer, and here are several", instead)
    held = [{id(param) for param in group["params"]} for group in subject.usual.groups]
    names = [[name for name, param in subject.usual.params.items() if id(param) in ids] for ids in held]

    def fused(tensors: Mapping[str, Tensor]) -> Ranks:
        ends = {str(number): torch.cat([tensors[name].reshape(-1) for name in its]) for number, its in enumerate(names) if its}
        parts = {number: end.tensor_split(RANKS) for number, end in ends.items()}
        return [{number: parts[number][rank] for number in parts} for rank in range(RANKS)]

    return _on_shards(subject, probe, "zero", fused, "shards of each group's params in one tensor", instead)


def _sharded(subject: Subject, backend: str, held: Mapping[str, Tensor]) -> Bench:
    """Return the optimizer of one rank's shards.

    An engine is given an optimizer that was made of whole params, and puts its own tensors into the groups: a function that
    chooses by names or shapes has chosen by then. FSDP1's params are shards before an optimizer is made of them.
    """
    if backend != "zero" or subject.way.form != "function":
        return subject.bench(held)
    bench = subject.bench()
    bench.params = {name: nn.Parameter(part.clone()) for name, part in held.items()}
    for number, group in enumerate(bench.groups):
        group["params"] = [bench.params[str(number)]] if str(number) in held else []
    for optimizer in bench.optimizers:
        optimizer.state.clear()
    return bench


def _on_shards(
    subject: Subject, probe: Probe, backend: str, cut: Callable[[Mapping[str, Tensor]], Ranks], what: str, instead: str
) -> Place:
    values = start(subject.shapes)
    steps = subject.short(STEPS)
    how = f"{RANKS} ranks' {what}, {steps} steps"
    try:
        benches = [_sharded(subject, backend, held) for held in cut(values)]
        for step in range(steps):
            for bench, its in zip(benches, cut(gradients(values, step)), strict=True):
                bench.step(its)
    except Exception as error:  # whatever a class says to a shard
        return _raised(backend, error, f"stepped on {how}", instead)
    ends = [bench.values() for bench in benches]

    def one_process() -> Slots:
        whole = subject.bench(values).run(0, steps).values()
        return {(f"{rank}.{name}", PARAM): part for rank, held in enumerate(cut(whole)) for name, part in held.items()}

    at = {f"{rank}.{name}": part for rank, held in enumerate(cut(values)) for name, part in held.items()}
    found = _params({f"{rank}.{name}": value for rank, held in enumerate(ends) for name, value in held.items()})
    apart = _apart(found, one_process, at)
    if apart is not None:
        return Place(backend, "elsewhere", f"ends elsewhere, by {apart:.2g} of its path, without a word: {how}", instead)
    if probe.checked and probe.scope != "element":
        return Place(backend, "elsewhere", f"not exact by its scope, {probe.scope}; it did not show on {how}", instead)
    return Place(backend, "exact", f"exact: {how}{_not_reached(probe)}")


def _with_zeros(subject: Subject, probe: Probe, zero: Place) -> Place:
    """Add what comes of zeros where there was no gradient, which is what ZeRO hands over."""
    if zero.verdict != "exact" or not probe.none_sensitive:
        return zero
    values = start(subject.shapes)
    missing = next(iter(values))
    ends = []
    for given in (None, torch.zeros_like(values[missing])):
        bench = subject.bench(values)
        for step in range(subject.short(STEPS)):
            handed: dict[str, Tensor | None] = dict(gradients(values, step))
            bench.step({**handed, missing: given} if step % 2 else handed)
        ends.append(bench.values()[missing].double())
    path = float(torch.linalg.vector_norm(ends[0] - values[missing].double()))
    off = float(torch.linalg.vector_norm(ends[1] - ends[0])) / path if path else float("inf")
    told = (
        f"{zero.told}; but ZeRO gives a param without gradient zeros: {off:.2g} of its path off where every other one is absent"
    )
    return Place(zero.backend, zero.verdict, told, "see that every param gets a gradient, or use FSDP2 or DDP")


# -- Both


def _not_reached(probe: Probe) -> str:
    """Return what so few steps cannot have shown."""
    if not probe.checked:
        return "; its scope was not measured"
    return f"; {', '.join(probe.not_reached)} lie beyond so few steps" if probe.not_reached else ""


def _params(values: Mapping[str, Tensor]) -> Slots:
    return {(name, PARAM): value for name, value in values.items()}


def _apart(found: Slots, one_process: Callable[[], Slots], at: Mapping[str, Tensor]) -> float | None:
    """Return how far from one process it ends, over how far that came; None if bitwise there, or within what rounding does."""
    expected = one_process()
    judged = judge(found, expected)
    if any(one.verdict == "differs" for one in judged):
        judged = judge(found, expected, moves=sensitivity(one_process, unmoved=expected))
    shares = []
    for one in judged:
        if one.verdict == "differs":
            path = torch.linalg.vector_norm(expected[one.slot].double() - at[one.slot[0]].double())
            shares.append(one.distance / float(path) if path else float("inf"))
    return max(shares) if shares else None


def _raised(backend: str, error: Exception, how: str, instead: str) -> Place:
    """Return that it raises: the operation, where the message names it, and the line of the optimizer's own code."""
    operation = found[0] if (found := _OPERATION.search(str(error))) else ""
    at = f" in {operation}" if operation else ""
    return Place(
        backend, "raises", f"raises {type(error).__name__}{at} at {line_of(error)}: {first_line(error)[:160]} ({how})", instead
    )


def line_of(error: BaseException) -> str:
    """Return ``FILE:LINE`` of the innermost code that is an optimizer's, not torch's inside: as people look for it."""
    every = traceback.extract_tb(error.__traceback__)
    # Where no frame is an optimizer's, it gave us what we cannot read: the line is ours.
    frames = [frame for frame in every if not _is_inside(frame.filename)] or every
    if not frames:
        return "an unknown line"
    return f"{short_path(frames[-1].filename)}:{frames[-1].lineno}"


def short_path(path: str) -> str:
    """Return the end of a path: from the package in site-packages on, or its last three parts."""
    tail = path.replace("\\", "/").rpartition("site-packages/")[2]
    return tail if tail != path else "/".join(path.split("/")[-3:])


def _is_inside(path: Any) -> bool:
    text = str(path).replace("\\", "/")
    own = ("/torch/optim/optimizer.py", "/truestep/optimizers/", "/truestep/backends/", "/truestep/proof/")
    return any(part in text for part in own) or ("/torch/" in text and "/torch/optim/" not in text)
