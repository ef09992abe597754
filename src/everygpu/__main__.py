"""``python -m everygpu`` is the ``everygpu`` command."""

from everygpu.cli import main

if __name__ == "__main__":
    main(prog_name="everygpu")
