"""What replicas of several processes have in common: the parameters at the start, and gradients."""
