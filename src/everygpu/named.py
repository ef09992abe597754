"""A function of the user's, by the name that options of the command line give it."""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from everygpu.errors import OptionError


def find_function(name: str) -> Callable[[], Any]:
    """Return the function ``module:function`` or ``file.py:function``.

    Raises:
        OptionError: there is no such file, module or function, or the file runs as a script.
        Exception: what the module raises by itself.
    """
    place, _, function_name = name.rpartition(":")
    if not place:
        raise OptionError(f"{name!r} names no function. Write for instance train.py:build.")
    try:
        function = getattr(_load(place), function_name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # the module is there; what it imports itself is not
        raise OptionError(f"No module {place!r}: {error}. Run the command in the directory of the file.") from error
    except SystemExit as stop:
        raise OptionError(
            f"{name} exits with {stop.code!r}: it runs as a script. Put parse_args() and the loop under "
            f"if __name__ == '__main__', or write parse_args([])."
        ) from stop
    if not callable(function):
        raise OptionError(f"No function {function_name!r} in {place}. Check the name.")
    return function  # type: ignore[no-any-return]


def _load(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return import_module(place)
    # No name that is imported: a file json.py must not become the module json.
    spec = spec_from_file_location(f"<{Path(place).stem}>", place)
    if spec is None or spec.loader is None or not Path(place).is_file():
        raise OptionError(f"No file {place!r}. Check the path.")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses and pickles look for it
    spec.loader.exec_module(module)
    return module
