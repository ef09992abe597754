"""What a release says of itself in several places, each held against the one where it is decided."""

import re
from pathlib import Path

import pytest

import everygpu
from everygpu.cli import main
from everygpu.torch_private import TRIED
from tests.source import ROOT

REPOSITORY = Path(__file__).parents[1]
PROJECT = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
PAGE = (REPOSITORY / "docs" / "versions.md").read_text(encoding="utf-8")
UNTESTED = "untested"
WHOLE = "whole suite"


def cells_of(line):
    return tuple(cell.strip() for cell in line.strip("|\n").split("|"))


def rows_of(page):
    """Give the rows of the first table of a page, without its head, as tuples of cells."""
    lines = page.splitlines()
    first = next(i for i, line in enumerate(lines) if re.match(r"\|[-|]+\|$", line)) + 1
    last = next((i for i, line in enumerate(lines[first:], first) if not line.startswith("|")), len(lines))
    return [cells_of(line) for line in lines[first:last]]


ROWS = rows_of(PAGE)
"""Python, torch, where, what ran, and how it ended."""
RUN = [row for row in ROWS if row[3] != UNTESTED]


def numbers_of(version):
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def found(pattern, text=PROJECT):
    """Give what a pattern finds, which must be there."""
    matches = re.findall(pattern, text, re.MULTILINE)
    assert matches, pattern
    return matches


def test_rows_are_found():
    assert rows_of("text\n\n| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n\n| c |\n|---|\n| 5 |") == [
        ("1", "2"),
        ("3", "4"),
    ]
    assert {len(row) for row in ROWS} == {5}


def test_classifiers_are_the_pythons_that_something_ran_with():
    classified = found(r'"Programming Language :: Python :: (3\.\d+)"')
    assert sorted(classified, key=numbers_of) == sorted({row[0] for row in RUN}, key=numbers_of)


@pytest.mark.parametrize(
    ("pattern", "column", "words"),
    [(r'^requires-python = ">=([\d.]+)"', 0, "Python"), (r'^    "torch>=([\d.]+)",$', 1, "PyTorch")],
)
def test_the_oldest_versions_are_the_required_ones(pattern, column, words):
    (oldest,) = found(pattern)
    assert numbers_of(oldest) == min(numbers_of(row[column]) for row in (ROWS if column == 0 else RUN))
    assert f"{words} {oldest} or newer" in (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_the_whole_suite_ran_with_the_versions_that_count_as_tried():
    torches = {numbers_of(row[1]) for row in RUN if row[3].startswith(WHOLE)}
    assert (min(torches), max(torches)) == tuple(map(numbers_of, TRIED))


def test_continuous_integration_has_the_torch_of_the_constraints():
    (torch,) = found(r"^torch==([\d.]+)$", (REPOSITORY / "constraints.txt").read_text(encoding="utf-8"))
    (row,) = [row for row in ROWS if row[2].startswith("continuous integration")]
    assert row[1].startswith(torch)


def test_the_version_stands_in_one_place():
    assert "version" in found(r"^dynamic = \[(.*)\]$")[0]
    assert found(r'^path = "(.*)"$') == [(ROOT / "__init__.py").relative_to(REPOSITORY).as_posix()]
    others = [*REPOSITORY.glob("*.md"), REPOSITORY / "CITATION.cff", *(REPOSITORY / "docs").glob("*.md")]
    number = everygpu.__version__
    assert [path.name for path in others if path.name != "CHANGELOG.md" and number in path.read_text("utf-8")] == []


FORMS = sorted((REPOSITORY / ".github" / "ISSUE_TEMPLATE").glob("[0-9]*.yml"))


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_forms_ask_for_commands_that_exist(form):
    text = form.read_text(encoding="utf-8")
    assert set(re.findall(r"`everygpu ([a-z]+)", text)) <= set(main.commands)
    assert "`everygpu doctor`" in text or form.stem == "3-wish"


def test_security_names_the_variables_that_are_read():
    read = {
        name
        for path in ROOT.rglob("*.py")
        for name in re.findall(r"\bEVERYGPU_[A-Z0-9]+(?:_FILE)?\b", path.read_text())
    }
    assert read == set(re.findall(r"^\| `(EVERYGPU_\w+)`", (REPOSITORY / "SECURITY.md").read_text(), re.MULTILINE))
