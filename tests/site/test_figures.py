"""README's figures are computed from benchmarks/results, in both languages; so is the page of what was measured."""

import re

import pytest
from website import figures, measured, picture

NO_FIGURES = re.compile(
    r"""```.*?```|`[^`]*`|\]\([^)]*\)|(?:src|width)="[^"]*"  # code, and where links and pictures lead
    |(?:ResNet|GPT|Apache)-[\d.]+|H[12]00|FSDP2|x86-64|bf16|(?:PyTorch|Python)\ [\d.]+|64\ (?:rows|行)|为\ 1(?=\W\D)""",
    re.DOTALL | re.VERBOSE,
)


def speeds_beside_ddp(way):
    """The least and the most of the picture."""
    runs = [run for model in picture.MODELS for name, run in picture.bars(model).items() if name == way]
    times = [run.ddp_ms / run.ms for run in runs]
    return [min(times), max(times)]


def speeds_on_one_gpu():
    """The fastest model, BERT, and by how many percent GPT-2 is faster."""
    rows = [row for row in measured.read("steps") if row["hardware"] == "NVIDIA H200"]
    ms = {(row["workload"], row["row"]): row["median_ms"] for row in rows}
    times = {model: ms[model, "single"] / ms[model, "step"] for model, row in ms if row == "step"}
    assert max(times, key=times.__getitem__) == "resnet18"
    return [max(times.values()), times["bert"], 100 * times["gpt2"] - 100]


def interrupts():
    """How often Ctrl-C came to everygpu; nothing may have gone wrong."""
    (row,) = [row for row in measured.read("faults") if (row["workload"], row["row"]) == ("Ctrl-C", "everygpu")]
    assert row["value"] == 0
    return [int(re.fullmatch(r"of (\d+) wrong", row["unit"])[1])]


@pytest.mark.parametrize(("end", "models"), [("md", "eight models"), ("zh-CN.md", "八个可以捕获的模型")])
def test_each_figure_of_readme_is_measured(end, models):
    text = (picture.ROOT / f"README.{end}").read_text("utf-8")
    said = re.findall(r"\d+(?:\.\d+)?", NO_FIGURES.sub("", text))
    measured = [speed for way in ("dp", "loop", "step") for speed in speeds_beside_ddp(way)]
    measured += [*interrupts(), *speeds_on_one_gpu()]
    assert len(said) == len(measured), f"a figure of README must be of the results, got {said}"
    assert said == [f"{value:.{len(figure.partition('.')[2])}f}" for figure, value in zip(said, measured)]
    assert models in text
    assert len(picture.MODELS) == 8
    for page in ("data-parallel", "reliability"):
        assert f"](docs/{page}.md" in text
    assert "](docs/measured.md" in text


def test_the_page_of_what_was_measured_is_up_to_date():
    assert measured.page() == measured.PAGE.read_text("utf-8"), "python -m website.measured"


def test_rows_of_results_have_one_form():
    for path in measured.RESULTS.glob("*.json"):
        for row in measured.read(path.stem):
            assert {"commit", "hardware", "versions", "workload", "row", "date", "note"} <= row.keys()
            assert ("median_ms" in row) != ({"value", "unit"} <= row.keys())
            assert row.get("least_ms", 0) <= row.get("median_ms", 0) <= row.get("most_ms", 1e9)


def test_runs_of_one_day_are_lines_of_their_own_as_are_machines():
    row = {"workload": "gpt2", "note": "", "date": "2026-11-20", "hardware": "one"}
    first = [{**row, "commit": "a", "row": "step_x2", "median_ms": 2.0, "least_ms": 1.0, "most_ms": 3.0}]
    second = [{**row, "commit": "b", "row": "ddp", "median_ms": 4.0, "changed_since": True}]
    other = [{**row, "commit": "b", "row": "ddp", "median_ms": 5.0, "hardware": "two"}]
    assert list(measured.table(first + second, {})) == [
        "| | DDP | TrainStep, 2 replicas | when |",
        "|---|---|---|---|",
        "| GPT-2 124M |  | 2.00 (1.00 to 3.00) | a, 2026-11-20 |",
        "| GPT-2 124M | 4.00 |  | b, 2026-11-20 † |",
    ]
    assert list(measured.table(other + second, {"one": "A", "two": "B"})) == [
        "| | on | DDP | when |",
        "|---|---|---|---|",
        "| GPT-2 124M | A | 4.00 | b, 2026-11-20 † |",
        "| GPT-2 124M | B | 5.00 | b, 2026-11-20 |",
    ]


def bench_row(way, num_devices, **more):
    common = {"commit": "a", "card": "GPU", "date": "2026-12-01", "versions": {"torch": "2.11"}, "precision": "bf16",
              "model": "gpt2", "ms": 2.0, "ms_min": 1.0, "ms_max": 3.0, "peak_gib": [1.0, 2.0],
              "last_loss": 4.0}  # fmt: skip
    return {**common, "way": way, "num_devices": num_devices, **more}


def test_steps_have_a_table_for_each_question_with_the_same_columns():
    rows = [bench_row("bare", 1), bench_row("ddp", 2, last_loss=4.04), bench_row("dp", 2, error="mine")]
    text = "\n".join(figures.step_tables(rows))
    one, two = text.split("## Training steps, ")[1:]
    assert one.count("| gpt2 | 2.00 (1.00 to 3.00) |") == 1
    assert two.count("|  | `bare` | `ddp` | `dp` |") == 3
    assert "| gpt2 | +0.00% | +1.00% | fails |" in two


def test_the_page_of_models_counts_what_is_captured_and_why_not():
    fast = {"ms": 1.0, "engine": "capture"}
    slow = {"ms": 2.0, "engine": "threads", "loss_difference": 0.01, "reason": "it | prints"}
    row = {**bench_row("coverage", 1), "bare": {"ms": 4.0, "engine": ""}, "graph": {"error": "mine"}}
    made = [{**row, "model": "b", "loop": slow, "step": slow}, {**row, "model": "a", "loop": slow, "step": fast}]
    page = figures.coverage_page([*made, {**bench_row("coverage", 1), "not_made": "mine"}])
    assert "2 public models" in page
    assert "0 are captured" in page
    assert "In 2 a loss" in page
    assert "| `a` | 4.00 | fails | 2.00 | 1.00, captured |\n| `b` | 4.00 | fails | 2.00 | 2.00 |" in page
    assert "| 1 | it \\| prints |" in page
