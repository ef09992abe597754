"""Kernels that add up all devices' gradients, update one device's share, and write the new values to all.

Each device runs them on its own chunks, reading and writing the other devices' memory directly: every gradient crosses
the wire once, every parameter once, and nothing is kept in between. Whatever is in memory, sums and updates are worked
out in float32, and rounded once.

All memory is found block by block, in tables of addresses that have a column for each block of the device's chunks: so
one launch serves a bucket as well as all of them.

The modules need Triton, so they are imported where a kernel is launched.
"""
