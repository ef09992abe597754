"""The pages of the site: their code runs, both languages say the same, and the reference has every export."""

import contextlib
import importlib
import io
import json
import os
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest
import torch
from website import check, hooks, prepare

from everygpu.bench.training import find_training, list_batches
from everygpu.cli import main
from tests.exports import EXPORTS
from tests.ranks.harness import run_ranks
from tests.site.running import blocks, commands, page_path, run_page

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ["README", *sorted(path.stem for path in DOCS.glob("*.md") if path.suffixes == [".md"])]
CHINESE = ["README", "how-do-i", "index", "migration"]
"""What a newcomer reads first is there in both languages."""
RUN = [
    page
    for page in PAGES
    if page not in ("benchmarks", "gallery", "how-do-i", "index", "migration", "recipes")
    and blocks(page_path(page).read_text("utf-8"))
]
"""The pages whose code runs as it stands; others are judged by what they do, real models in tests/clients."""


@pytest.fixture
def two_replicas(monkeypatch, tmp_path):
    """Have models without a list of devices get two replicas on the CPU, as a machine with two GPUs has."""
    module = importlib.import_module("everygpu.parallel.data_parallel")  # the package has a function of this name
    monkeypatch.setattr(module, "own_devices", lambda group: ["cpu"] * 2)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)  # a page asks for them


@pytest.mark.usefixtures("two_replicas")
def test_start_does_what_it_says(capsys):
    names = run_page("index")
    printed = capsys.readouterr().out.splitlines()
    loss = re.fullmatch(r"loss (0\.\d+) on 2 replicas", printed[0])
    assert loss is not None
    assert float(loss[1]) < 0.2
    assert torch.equal(names["bare"].weight.cpu(), names["bare"].weight)


@pytest.mark.usefixtures("two_replicas")
def test_migration_trains_on_two_replicas(capsys, monkeypatch):
    module = importlib.import_module("everygpu.parallel.data_parallel")
    made = []
    monkeypatch.setattr(module, "own_devices", lambda group: made.append(group) or ["cpu"] * 2)
    names = run_page("migration")
    assert len(made) == 3  # a model for each program that it comes from
    assert len(capsys.readouterr().out.splitlines()) == 2  # an epoch's mean, twice
    assert Path("model.pt").exists()
    names.clear()


@pytest.mark.usefixtures("two_replicas", "warm_python")
@pytest.mark.parametrize("page", RUN)
def test_code_of_pages_runs(page):
    run_page(page).clear()  # what a page registers with torch refers to its names, and they to replicas


@pytest.mark.usefixtures("two_replicas")
def test_questions_have_the_answers_they_show(capsys):
    names = run_page("how-do-i")
    printed = capsys.readouterr().out
    assert "threads threads" in printed  # on the CPU nothing is captured
    assert "over 8 rows" in printed
    assert [step for step, figures in names["logged"] if figures["loss"] > 0] == [2]
    assert names["mean"].num_rows == 8
    assert names["predictions"].shape == (8, 3)
    assert names["output"].shape == (4,)
    assert names["collate"]([[1, 2], [3] * 65]).shape == (2, 128)
    assert type(names["model"]) is torch.nn.Sequential
    assert {parameter.requires_grad for parameter in names["model"][0].parameters()} == {False}
    assert torch.load("model.pt").keys() == names["model"].state_dict().keys()
    names.clear()
    questions = re.split(r"^## ", page_path("how-do-i").read_text("utf-8"), flags=re.MULTILINE)[1:]
    assert len(questions) == 44
    assert all("```" in text and len(re.findall(r"\]\(", text)) == 1 for text in questions)


UNDER_RANKS = (
    "Log to TensorBoard or Weights & Biases (wandb)",
    "Show a progress bar (tqdm, rich)",
    "Save the best model",
    "Stop early: early stopping",
    "Resume training after a crash, or on another number of GPUs",
    "Evaluate on a test set",
    "Train on two machines: multi-node training",
)
"""Questions whose answers say that they hold for several processes."""


def answer_as_rank(folder):
    """Run these answers, and give what this rank has printed, logged and averaged."""
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        names = run_page("how-do-i", only=UNDER_RANKS)
    return out.getvalue(), names["logged"], names["best"], names["total"].num_rows


@pytest.mark.usefixtures("warm_python")
def test_answers_hold_for_two_processes(tmp_path):
    one, other = run_ranks(answer_as_rank, tmp_path, size=2, folder=tmp_path / "results")
    assert "over 8 rows" in one[0]
    assert "epoch loss" not in other[0]
    assert [step for step, _ in one[1]] == [2]
    assert other[1] == []
    assert one[2:] == other[2:]


