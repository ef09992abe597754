"""Exit codes with which a run ends, and what they say to what has started it."""

BAD_NUMBERS = 5
"""Numbers of the training are no longer finite, or replicas' parameters differ."""
STUCK = 6
"""The watchdog has ended a run that stood still, or that has lost a GPU."""
INTERRUPTED = 130
"""After Ctrl-C: 128 and the signal, as a shell says it."""
STOPPED = 143
"""A signal has asked the run to end, and its checkpoint is saved: 128 and SIGTERM."""
