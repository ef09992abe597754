"""Persistent copies of a module on the other devices, refreshed before each forward."""
