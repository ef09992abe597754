"""Parameters out to the replicas and gradients back, within a recording."""
