"""The conformance suite: what every optimizer must do, as a table of checks that any class can be put to."""

from truestep.optimizers.conformance.checks import CHECKS, Check
from truestep.optimizers.conformance.report import OptimizerReport, Row
from truestep.optimizers.conformance.run import OptimizerCheck, check_optimizer, optimizer_checks

__all__ = ["CHECKS", "Check", "OptimizerCheck", "OptimizerReport", "Row", "check_optimizer", "optimizer_checks"]
