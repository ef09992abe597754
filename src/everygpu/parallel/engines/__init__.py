"""Ways to run the replicas of one call."""
