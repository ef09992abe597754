"""README's figures: each is computed from a report, in both languages, and the page it links to names that report."""

import re

import pytest
from website import picture

ONE_GPU, FAULTS = "2026-11-23-eleventh", "2026-11-23-faults"
NO_FIGURES = re.compile(
    r"""```.*?```|`[^`]*`|\]\([^)]*\)|(?:src|width)="[^"]*"  # code, and where links and pictures lead
    |(?:ResNet|GPT|Apache)-[\d.]+|H200|bf16|(?:PyTorch|Python)\ [\d.]+|64\ (?:rows|行)|为\ 1(?=\W\D)""",
    re.DOTALL | re.VERBOSE,
)


def speeds_beside_ddp(way):
    """The least and the most of the picture."""
    runs = [bars[way].read() for bars in picture.MODELS.values() if way in bars]
    times = [run.ddp_ms / run.ms for run in runs]
    return [min(times), max(times)]


def speeds_on_one_gpu():
    """The fastest model, BERT, and by how many percent GPT-2 is faster."""
    lines = [cells for cells in picture.tables(read_report(ONE_GPU)) if "eager" in cells]
    times = {cells["model"]: picture.number(cells["eager"]) / picture.number(cells["`TrainStep`"]) for cells in lines}
    assert max(times, key=times.__getitem__).startswith("ResNet-18")
    return [max(times.values()), times["BERT-base, 40 lengths"], 100 * times["GPT-2 124M"] - 100]


def interrupts():
    """How often Ctrl-C came to everygpu; nothing may have gone wrong."""
    wrong, of = map(int, re.search(r"^\| Ctrl-C \| (\d+) of (\d+) \|", read_report(FAULTS), re.MULTILINE).groups())
    assert wrong == 0
    return [of]


def read_report(name):
    return (picture.REPORTS / f"{name}.md").read_text("utf-8")


@pytest.mark.parametrize(("end", "models"), [("md", "eight models"), ("zh-CN.md", "八个可以录制的模型")])
def test_each_figure_of_readme_is_that_of_a_report(end, models):
    text = (picture.ROOT / f"README.{end}").read_text("utf-8")
    said = re.findall(r"\d+(?:\.\d+)?", NO_FIGURES.sub("", text))
    measured = [speed for way in ("dp", "loop", "step") for speed in speeds_beside_ddp(way)]
    measured += [*interrupts(), *speeds_on_one_gpu()]
    assert len(said) == len(measured), f"a figure of README must be of a report, got {said}"
    assert said == [f"{value:.{len(figure.partition('.')[2])}f}" for figure, value in zip(said, measured)]
    assert models in text
    assert len(picture.MODELS) == 8
    for page, report in (("data-parallel", ONE_GPU), ("reliability", FAULTS)):
        assert f"](docs/{page}.md" in text
        assert f"reports/{report}.md" in (picture.ROOT / "docs" / f"{page}.md").read_text("utf-8")
