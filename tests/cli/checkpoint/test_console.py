"""The progress bar."""

import io

from rich.console import Console

from everygpu.cli.checkpoint import console


def show_bar(monkeypatch, is_terminal):
    stream = io.StringIO()
    monkeypatch.setattr(console, "Console", lambda **_: Console(file=stream, force_terminal=is_terminal, width=80))
    with console.open_progress("hashing [/a]\x1b", 4) as progress:
        progress.advance(progress.task_ids[0], 2)
        progress.refresh()
    return stream.getvalue()


def test_a_bar_on_a_terminal_only(monkeypatch):
    assert r"hashing [/a]\x1b" in show_bar(monkeypatch, is_terminal=True)
    assert "50%" in show_bar(monkeypatch, is_terminal=True)
    assert show_bar(monkeypatch, is_terminal=False) == ""
