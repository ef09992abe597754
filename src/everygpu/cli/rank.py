"""A process of torchrun's: ``python -m everygpu.cli.rank [-m] script arguments`` runs it as ``everygpu run`` does."""

import sys

from everygpu.cli.script import run_script

if __name__ == "__main__":
    is_module = sys.argv[1] == "-m"
    script, *args = sys.argv[1 + is_module :]
    sys.exit(run_script(script, args, is_module))
