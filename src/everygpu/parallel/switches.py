"""Switches for what stands on torch's insides: on for the versions of torch it was tried with, off for newer ones.

Off, each declines, which is always right: steps, or compiling, take longer.
"""

import torch

from everygpu.torch_private import is_tried

COMPILES_ONCE = True
"""What was compiled for one GPU is loaded for the others (``load_graph``). GPT-2 starts within 36.8 s on two GPUs with
it, and within 37.8 s on one. Without it each further GPU is compiled for as the first one was."""


PROVES_FORWARDS = True
"""Dynamo tells whether a forward may be recorded (``whole_graph``), in 0.5 s and 77 us a call for a transformer of 102
modules on the CPU. Without it no forward is."""


def is_on(switch: bool) -> bool:
    """Tell whether what a switch of these is for may be done with this torch."""
    return switch and is_tried(torch.__version__)
