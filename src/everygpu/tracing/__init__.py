"""A few steps of a script under torch's profiler, and what their time went to."""
