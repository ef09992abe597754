"""Split a call into the arguments of each replica."""
