"""A tensor whose rows stay on the devices that computed them."""
