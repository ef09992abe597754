"""Refuse a built site that loads anything from the network: it is read offline, too."""

import re
import sys
from pathlib import Path

SITE = Path(__file__).resolve().parents[1] / "build" / "site"
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


def main() -> None:
    pages = [*SITE.rglob("*.html"), *SITE.rglob("*.css")]
    found = {load for path in pages for load in loads_from_network(path.read_text("utf-8"))}
    if found or not pages:
        raise SystemExit(f"website/check.py: pages must load nothing from the network, found {found or 'no pages'}.")


if __name__ == "__main__":
    sys.exit(main())
