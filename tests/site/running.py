"""Run the code of a page from top to bottom, as one script.

``setups/NAME.py``, where it exists, runs before it: the model, loader and files that a reader of NAME.md has.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from torch import nn

ROOT = Path(__file__).parents[2]
SETUPS = Path(__file__).parent / "setups"
FENCE = re.compile(
    r"^```(?P<kind>python|diff)(?: title=\"(?P<title>[^\"]*)\")?\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
SHELL = re.compile(r"^```sh\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def page_path(name: str) -> Path:
    """Find a page: README, or one of docs/."""
    return ROOT / f"{name}.md" if name.startswith("README") else ROOT / "docs" / f"{name}.md"


def blocks(text: str) -> list[tuple[str, str]]:
    """Give the Python code of a page as pairs of title and code; of a diff, both sides."""
    sides = [
        side for found in FENCE.finditer(text) for side in sides_of(found["kind"], found["title"] or "", found["code"])
    ]
    return [(title, code) for title, code in sides if code.strip()]


def sides_of(kind: str, title: str, code: str) -> list[tuple[str, str]]:
    if kind == "python":
        return [(title, code)]
    lines = code.splitlines(keepends=True)
    before, after = ("".join(line[1:] or "\n" for line in lines if not line.startswith(sign)) for sign in "+-")
    return [("before", before), (title, after)]


def run_page(name: str, *, only: Sequence[str] = ()) -> dict[str, Any]:
    """Run a page's blocks in one namespace; what stands on a "before" side only has to compile.

    With ``only``, run those below these headings.
    """
    names: dict[str, Any] = {}
    setup = SETUPS / f"{name.lower().replace('-', '_')}.py"
    if setup.exists():
        exec(compile(setup.read_text("utf-8"), str(setup), "exec"), names)
    text = page_path(name).read_text("utf-8")
    assert len(FENCE.findall(text)) == len(re.findall("```(?:python|diff)", text)), "put a block outside of its list"
    if only:
        sections = sections_of(text)
        text = "".join(sections[heading] for heading in only)
    with mock.patch.object(nn, "DataParallel", nn.DataParallel):  # put back after pages that replace it
        for number, (title, code) in enumerate(blocks(text), 1):
            compiled = compile(code, f"<{name}.md, block {number}>", "exec")
            if not title.startswith("before"):
                exec(compiled, names)
    return names


def sections_of(text: str) -> dict[str, str]:
    """Give what stands below each heading of a page."""
    parts = re.split(r"^#+ (.*)\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2]))


def code_by_heading(name: str) -> dict[str, str]:
    """Give the Python code below each heading that has some."""
    sections = sections_of(page_path(name).read_text("utf-8"))
    codes = {title: "".join(code for _, code in blocks(text)) for title, text in sections.items()}
    return {title: code for title, code in codes.items() if code}


def commands(name: str) -> Iterator[list[str]]:
    """Give the arguments of each ``everygpu`` command of a page."""
    for found in SHELL.finditer(page_path(name).read_text("utf-8")):
        for line in found["code"].splitlines():
            if line.startswith("everygpu "):
                yield shlex.split(line, comments=True)[1:]
