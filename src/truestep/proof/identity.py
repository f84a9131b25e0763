"""The law `params`, on plain ids: the optimizers hold every live trainable param, once, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from truestep.backends.base import Identity
from truestep.words.finding import SHOWN_AT_MOST, Finding

AFTER_WRAPPING = "Build the optimizer after wrapping, from the wrapped model's params, or hand both to your framework's prepare."


def identity_findings(identity: Identity, orphans: Sequence[tuple[str, tuple[str, ...]]] = ()) -> list[Finding]:
    """Return what breaks the law, at most `SHOWN_AT_MOST` findings a code.

    Args:
        identity: Who is who.
        orphans: State that is keyed by no live param, as ``(shape and dtype, state keys)``.
    """
    held = Counter(held_id for _, ids in identity.held for held_id in ids)
    strangers = [held_id for held_id in held if held_id not in identity.live and held_id not in identity.frozen]
    missing = [name for held_id, name in identity.live.items() if held_id not in held]
    twice = [identity.live[held_id] for held_id, count in held.items() if count > 1 and held_id in identity.live]
    return [
        *_missing(missing, strangers, identity.unsharded),
        *(_twice(name) for name in twice[:SHOWN_AT_MOST]),
        *_dead_state(identity, orphans),
    ]


def _missing(missing: Sequence[str], strangers: Sequence[int], unsharded: Sequence[str]) -> list[Finding]:
    if not missing and strangers:
        return [
            Finding(
                "params/stranger",
                "params",
                "error",
                expected="live params of the model alone",
                found=f"{len(strangers)} tensors in the optimizer that are none",
                fix=AFTER_WRAPPING,
            )
        ]
    code, found, cause = "params/not-held", "it in no optimizer", "no optimizer was given this param"
    if unsharded:
        code, found = "params/unsharded", "the unsharded one, which forward uses"
        cause = "the optimizer was built after a forward, when the module showed its gathered params"
    elif strangers:
        code, found = "params/stale", "one from before wrapping, which no forward uses"
        cause = "the optimizer was built before the model was wrapped, so it steps params that no longer train"
    rest = f" ({len(missing)} params in all)" if len(missing) > 1 else ""
    return [
        Finding(
            code,
            "params",
            "error",
            param=name,
            key="param",
            expected="the live param of the model in an optimizer",
            found=found + rest,
            cause=cause,
            fix=AFTER_WRAPPING,
        )
        for name in missing[:SHOWN_AT_MOST]
    ]


def _twice(name: str) -> Finding:
    return Finding(
        "params/held-twice",
        "params",
        "error",
        param=name,
        key="param",
        expected="one optimizer that holds it, once",
        found="several param groups that do",
        fix="Give each param to one group of one optimizer.",
    )


def _dead_state(identity: Identity, orphans: Sequence[tuple[str, tuple[str, ...]]]) -> list[Finding]:
    # The dead params cannot be named by identity. Where all state is dead and as many params live, order names them.
    names = list(identity.live.values())
    named = len(orphans) == len(names)
    return [
        Finding(
            "params/state-of-dead",
            "params",
            "error",
            param=names[index] if named else None,
            key=keys[0] if keys else None,
            expected="state keyed by live params",
            found=f"state {', '.join(keys)} keyed by a tensor {about} that is no live param"
            + (f" ({len(orphans)} in all)" if len(orphans) > 1 else ""),
            cause="the params were swapped after the optimizer had made its state, and the state stayed with the old ones",
            fix="Build the optimizer after wrapping, or move each entry of optimizer.state to the param that took its place.",
            source="https://github.com/huggingface/accelerate/issues/3855",
        )
        for index, (about, keys) in enumerate(orphans[:SHOWN_AT_MOST])
    ]
