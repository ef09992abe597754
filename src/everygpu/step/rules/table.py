"""All rules. An optimizer more is a file here, a kernel, and a name in the table."""

from torch.optim import Optimizer

from everygpu.step.rules import adam, sgd
from everygpu.step.rules.rule import UpdateRule

RULES: tuple[UpdateRule, ...] = (adam.RULE, sgd.RULE)


def find_rule(optimizer: Optimizer) -> UpdateRule | None:
    """Return the rule for an optimizer of exactly one of torch's classes; None where there is none."""
    return next((rule for rule in RULES if type(optimizer) in rule.optimizers), None)
