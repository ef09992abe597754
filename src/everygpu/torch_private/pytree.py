"""torch's trees of containers; ``torch.utils.pytree`` will be public, and is in no release that is supported."""

from torch.utils import _pytree

SUPPORTED_NODES = _pytree.SUPPORTED_NODES
"""Container classes that torch, or a library, has registered, with what flattens and rebuilds them."""

tree_flatten = _pytree.tree_flatten
"""Split a tree into its leaves and what rebuilds it."""

tree_unflatten = _pytree.tree_unflatten
"""Rebuild a tree from leaves."""

tree_map_only = _pytree.tree_map_only
"""Build the same tree with a function called on the leaves of one class."""
