"""What MkDocs calls while it builds the site."""

import itertools
import re
from html import escape, unescape
from posixpath import dirname, relpath
from typing import Any

from jinja2 import pass_context

MANY_COLUMNS = 4
"""A table of more columns is too wide for a phone."""


class Relative(str):
    """A link that is relative to its page already; MkDocs itself knows of no pages above those of one language."""

    __slots__ = ()


def on_env(env: Any, **kwargs: Any) -> Any:
    """Leave such links as they are."""
    resolve = env.filters["url"]

    @pass_context
    def url(context: Any, value: str) -> str:
        return value if isinstance(value, Relative) else resolve(context, value)

    env.filters["url"] = url
    return env


def on_page_context(context: dict[str, Any], *, page: Any, config: Any, **kwargs: Any) -> None:
    """Have the choice of languages lead to the same page; both languages have the same pages."""
    here = "/zh-CN/" if config.theme["language"] == "zh" else "/"
    for choice in config.extra["alternate"]:
        there = "/" if choice["lang"] == "en" else f"/{choice['lang']}/"
        choice["link"] = Relative(relpath(there + page.url, dirname(here + page.url)))


def on_page_markdown(markdown: str, *, page: Any, **kwargs: Any) -> None:
    """Leave out the column of neighbours where there are none; find questions first, tables of figures not at all."""
    search = {"how-do-i.md": {"boost": 4}, "measured.md": {"exclude": True}}
    if page.file.src_uri in search:
        page.meta["search"] = search[page.file.src_uri]
    if page.parent is None or page.file.src_uri == "measured.md":  # whose tables need the room
        page.meta.setdefault("hide", ["navigation"])


def on_page_content(html: str, **kwargs: Any) -> str:
    """Mark what stays on one line: short code within text, and the options of longer code."""
    html = re.sub(r"<table>.*?</table>", with_labels, html, flags=re.DOTALL)
    return re.sub(r"<code>([^<\n]+)</code>", mark, html)


def with_labels(match: re.Match[str]) -> str:
    """Give the cells of a table of many columns their column's name, by which a phone shows rows as lists."""
    names = [re.sub(r"<[^>]+>", "", name) for name in re.findall(r"<th[^>]*>(.*?)</th>", match[0], re.DOTALL)]
    if len(names) <= MANY_COLUMNS:
        return match[0]
    labels = itertools.cycle(names)
    table = re.sub(r"<td", lambda _: f'<td data-label="{escape(unescape(next(labels)))}"', match[0])
    return table.replace("<table>", "<table data-wide>", 1)


def mark(match: re.Match[str]) -> str:
    if len(unescape(match[1])) <= 24:
        return f'<code class="short">{match[1]}</code>'
    options = re.sub(r"(?<![^ ])-[^ ]{1,23}(?![^ ])", r'<span class="short">\g<0></span>', match[1])
    return f"<code>{options}</code>"
