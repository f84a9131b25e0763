"""Where an engine's step really happens.

``engine.step()`` steps only at the window's boundary, and may skip even there; accelerate calls it inside ``backward``. In it the
inner optimizer's ``step`` runs once a param group (ZeRO 1 and 2) or once a sub-group (ZeRO 3), each time with the other groups
emptied. So the engine's step is bracketed, the gradients are collected over the inner steps, and a step is told of only if there
was one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from truestep.backends.base import Piece, Undo

Before: TypeAlias = Callable[[int], None]
After: TypeAlias = Callable[[int, "dict[str, Piece | None]"], None]
Entering: TypeAlias = Callable[[Sequence[Tensor]], Mapping[str, "Piece | None"]]


class StepBracket:
    """The bracket around one engine's step.

    Args:
        engine: Whose ``step`` is bracketed, on the instance, from the first `watch` to `close`.
        inner: The torch optimizer that steps.
        entering: What of which param's gradient enters the step with these tensors, which the inner optimizer holds.
    """

    def __init__(self, engine: Any, inner: torch.optim.Optimizer, entering: Entering) -> None:
        self._engine = engine
        self._inner = inner
        self._entering_with = entering
        self._listeners: list[tuple[Before, After]] = []
        self._undo: list[Undo] = []
        self._clips: list[tuple[float, Tensor]] = []
        self._groups: list[dict[str, Any]] | None = None  # all of them, while the engine steps
        self._entering: dict[str, Piece | None] | None = None  # of the step under way, once the inner optimizer has begun
        self._norm: Any = None

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The param groups of the inner optimizer, all of them even while ZeRO steps one alone."""
        return self._inner.param_groups if self._groups is None else self._groups

    def add(self, before: Before, after: After) -> Undo:
        """Tell these of each step from now on."""
        self.watch()
        listener = (before, after)
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def clips(self) -> Iterator[tuple[float, Tensor]]:
        """Yield and forget the norms by which the engine clipped since the bracket was placed."""
        self.watch()
        clips, self._clips = self._clips, []
        return iter(clips)

    def watch(self) -> None:
        """Place the bracket, once."""
        if not self._undo:
            handle = self._inner.register_step_pre_hook(self._inner_step)
            self._undo = [
                handle.remove,
                _replaced(self._engine, "clip_fp32_gradients", self._clip),
                _replaced(self._engine, "step", self._bracketed(self._engine.step)),
            ]

    def close(self) -> None:
        """Take the bracket away."""
        while self._undo:
            self._undo.pop()()
        self._listeners.clear()

    def _bracketed(self, engine_step: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            self._entering, self._norm, self._groups = None, None, self._inner.param_groups
            try:
                result = engine_step(*args, **kwargs)
            finally:
                self._groups = None
            if self._entering is not None:
                self._stepped(self._entering)
            return result

        return step

    def _inner_step(self, *_: Any) -> None:
        if self._groups is None:  # the user steps the inner optimizer by hand: not the engine's step
            return
        if self._entering is None:
            self._entering = {}
            for before, _after in self._listeners:
                before(0)
        if self._listeners:
            self._entering.update(self._entering_with([held for group in self._inner.param_groups for held in group["params"]]))

    def _stepped(self, entering: dict[str, Piece | None]) -> None:
        max_norm = float(self._engine.gradient_clipping())
        norm = self._engine.get_global_grad_norm() if self._norm is None else self._norm
        if max_norm > 0 and norm is not None:
            self._clips.append((max_norm, torch.as_tensor(norm).detach().clone().reshape(())))
        for _before, after in self._listeners:
            after(0, entering)

    def _clip(self) -> None:
        """Clip as the engine does under ZeRO 0 in fp32, which throws the norm away."""
        from deepspeed.runtime.utils import clip_grad_norm_

        engine = self._engine
        self._norm = clip_grad_norm_(parameters=engine.module.parameters(), max_norm=engine.gradient_clipping(), mpu=engine.mpu)


def _replaced(owner: Any, name: str, replacement: Callable[..., Any]) -> Undo:
    """Put `replacement` on the instance; the undo leaves what somebody else has put there since."""
    own = vars(owner)
    earlier = own.get(name)
    own[name] = replacement

    def undo() -> None:
        if own.get(name) is not replacement:
            return
        if earlier is None:
            del own[name]
        else:
            own[name] = earlier

    return undo
