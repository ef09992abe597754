"""Variables that ``outside_model`` reads from another module."""

SCALE = 1.0
TABLE = {"a": 1.0, "nested": [1.0]}


def shift(x):
    return x + OFFSET


OFFSET = 0.0
