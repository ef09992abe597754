"""Processes that train one model together, as torchrun starts them."""
