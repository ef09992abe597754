"""Settings for the whole process, torch's and Python's, read in one process and applied in another."""

import contextlib
import operator
import os
import sys
from importlib.machinery import ModuleSpec
from typing import Any

import torch

from everygpu.parallel.cuda_graphs.guards import BACKEND_PATHS, SDP_BACKENDS, backend_settings

Settings = tuple[Any, ...]


def read_settings() -> Settings:
    """Return the settings now.

    They are the directory and where modules are looked for; and torch's default dtype, precisions, determinism and
    kernels of attention.
    """
    directory = _directory()
    return (
        directory,
        [entry or directory for entry in sys.path],
        torch.get_default_dtype(),
        *_determinism(),
        torch.get_num_threads(),
        *backend_settings(),
    )


def with_imported(settings: Settings) -> Settings:
    """Add where modules have been imported from that wouldn't be found any more.

    An empty entry of ``sys.path`` is the working directory, which may have changed since; or an entry was removed.
    """
    directory, search_path, *others = settings
    return directory, [*search_path, *sorted(_places_of_modules() - set(search_path))], *others


def apply_settings(wanted: Settings) -> None:
    """Set what differs."""
    directory, search_path, dtype, is_deterministic, warns_only, num_threads, *others = wanted
    if directory != _directory():
        with contextlib.suppress(OSError):  # it was removed
            os.chdir(directory)
    sys.path[:] = search_path
    torch.set_default_dtype(dtype)
    if _determinism() != (is_deterministic, warns_only):  # setting it imports torch's compiler, for a second
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
    for path, value in zip(BACKEND_PATHS, others):
        owner, _, name = path.rpartition(".")
        found = operator.attrgetter(owner)(torch.backends)
        if getattr(found, name) != value:
            setattr(found, name, value)
    for name, value in zip(SDP_BACKENDS, others[len(BACKEND_PATHS) :]):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(value)


def _places_of_modules() -> set[str]:
    specs = [getattr(m, "__dict__", {}).get("__spec__") for m in list(sys.modules.values())]
    found = set()
    for spec in specs:
        if isinstance(spec, ModuleSpec) and "." not in spec.name:
            for file in spec.submodule_search_locations or [spec.origin or ""]:
                if os.path.basename(file).split(".")[0] == spec.name:
                    found.add(os.path.dirname(file))
    return {place for place in found if os.path.isdir(place)}


def _determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""