@pytest.mark.usefixtures("two_replicas")
def test_benchmarks_can_take_its_functions(monkeypatch):
    module = ModuleType("train")
    vars(module).update(run_page("benchmarks"))
    monkeypatch.setitem(sys.modules, "train", module)
    one, several = (find_training(f"train:{name}").batch for name in ("bench", "bench_of_many_lengths"))
    assert len(list_batches(one)) == 1
    assert len(list_batches(several)) == 26


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_pages_have_their_options(page):
    for arguments in commands(page):
        parse(main, arguments)


def test_options_that_do_not_exist_are_seen():
    parse(main, ["checkpoint", "show", "run/last"])
    parse(main, ["run", "--gpus", "2", "train.py", "--lr", "1"])
    for wrong in (["run", "--gpu-count", "2", "train.py"], ["checkpoint", "shew", "run/last"]):
        with pytest.raises(click.NoSuchOption if wrong[0] == "run" else click.UsageError):
            parse(main, wrong)


def parse(command, arguments):
    """Have click read a command's options, without running it; its files don't have to be there."""
    if isinstance(command, click.Group) and not arguments[0].startswith("-"):
        _, command, arguments = command.resolve_command(click.Context(command), arguments)
        return parse(command, arguments)
    try:
        command.make_context("everygpu", [*arguments])
    except click.exceptions.Exit:
        pass  # --version
    except click.BadParameter as error:
        if "does not exist" not in str(error):
            raise


def shape(text):
    """Give what both languages have in common: levels of headings, code, rows of tables, and where links lead."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return {
        "headings": [len(found) for found in re.findall(r"^(#+) ", prose, re.MULTILINE)],
        "code": re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL),
        "items": len(re.findall(r"^(?:\*|\d\.|\|) ", prose, re.MULTILINE)),
        "links": sorted(link.replace(".zh-CN.md", ".md").split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", prose)),
    }


def test_pages_for_newcomers_are_in_chinese():
    assert sorted(path.name.split(".")[0] for path in DOCS.glob("*.zh-CN.md")) == CHINESE[1:]


@pytest.mark.parametrize("page", CHINESE)
def test_chinese_pages_say_the_same(page):
    english, chinese = (page_path(page + ending).read_text("utf-8") for ending in ("", ".zh-CN"))
    assert shape(chinese) == shape(english)


def anchors(text):
    """Give what a link may name on a page, as code hosts make it of headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ["README", "README.zh-CN"])
def test_a_fresh_machine_s_two_commands_are_there(page):
    text = page_path(page).read_text("utf-8")
    targets = set(re.findall(r"^(\w[\w-]*):", (DOCS.parent / "Makefile").read_text("utf-8"), re.MULTILINE))
    first = re.findall(r"^make (\w+)", text, re.MULTILINE)
    assert first[:2] == ["demo", "test"]
    assert set(re.findall(r"`make ([\w-]+)`", text)) | set(first) <= targets


@pytest.mark.parametrize("page", ["README", "README.zh-CN"])
def test_links_of_the_readme_lead_somewhere(page):
    path = page_path(page)
    links = [link.split("#") for link in re.findall(r"\]\(([^)]+)\)", path.read_text("utf-8"))]
    assert {name for name, *_ in links if not (path.parent / name).exists()} == set()
    if page != "README":  # a Chinese text is linked where there is one
        pages = {name for name, *_ in links if name.endswith(".md")} - {"README.md"}
        assert {name for name in pages if (path.parent / name).with_suffix(".zh-CN.md").exists()} == set()
    named = {(name, anchor) for name, *rest in links for anchor in rest}
    assert named
    assert {(name, a) for name, a in named if a not in anchors((path.parent / name).read_text("utf-8"))} == set()


def test_a_page_that_lacks_something_is_seen():
    page = "# A\n\n```python\nx = 1\n```\n\n* [b](c.md)\n"
    assert shape(page) == shape(page.replace("A", "甲").replace("c.md", "c.zh-CN.md"))
    for old, new in (("# A", "A"), ("x = 1", "x = 2"), ("* ", ""), ("c.md", "d.md")):
        assert shape(page) != shape(page.replace(old, new))


def test_the_reference_has_each_export_once():
    pages = prepare.reference()
    named = [line for name in pages for line in pages[name].splitlines() if line.startswith("::: ")]
    homes = {name: f"{value.__module__}.{value.__name__}" for name, value in EXPORTS.items() if "." in name}
    expected = [f"::: {homes.get(name, f'everygpu.{name}')}" for name in EXPORTS if name != "EveryGPUError"]
    assert sorted(named) == sorted([*expected, "::: everygpu.errors"])


