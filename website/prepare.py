"""Write what MkDocs builds the site from, into build/: the pages of docs/, the examples and the reference.

The pages in docs/ stay where they are, so that their links work on a code host as well. Needs nothing but Python::

    python website/prepare.py && mkdocs build --strict --config-file build/mkdocs.en.yml
"""

import ast
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "everygpu"
EXAMPLES = ROOT / "examples"

LANGUAGES = {"en": "en", "zh-CN": "zh"}
"""The languages of the site, with the theme's names of them."""

TITLES = {
    "Start": "快速开始",
    "A real project": "真实项目",
    "How do I …?": "常见操作",
    "Migration": "迁移",
    "Troubleshooting": "故障排查",
    "Guides": "指南",
    "Integrations": "集成示例",
    "Reference": "API 参考",
    "How it works": "工作原理",
    "Benchmarks": "性能测试",
}
"""The navigation in Chinese; pages that are in English only keep their titles."""

ENGLISH_ONLY = '!!! note "本页只有英文版"'
"""What a page without a Chinese text says below its title, on the Chinese site."""

WORD_ENDS = r"""[\s\u200b\-_,:;!?#=\[\]()"/`\u2018-\u201d\u3001-\u3011\uff01-\uff1f]+|\.(?!\d)|'\B|\B'"""
"""Where words end in the search. In Chinese, jieba puts a zero-width space between the words that it finds."""

FAST = "is-my-model-fast.md"
"""The page that ``python -m website.figures`` writes once its models are measured."""

ROOMS = {
    "parallel": "Data parallelism",
    "step": "Training step",
    "feed": "Feeding",
    "checkpoint": "Checkpoints",
    "devices": "Devices",
    "ranks": "Several processes",
    "watchdog": "Watchdog",
    "errors": "Errors",
}
"""The rooms of the public API, each with the title of its page of the reference."""
PACKAGES = ("devices", "parallel", "step")
"""Packages with public names beside those of ``everygpu`` itself."""


def main() -> None:
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    generated = {**reference(), **examples()}
    for language in LANGUAGES:
        write_pages(ROOT / "build" / "pages" / language, {**own_pages(language), **generated})
        write(ROOT / "build" / f"mkdocs.{language}.yml", configuration(language))


def write_pages(folder: Path, pages: Mapping[str, str]) -> None:
    for name, text in pages.items():
        write(folder / name, text)
    shutil.copytree(ROOT / "docs" / "assets", folder / "assets")
    shutil.copyfile(ROOT / "website" / "site.css", folder / "assets" / "site.css")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def configuration(language: str) -> str:
    """Fill in the parts of the navigation that are made of what is there, and the language."""
    text = (ROOT / "website" / "mkdocs.yml").read_text(encoding="utf-8")
    if not (ROOT / "docs" / FAST).exists():
        text = re.sub(rf"^ *- .*: {re.escape(FAST)}.*\n", "", text, flags=re.MULTILINE)
    parts = {
        "@separator": WORD_ENDS,
        "@examples": [{path.stem: f"examples/{path.stem}.md"} for path in example_files()],
        "@reference": ["reference/index.md", *({ROOMS[room]: f"reference/{room}.md"} for room in exports_by_room())],
    }
    if language != "en":
        text = text.replace("pages/en", f"pages/{language}").replace("site_dir: site", f"site_dir: site/{language}")
        text = text.replace("  name: material", f"  name: material\n  language: {LANGUAGES[language]}")
        head, nav = text.split("\nnav:\n")
        text = head + "\nnav:\n" + re.sub(r"(?<=- )([^:\n\"]+)(?=:)", lambda found: TITLES.get(found[1], found[1]), nav)
    for name, entries in parts.items():
        text = text.replace(f'"{name}"', json.dumps(entries))  # JSON is YAML
    return text


def own_pages(language: str) -> dict[str, str]:
    """Give the pages of docs/, with links that lead within the site, and drawings as a part of the page.

    ``page.zh-CN.md`` is the Chinese text of ``page.md``; a page without one is in English in both.
    """
    english = {path.name: path.read_text("utf-8") for path in (ROOT / "docs").glob("*.md") if path.suffixes == [".md"]}
    own = {path.name.replace(f".{language}.", "."): path for path in (ROOT / "docs").glob(f"*.{language}.md")}
    translated = with_anchors({name: path.read_text("utf-8") for name, path in own.items()}, english)
    if own:
        english = {name: text.replace("\n", f"\n\n{ENGLISH_ONLY}\n", 1) for name, text in english.items()}
    return {name: with_drawings(with_links(joined(text))) for name, text in (english | translated).items()}


