"""Text of others in front of a terminal."""

from everygpu.cli.output import harmless, plain


def test_what_a_terminal_would_obey_is_escaped():
    assert harmless("läyer.0 ✓") == "läyer.0 ✓"
    assert harmless("\x1b[31m\x07\n\u202e") == r"\x1b[31m\x07\n\u202e"
    assert plain("\x9b2J").plain == r"\x9b2J"


def test_lines_are_kept_on_request_only():
    assert harmless("a\n\x1bb", keep="\n") == "a\n\\x1bb"


def test_half_a_surrogate_pair_can_be_printed():
    assert harmless("\udcff") == r"\udcff"
