"""How a process of ours starts another Python."""

import sys
from pathlib import Path

# The path is set before anything is imported. Where the interpreter puts the working directory, there is an empty name;
# it puts none under PYTHONSAFEPATH.
_CODE = """import sys
sys.path[:not sys.path[0]] = [{root!r}]
import runpy
runpy.run_module({module!r}, run_name="__main__")
"""


def python_command(module: str, *args: str) -> list[str]:
    """Write the command that runs a module of this package, as it is here, and no file of the working directory.

    Args:
        module: As after ``python -m``: a package, or a module of one.
        args: What follows it in ``sys.argv``.
    Source:
        ``python -m``, which looks into the working directory first, where a ``random.py`` of the user, or of another
        one, would be run; ``python -P -m``, which Python 3.10 lacks, and which the scripts run there would inherit.
    """
    code = _CODE.format(root=str(Path(__file__).parents[1]), module=module)
    return [sys.executable or "python", "-c", code, *args]
