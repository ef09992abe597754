"""Rewrite the code that torch's compiler generates for one GPU into the same code for another.

What is generated names its GPU in a handful of places: guards, streams and the properties of each kernel. These are
known by form. Source in which anything else could name a GPU is left alone: then each GPU is compiled for by itself.
"""

import re

_NAMED = re.compile(
    r"""(?P<before>
        torch\.cuda\._DeviceGuard\( | torch\.cuda\.set_device\( | \bget_raw_stream\( |
        \bDeviceProperties\(type='cuda',\ index= | \bdevice\(type='cuda',\ index= | ['"]cuda:
    )(?P<index>\d+)(?P<after>[,)'"])""",
    re.VERBOSE,
)
"""The forms in which a GPU is named."""

_SUSPECT = re.compile(
    r"""cuda:\d | \bcuda['"],\s*(?:index\s*=\s*)?\d | \btorch\.cuda\.\w+\( | DeviceGuard\( | \bset_device\( |
        \bget_raw_stream\( | \bDeviceProperties\( | \bdevice\((?!type='cpu'\)) | \bempty_strided_p2p\( |
        \basync_compile\.(?!triton\b|wait\b|cpp)\w+""",
    re.VERBOSE,
)
"""What may name a GPU in a form that we don't know, or code that isn't in the source."""

_GUARD = "torch.cuda._DeviceGuard("
"""In all code that Inductor's Python wrapper generates for a GPU; not in that of its C++ wrapper."""

_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)


def retarget(source: str, old: int, new: int) -> str | None:
    """Rewrite generated code for another GPU.

    Args:
        source: What Inductor generated for one GPU.
        old: The index of that GPU.
        new: The index of the other.
    Returns:
        The source with the other index; None where that may not be all it takes.
    Source:
        ``torch/_inductor/codegen/wrapper.py`` and ``codegen/cuda/device_op_overrides.py``.
    """
    found = list(_NAMED.finditer(source))
    if _GUARD not in source or any(int(match["index"]) != old for match in found):
        return None
    if _SUSPECT.search(_COMMENT.sub("", _NAMED.sub("", source))):
        return None
    return _NAMED.sub(lambda match: f"{match['before']}{new}{match['after']}", source)
