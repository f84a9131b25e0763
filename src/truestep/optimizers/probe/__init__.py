"""The probe: measures how far an optimizer's update looks, what it keeps, and what it needs; evidence, not proof."""

from truestep.optimizers.probe.keys import Key
from truestep.optimizers.probe.probing import probe
from truestep.optimizers.probe.result import Probe

__all__ = ["Key", "Probe", "probe"]
