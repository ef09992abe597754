"""Rows, measured in the process of a test."""

import time

from everygpu.bench.measure import Conditions, measure_row
from everygpu.bench.ways import WAYS

OWN = "tests.bench.own:"


def measure(way, name=f"{OWN}classifier", **changed):
    """Measure a row on replicas on the CPU, under other conditions where they are named."""
    conditions = {
        "model": name,
        "way": way,
        "device_type": "cpu",
        "num_devices": WAYS[way].num_devices(2),
        "rows": None,
        "precision": "fp32",
        "num_rounds": 3,
        "round_s": 0.0,
        "started_s": time.time() - 100,
    }
    return measure_row(Conditions(**{**conditions, **changed}))
