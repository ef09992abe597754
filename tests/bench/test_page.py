"""A report as one HTML file."""

import re
from html.parser import HTMLParser

import pytest
from website import check

from everygpu.bench.page import draw_bars, write_page
from everygpu.bench.report import COLUMNS, add_efficiency, read_json, write_json
from everygpu.errors import OptionError
from tests.bench.test_report import FAILED, MACHINE, ROWS, row


class Tags(HTMLParser):
    """Sees that all tags are closed in their order, and keeps them."""

    def __init__(self, text):
        super().__init__()
        self.seen, self.opened, self.data = [], [], []
        self.feed(text)
        self.close()
        assert self.opened == []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag != "meta":
            self.opened.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.opened.pop() == tag

    def handle_data(self, data):
        self.data.append(data)


def test_a_page_has_a_plot_and_a_table_for_each_model_and_names_where_it_ran():
    page = write_page(MACHINE, [*add_efficiency([*ROWS, FAILED]), row("ours", 2, 9.0, model="tiny")])
    tags = Tags(page)
    names = [name for name, _ in tags.seen]
    assert (names.count("svg"), names.count("table"), names.count("rect")) == (2, 2, 5)
    assert [name for name in names if name in ("script", "link", "img")] == []
    assert check.loads_from_network(page) == []
    for words in (
        "2 x NVIDIA H200; 8 CPU threads",
        "Commit: abc1234.",
        "ValueError: mine",
        "gpt2, 16 rows for each GPU",
    ):
        assert words in "".join(tags.data)
    assert {*COLUMNS, "160.00 (144.00 to 192.00)", "80.0%"} <= set(tags.data)
    assert "Traceback" not in page
    assert "prefers-color-scheme: dark" in page
    assert "width=device-width" in page


def test_bars_are_as_long_as_rows_are_fast():
    """The longest thing is step's spread: 240 samples/s at 9/10 of the time."""
    tags = Tags(draw_bars(add_efficiency(ROWS))).seen
    bars = [(t["class"], float(t["width"].rstrip("%"))) for name, t in tags if name == "rect"]
    scale = 96 / (240 / 0.9)
    assert bars == [
        (kind, pytest.approx(rate * scale, abs=0.01))
        for kind, rate in (("peer", 100), ("peer", 125), ("peer", 200), ("ours", 240))
    ]
    spreads = [[float(t[x].rstrip("%")) for x in ("x1", "x2")] for _, t in tags if t.get("class") == "spread"]
    assert spreads[3] == [pytest.approx(240 / 1.2 * scale, abs=0.01), 96]
    marks = {t["x1"] for _, t in tags if t.get("class") == "ideal"}
    assert marks == {f"{2 * 125 * scale:.2f}%"}


def test_a_mark_beyond_all_bars_is_inside_of_the_plot():
    assert re.findall('class="ideal" x1="([0-9.]+)%"', draw_bars(add_efficiency(ROWS[:3]))) == ["96.00"] * 3


def test_without_a_single_gpu_there_is_no_mark():
    assert 'class="ideal"' not in draw_bars(add_efficiency(ROWS[2:]))


def test_names_are_text_and_no_tags():
    failed = FAILED | {"model": "<i>m", "error": "ValueError: <script>alert(1)</script>"}
    page = write_page(MACHINE | {"system": "<b>"}, [failed])
    assert [name for name, _ in Tags(page).seen if name in ("i", "b", "script", "svg")] == []
    assert "&lt;script&gt;" in page


def test_what_was_written_is_read_again(tmp_path):
    rows = add_efficiency([*ROWS, FAILED])
    (tmp_path / "rows.json").write_text(write_json(MACHINE, rows))
    assert read_json(tmp_path / "rows.json") == (MACHINE, rows)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"machine": {}, "rows": [{"ms": 1}]}', "3", "\x00"])
def test_another_file_is_refused(tmp_path, text):
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(OptionError, match=r"needs a file that .* has written, got .*rows\.json\."):
        read_json(tmp_path / "rows.json")
