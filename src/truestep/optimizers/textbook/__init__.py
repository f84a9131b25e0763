"""The textbook: update rules in float64, in the symbols of their papers, and how far a kernel may lie from them.

`expected` judges one param of a live optimizer; `rule` and `RULES` give the rules themselves. See docs/textbook.md.
"""

from truestep.optimizers.textbook.definition import Rule
from truestep.optimizers.textbook.expectation import expected, hyper_of, with_rate
from truestep.optimizers.textbook.operand import Arithmetic, Operand
from truestep.optimizers.textbook.table import RULES, references, rule, rule_of

__all__ = ["RULES", "Arithmetic", "Operand", "Rule", "expected", "hyper_of", "references", "rule", "rule_of", "with_rate"]
