"""Refuse a built site that loads anything from the network, or whose search misses what people type."""

import json
import re
import sys
from pathlib import Path

SITE = Path(__file__).resolve().parents[1] / "build" / "site"
QUESTIONS = "how-do-i.html#"
NOT_SEARCHED = "measured.html"
SEARCHES = Path(__file__).with_name("searches.json")
"""What people type, with the section that comes first."""
TAG = re.compile(r"<[^>]+>")
LOADS = re.compile(
    r"""<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc\s*=\s*["']?(?:https?:)?//[^"'\s>]+
    | <link\b(?=[^>]*\brel\s*=\s*["']?(?:stylesheet|preconnect|preload|icon))
      [^>]*\bhref\s*=\s*["']?(?:https?:)?//[^"'\s>]+
    | (?:url\(|@import\s+)["']?(?:https?:)?//[^"')\s]+
    """,
    re.VERBOSE,
)


def loads_from_network(text: str) -> list[str]:
    """Name what a page or a style sheet would load from elsewhere; links to be followed are none."""
    return LOADS.findall(text)


def missed_searches() -> list[str]:
    """Name the searches that don't find their section first, by the titles and texts that the search has."""
    from lunr import lunr

    sections = json.loads((SITE / "search" / "search_index.json").read_text("utf-8"))["docs"]
    if any(section["location"].startswith(NOT_SEARCHED) for section in sections):
        raise SystemExit(f"website/check.py: {NOT_SEARCHED} is a table of figures. Leave it out of the search.")
    fields = [{"field_name": "title", "boost": 1000}, "text"]  # as Material for MkDocs weights them
    documents = [({**d, "text": TAG.sub(" ", d["text"])}, {"boost": d.get("boost", 1)}) for d in sections]
    index = lunr(ref="location", fields=fields, documents=documents)
    expected = {d["title"]: d["location"] for d in sections if d["location"].startswith(QUESTIONS)}
    expected |= json.loads(SEARCHES.read_text("utf-8"))
    found = {words: index.search(" ".join(re.findall(r"[\w'.]+", words))) for words in expected}
    return [words for words, place in expected.items() if place != next(iter(found[words]), {}).get("ref")]


def main() -> None:
    pages = [*SITE.rglob("*.html"), *SITE.rglob("*.css")]
    found = {load for path in pages for load in loads_from_network(path.read_text("utf-8"))}
    if found or not pages:
        raise SystemExit(f"website/check.py: pages must load nothing from the network, found {found or 'no pages'}.")
    if missed := missed_searches():
        raise SystemExit(f"website/check.py: the search must find the right section first, also for {missed}.")


if __name__ == "__main__":
    sys.exit(main())
