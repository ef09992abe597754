"""The fast layer: a whole training step in one call, optimizer state spread over the devices."""
