"""The one error of a broken rule; knows no rule."""


class RuleError(Exception):
    """A kernel did what the documentation says that the hardware or the compiler does not allow.

    The message names the instruction, what it was given, and the rule.
    """
