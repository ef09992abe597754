"""``python -m everygpu`` is the ``everygpu`` command; ``--rank [-m] script arguments`` is a process of torchrun's."""

import sys

from everygpu.cli import main
from everygpu.cli.script import run_script

if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        is_module = sys.argv[2] == "-m"
        script, *args = sys.argv[2 + is_module :]
        sys.exit(run_script(script, args, is_module))
    main(prog_name="everygpu")
