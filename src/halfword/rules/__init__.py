"""Update rules: pure FP32 arithmetic, written once; ``RULES`` by name."""

from halfword.rules.adam import adam, adamw
from halfword.rules.lion import lion
from halfword.rules.rule import Rule, Slot
from halfword.rules.sgd import sgd, sgd_momentum

RULES: dict[str, Rule] = {rule.name: rule for rule in (adamw, adam, lion, sgd, sgd_momentum)}

__all__ = ["RULES", "Rule", "Slot"]
