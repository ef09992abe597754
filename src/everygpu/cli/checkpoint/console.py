"""The console that the verbs share."""

from everygpu.cli.output import Output


def open_console() -> Output:
    """Return where results are printed; a pipe gets lines as long as they are."""
    console = Output(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = 10_000  # rich takes 80 columns for a pipe
    return console
