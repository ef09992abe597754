"""Checkpoints without pickle: a directory of safetensors and JSON, written under another name and renamed.

1. A checkpoint is complete or absent: it is written next to the old one, synced, and renamed into place.
2. Other programs read it: ``model.safetensors`` has the bare model's names, ``sha256sum -c`` verifies it.
3. A load plans everything and then applies it: everything fits, or nothing is changed.
4. What is altered is noticed, named, and stepped over to the newest whole one of a run.
5. A directory is ours by its ``"format"``, a file in it by being listed; nothing else is moved, replaced or removed.
6. Any file of torch.save, safetensors, DCP, Transformers or Lightning loads, and no pickle is ever executed.
7. Names are matched without wrappers' prefixes; an optimizer's state by the names of its parameters.
8. A run is bound once, saved at an interval and at its end, rotated by age and by a metric, and resumed exactly.
9. A save in the background copies the state first; Ctrl-C, a signal or the end of the interpreter lose nothing.
10. Of several ranks the first writes, and the others wait for it.
"""

from everygpu.checkpoint.load import load
from everygpu.checkpoint.manager import CheckpointManager
from everygpu.checkpoint.save import save

__all__ = ["CheckpointManager", "load", "save"]
