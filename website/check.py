"""Refuse a built site that loads anything from the network, or whose search misses what people type."""

import html
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from website.prepare import WORD_ENDS

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
    """Name the searches that don't show their section first."""
    sections = json.loads((SITE / "search" / "search_index.json").read_text("utf-8"))["docs"]
    if any(section["location"].startswith(NOT_SEARCHED) for section in sections):
        raise SystemExit(f"website/check.py: {NOT_SEARCHED} is a table of figures. Leave it out of the search.")
    expected = {d["title"]: d["location"] for d in sections if d["location"].startswith(QUESTIONS)}
    expected |= json.loads(SEARCHES.read_text("utf-8"))
    search = Search(sections)
    return [words for words, place in expected.items() if search.first(words, is_page="#" not in place) != place]


class Search:
    """Searches as Material for MkDocs does in the browser, by the same library: beginnings of words, weighted alike."""

    def __init__(self, sections: list[dict[str, Any]]) -> None:
        from lunr import get_default_builder
        from lunr.stemmer import stemmer
        from lunr.trimmer import trimmer

        builder = get_default_builder()
        for function in (trimmer, stemmer):
            builder.pipeline.remove(function)
        builder.search_pipeline.remove(stemmer)
        builder.b(0)
        builder.ref("location")
        builder.field("title", boost=1000)
        builder.field("text")
        for section in sections:
            words = {name: words_of(html.unescape(TAG.sub(" ", section[name]))) for name in ("title", "text")}
            builder.add({"location": section["location"], **words}, {"boost": section.get("boost", 1)})
        self._index = builder.build()

    def first(self, text: str, *, is_page: bool) -> str | None:
        """Give the place that is shown first: the best section of the best page, or that page."""
        from lunr.query import Query
        from lunr.stop_word_filter import WORDS

        words = words_of(text)
        query = self._index.create_query()
        for word in words:
            query.term(word, wildcard=Query.WILDCARD_TRAILING, use_pipeline=False)
        scores = {}
        for found in self._index.query(query):
            seen = found["match_data"].metadata
            hit = {word: any(term.startswith(word) for term in seen) for word in words}
            counted = [is_hit for word, is_hit in hit.items() if is_hit or word not in WORDS]
            share = ("#" not in found["ref"]) + sum(counted) / len(counted)
            scores[found["ref"]] = found["score"] * (1 + share**2)
        best = sorted(scores, key=scores.__getitem__, reverse=True)
        page = best[0].partition("#")[0] if best else None
        return page if is_page else next((place for place in best if place.startswith(f"{page}#")), None)


def words_of(text: str) -> list[str]:
    return [word for word in re.split(WORD_ENDS, text.lower()) if word]


def main() -> None:
    pages = [*SITE.rglob("*.html"), *SITE.rglob("*.css")]
    found = {load for path in pages for load in loads_from_network(path.read_text("utf-8"))}
    if found or not pages:
        raise SystemExit(f"website/check.py: pages must load nothing from the network, found {found or 'no pages'}.")
    if missed := missed_searches():
        raise SystemExit(f"website/check.py: the search must find the right section first, also for {missed}.")


if __name__ == "__main__":
    sys.exit(main())
