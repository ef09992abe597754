"""Docstrings as Markdown: examples after ``::`` become blocks of Python code, and sections are told apart."""

import re
from typing import Any

from griffe import Extension, Object


class Examples(Extension):
    """Read everygpu's docstrings, which mark code as reStructuredText does."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(with_sections(obj.docstring.value))


def with_sections(text: str) -> str:
    """Put the empty line before each section that Griffe's parser looks for; say what a box of sources is about."""
    spaced = re.sub(r"\n+(?=(?:Args|Returns|Yields|Raises|Source):\n)", "\n\n", text)
    return spaced.replace("\n\nSource:\n", "\n\nMirrors:\n")


def as_markdown(text: str) -> str:
    """Replace ``::`` and the indented lines after it by a fenced block."""
    lines, result = text.splitlines(), list[str]()
    while lines:
        line = lines.pop(0)
        if not re.search(r"(^|\S)::$", line):
            result.append(line)
            continue
        result += [line.rstrip()[:-1].rstrip(":") + ":" if line.strip() != "::" else ""]
        block = take_block(lines)
        result += ["", "```python", *block, "```", ""]
    return "\n".join(result)


def take_block(lines: list[str]) -> list[str]:
    """Take the indented lines off the front, and give them without their indentation."""
    block = []
    while lines and (not lines[0].strip() or lines[0].startswith("    ")):
        block.append(lines.pop(0).removeprefix("    "))
    return "\n".join(block).strip("\n").splitlines()
