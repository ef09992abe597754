"""Which devices there are, which of them to use, and the seeds they draw from.

``everygpu run`` chooses devices with ``select``, ``visible`` and ``nvml`` before torch is loaded.
"""
