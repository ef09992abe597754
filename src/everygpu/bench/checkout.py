"""The checkout that the package is imported from."""

import os
import subprocess
from pathlib import Path

import everygpu


def find_commit() -> str | None:
    """Name the commit of the package's source.

    Returns:
        Short, with ``-dirty`` after changes; None where the package is not imported from a git checkout of everygpu:
        an installed one may lie inside of another project's, and the command may be run in any.
    Source:
        ``git describe --always --dirty``.
    """
    package = Path(everygpu.__file__).resolve().parent
    root = package.parents[1]
    if package != root / "src" / "everygpu" or _git(root, "rev-parse", "--show-toplevel") != str(root):
        return None
    return _git(root, "describe", "--always", "--dirty", "--exclude=*")


def _git(root: Path, *command: str) -> str | None:
    # A hook that runs this sets GIT_DIR to the repository that it is of.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(["git", *command], cwd=root, env=environ, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() or None
