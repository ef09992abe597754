"""Replicas with interpreters of their own: helper processes on the devices after the first."""