def with_anchors(pages: Mapping[str, str], english: Mapping[str, str]) -> dict[str, str]:
    """Give headings the anchors of the English page, so that a link to a section holds in both languages.

    A translated page may link to its own language's anchors, which a code host has; they become the English ones.
    """
    pairs = {name: list(zip(headings(pages[name]), headings(english[name]), strict=True)) for name in pages}
    anchors = {(name, host_slug(own[1])): slug(other[1]) for name in pages for own, other in pairs[name]}
    return {name: with_links_to(anchors, name, with_ids(pages[name], pairs[name])) for name in pages}


Heading = tuple[str, str]
"""A line, and the text in it."""


def with_ids(text: str, pairs: list[tuple[Heading, Heading]]) -> str:
    for (line, _), (_, english) in pairs:
        text = text.replace(f"\n{line}\n", f"\n{line} {{ #{slug(english)} }}\n", 1)
    return text


def with_links_to(anchors: Mapping[tuple[str, str], str], name: str, text: str) -> str:
    def link(found: re.Match[str]) -> str:
        page = f"{found[1]}.md" if found[1] else name
        return found[0].replace(f"#{found[2]}", f"#{anchors.get((page, found[2]), found[2])}")

    return re.sub(r"\]\((?:([\w-]+)\.zh-CN\.md)?#([^)]+)\)", link, text)


def headings(text: str) -> list[Heading]:
    """Give a page's headings below its title."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [(found[0], found[1]) for found in re.finditer(r"^##+ (.*)$", prose, re.MULTILINE)]


def slug(heading: str) -> str:
    """Make the anchor of a heading, as Python-Markdown does."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading, flags=re.ASCII).strip().lower())


def host_slug(heading: str) -> str:
    """Make the anchor of a heading, as code hosts do."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def joined(text: str) -> str:
    """Join lines within Chinese text: a browser shows the end of a line as a space."""
    text = re.sub(r"(?<=[\u3000-\u9fff\uff00-\uffef])\n *(?=\[?[\u4e00-\u9fff\uff08])", "", text)
    return re.sub(r"(?<=[\u3001\u3002\uff08-\uff1b])\n *(?=[A-Za-z\[]|`(?!``|-))", "", text)


def with_links(text: str) -> str:
    """Point links at the site's pages: of examples, and of the same language."""
    text = re.sub(r"(\]\([\w-]+)\.zh-CN\.md", r"\1.md", text)
    return re.sub(r"\]\(\.\./examples/(\w+)\.(?:py|ipynb)", r"](examples/\1.md", text)


def with_drawings(text: str) -> str:
    """Put drawings into the page itself, where they have its colours; the code host shows them as pictures."""

    def inline(match: re.Match[str]) -> str:
        drawing = (ROOT / "docs" / match["path"]).read_text("utf-8")
        return f"<figure>\n{drawing.strip()}\n</figure>"

    return re.sub(r"^!\[[^\]]*\]\((?P<path>[\w/]+\.svg)\)$", inline, text, flags=re.MULTILINE)


