"""Rows, measured in the process of a test."""

import time

from everygpu.bench.rows import Conditions, measure_row

OWN = "tests.bench.own:"


def measure(peer, name=f"{OWN}classifier", **changed):
    """Measure a row on replicas on the CPU, under other conditions where they are named."""
    conditions = {
        "model": name,
        "peer": peer,
        "device_type": "cpu",
        "num_devices": 2,
        "rows": None,
        "precision": "fp32",
        "compiled": False,
        "num_rounds": 3,
        "num_steps": 2,
        "started_s": time.time() - 100,
    }
    return measure_row(Conditions(**{**conditions, **changed}))
