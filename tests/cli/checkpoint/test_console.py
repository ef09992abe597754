"""Text from files, and the progress bar."""

import io

from rich.console import Console

from everygpu.cli.checkpoint import text


def test_harmless():
    assert text.harmless("läyer.0 ✓") == "läyer.0 ✓"
    assert text.harmless("\x1b[31m\x07\n\u202e") == r"\x1b[31m\x07\n\u202e"


def show_bar(monkeypatch, is_terminal):
    stream = io.StringIO()
    monkeypatch.setattr(text, "Console", lambda **_: Console(file=stream, force_terminal=is_terminal, width=80))
    with text.open_progress("hashing", 4) as progress:
        progress.advance(progress.task_ids[0], 2)
        progress.refresh()
    return stream.getvalue()


def test_a_bar_on_a_terminal_only(monkeypatch):
    assert "hashing" in show_bar(monkeypatch, is_terminal=True)
    assert "50%" in show_bar(monkeypatch, is_terminal=True)
    assert show_bar(monkeypatch, is_terminal=False) == ""
