"""Make the optimizer step of distributed PyTorch training the true one, and prove it.

    >>> import truestep as ts
    >>> ts.Finding("params/stale", "params", "error", expected="a live param", found="the one from before wrapping").severity
    'error'

Everything public is here, and is loaded when it is first asked for: importing this package imports neither torch nor a vendor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

__version__ = "0.1.0"

if TYPE_CHECKING:
    from truestep.accumulate.accumulator import Accumulator
    from truestep.accumulate.window import Window
    from truestep.backends.inspecting import inspect
    from truestep.optimizers.conformance.report import OptimizerReport
    from truestep.optimizers.conformance.run import check_optimizer, optimizer_checks
    from truestep.optimizers.probe.probing import probe
    from truestep.optimizers.probe.result import Probe
    from truestep.optimizers.textbook.table import references
    from truestep.state.view import Slot, StateView
    from truestep.verification.report import Report
    from truestep.verification.verifying import verify
    from truestep.words.errors import CheckpointError, GuardError, TrueStepError, UnsupportedError, VerifyError, WindowError
    from truestep.words.finding import Finding

__all__ = [
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

_MODULE_BY_NAME: Final = {
    "Accumulator": "truestep.accumulate.accumulator",
    "CheckpointError": "truestep.words.errors",
    "Finding": "truestep.words.finding",
    "GuardError": "truestep.words.errors",
    "OptimizerReport": "truestep.optimizers.conformance.report",
    "Probe": "truestep.optimizers.probe.result",
    "Report": "truestep.verification.report",
    "Slot": "truestep.state.view",
    "StateView": "truestep.state.view",
    "TrueStepError": "truestep.words.errors",
    "UnsupportedError": "truestep.words.errors",
    "VerifyError": "truestep.words.errors",
    "Window": "truestep.accumulate.window",
    "WindowError": "truestep.words.errors",
    "check_optimizer": "truestep.optimizers.conformance.run",
    "inspect": "truestep.backends.inspecting",
    "optimizer_checks": "truestep.optimizers.conformance.run",
    "probe": "truestep.optimizers.probe.probing",
    "references": "truestep.optimizers.textbook.table",
    "verify": "truestep.verification.verifying",
}

if not TYPE_CHECKING:  # a type checker would take any name for granted that __getattr__ might give

    def __getattr__(name: str) -> object:
        if name not in _MODULE_BY_NAME:
            raise AttributeError(f"module 'truestep' has no attribute {name!r}: expected one of {', '.join(__all__)}")
        import importlib

        value = getattr(importlib.import_module(_MODULE_BY_NAME[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