def exports() -> dict[str, str]:
    """Give each public name with the module that it is imported from, as the packages' ``__init__.py`` say.

    Names that only a package below ``everygpu`` has begin with it: ``parallel.scatter``.
    """
    body = parse(SOURCE / "__init__.py").body
    (home,) = (node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOME")
    names: dict[str, str] = ast.literal_eval(home)
    for package in PACKAGES:
        for node in parse(SOURCE / package / "__init__.py").body:
            for alias in node.names if isinstance(node, ast.ImportFrom) else ():
                if alias.name not in names:
                    names[f"{package}.{alias.name}"] = str(node.module).removeprefix("everygpu.")
    return names


def exports_by_room() -> dict[str, list[str]]:
    """Sort the public names by room, in the order of ``ROOMS``."""
    found: dict[str, list[str]] = {}
    for name, module in exports().items():
        found.setdefault(module.split(".")[0].lstrip("_"), []).append(name)
    if unknown := set(found) - set(ROOMS):
        raise SystemExit(f"website/prepare.py: ROOMS must have a title for {sorted(unknown)}. Add one.")
    return {room: sorted(found[room], key=str.lower) for room in ROOMS if room in found}


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def definition(name: str, module: str) -> ast.ClassDef | ast.FunctionDef:
    """Find where a module defines a name, or the module that it imports it from does."""
    name, folder = name.rpartition(".")[2], SOURCE.joinpath(*module.split("."))
    path = folder.with_suffix(".py") if folder.with_suffix(".py").exists() else folder / "__init__.py"
    for node in statements(parse(path)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and any(name == (a.asname or a.name) for a in node.names):
            return definition(name, str(node.module).removeprefix("everygpu."))
    raise SystemExit(f"website/prepare.py: found no {name} in {path}, where everygpu/__init__.py has it from.")


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Give a module's statements, and those that only type checkers read."""
    for node in tree.body:
        yield from node.body if isinstance(node, ast.If) else (node,)


def undocumented(name: str, node: ast.ClassDef | ast.FunctionDef) -> Iterator[str]:
    """Name what a reader of the reference would miss: the docstring of an export, or of a public method of it."""
    if ast.get_docstring(node) is None:
        yield name
    for member in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(member, ast.FunctionDef) and not (member.name.startswith("_") or is_known(member)):
            yield from undocumented(f"{name}.{member.name}", member)


def is_known(function: ast.FunctionDef) -> bool:
    """Whether a method is documented elsewhere: a property's setter, or what torch prints modules with."""
    return function.name == "extra_repr" or any(
        ast.unparse(decorator).endswith((".setter", ".deleter")) for decorator in function.decorator_list
    )


def reference() -> dict[str, str]:
    """Write a page for each room, and one that lists all; an export without a docstring ends the build."""
    missing = [m for name, module in exports().items() for m in undocumented(name, definition(name, module))]
    if missing:
        raise SystemExit(f"website/prepare.py: public names must have docstrings, found none for {', '.join(missing)}.")
    pages, index = {}, ["# Reference", ""]
    for room, names in exports_by_room().items():
        whole = ["everygpu.errors"] if room == "errors" else [anchor(name, room) for name in names]
        pages[f"reference/{room}.md"] = f"# {ROOMS[room]}\n\n" + "\n".join(f"::: {name}\n" for name in whole)
        index += [f"## [{ROOMS[room]}]({room}.md)", ""]
        index += [f"* [`{name}`]({room}.md#{anchor(name, room)}): {summary(name)}" for name in names] + [""]
    return pages | {"reference/index.md": "\n".join(index)}


def anchor(name: str, room: str) -> str:
    if room == "errors":
        return f"everygpu.errors.{name}"
    # A package may hold a module and a function of one name, such as parallel.gather: the function's own home is clear.
    package, _, plain = name.rpartition(".")
    return f"everygpu.{exports()[name]}.{plain}" if package else f"everygpu.{name}"


def summary(name: str) -> str:
    first = (ast.get_docstring(definition(name, exports()[name])) or "").split("\n\n")[0]
    return " ".join(first.replace("``", "`").split()).removesuffix("::").rstrip(":.") + "."


def example_files() -> list[Path]:
    return sorted([*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")])


def examples() -> dict[str, str]:
    """Write a page for each example: of a script its docstring, then its code; of a notebook its cells."""
    page = {".py": script, ".ipynb": notebook}
    return {f"examples/{path.stem}.md": page[path.suffix](path) for path in example_files()}


def script(path: Path) -> str:
    code = path.read_text("utf-8")
    text = (ast.get_docstring(ast.parse(code)) or "").replace("``", "`")
    return f"# {path.stem}\n\n{text}\n\n```python\n{code}```\n"


def notebook(path: Path) -> str:
    """Write text, code, and below it what it printed or returned."""
    parts = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        shown = ["".join(out.get("text") or out["data"]["text/plain"]) for out in cell.get("outputs", ())]
        parts += [f"```text\n{text.rstrip()}\n```" for text in shown]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