def test_missing_docstrings_are_named(monkeypatch, tmp_path):
    (tmp_path / "__init__.py").write_text('_HOME = {"f": "step", "A": "step"}\n')
    monkeypatch.setattr(prepare, "PACKAGES", ())
    (tmp_path / "step.py").write_text(
        'def f(): pass\nclass A:\n    "Do."\n    def g(self): pass\n    def _h(self): pass\n'
    )
    monkeypatch.setattr(prepare, "SOURCE", tmp_path)
    with pytest.raises(SystemExit, match=r"found none for f, A\.g\."):
        prepare.reference()


def test_a_page_of_results_is_in_the_navigation_once_it_is_written(monkeypatch, tmp_path):
    shutil.copytree(DOCS.parent / "website", tmp_path / "website")
    monkeypatch.setattr(prepare, "ROOT", tmp_path)
    assert prepare.FAST not in prepare.configuration("en")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / prepare.FAST).touch()
    assert prepare.FAST in prepare.configuration("zh-CN")


def test_links_lead_within_the_site():
    page = "[b](../examples/charlm.py) [n](../examples/notebook.ipynb) [c](index.zh-CN.md#d)"
    assert prepare.with_links(page) == ("[b](examples/charlm.md) [n](examples/notebook.md) [c](index.md#d)")


def test_the_gallery_has_each_example():
    names = [path.name for path in prepare.example_files()]
    listed = re.findall(r"^\| \[(\S+)\]\(\.\./examples/\1\)", (DOCS / "gallery.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == names
    assert {f"examples/{Path(name).stem}.md" for name in names} == set(prepare.examples())


def test_a_notebook_becomes_a_page(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["# A\n", "b"]},
        {
            "cell_type": "code",
            "source": ["x = 1\n", "x"],
            "outputs": [{"text": ["c\n"]}, {"data": {"text/plain": ["1"]}}],
        },
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    page = prepare.notebook(tmp_path / "a.ipynb")
    assert page == "# A\nb\n\n```python\nx = 1\nx\n```\n\n```text\nc\n```\n\n```text\n1\n```\n"


def test_sections_have_the_same_anchors_in_both_languages():
    english = {"a.md": "# A\n\n## A `b`, c\n\n```sh\n## d\n```\n\n### E-f\n"}
    chinese = "# 甲\n\n## 乙 `b`、丙\n\n```sh\n## d\n```\n\n### 丁\n[戊](#丁) [己](a.zh-CN.md#乙-b丙) [庚](#e-f)\n"
    assert prepare.with_anchors({"a.md": chinese}, english)["a.md"] == (
        "# 甲\n\n## 乙 `b`、丙 { #a-b-c }\n\n```sh\n## d\n```\n\n### 丁 { #e-f }\n"
        "[戊](#e-f) [己](a.zh-CN.md#a-b-c) [庚](#e-f)\n"
    )


def test_lines_of_chinese_text_are_joined():
    assert prepare.joined("一行。\n  二行 a\n三\n\n四\n* 五\nsix\nseven") == "一行。二行 a\n三\n\n四\n* 五\nsix\nseven"
    assert prepare.joined("见\n  [第二](b.md)。\n`a`、\nb。\n```\nc。\n1. 二\n") == (
        "见[第二](b.md)。`a`、b。\n```\nc。\n1. 二\n"
    )


def test_options_and_short_code_stay_on_one_line():
    short, long = "<code>engine=&quot;graphs&quot;</code>", "<code>everygpu run --processes my-train.py</code>"
    block = "<pre><code>a\n</code></pre>"
    assert hooks.on_page_content(short + long + block) == (
        '<code class="short">engine=&quot;graphs&quot;</code>'
        '<code>everygpu run <span class="short">--processes</span> my-train.py</code>' + block
    )


def test_cells_of_a_wide_table_know_their_column():
    def table(*names):
        cells = "".join(f"<td>{name.lower()}</td>" for name in names)
        return f"<table><tr>{''.join(f'<th>{n}</th>' for n in names)}</tr><tr>{cells}</tr></table>"

    assert hooks.on_page_content(table("A", "B", "C", "D")) == table("A", "B", "C", "D")
    wide = hooks.on_page_content(table("A", "<b>B</b>", "C", "D", "E"))
    assert wide.startswith("<table data-wide>")
    assert re.findall(r'data-label="(.)"', wide) == ["A", "B", "C", "D", "E"]


def test_what_the_network_would_give_is_seen():
    assert check.loads_from_network('<script src="https://a.b/c.js"></script><style>@import "//x/y.css"</style>') != []
    assert check.loads_from_network('<link rel="stylesheet" href="https://fonts.a/css">') != []
    assert (
        check.loads_from_network(
            '<a href="https://a.b"></a><script src="c.js"></script><link rel="canonical" href="https://a">'
        )
        == []
    )
