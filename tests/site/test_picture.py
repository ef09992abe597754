"""The picture of speeds: it is what the reports say, and compares rows of one run."""

import json

import pytest
from website import picture


def test_the_picture_is_what_the_reports_say():
    assert picture.draw() == picture.PICTURE.read_text("utf-8")


def test_the_newest_report_with_both_rows_counts(monkeypatch, tmp_path):
    def write(name, date, *rows):
        machine = {"date": date}
        rows = [{"model": "m", "num_devices": num, "peer": peer, "ms": ms} for num, peer, ms in rows]
        (tmp_path / name).write_text(json.dumps({"machine": machine, "rows": rows}))

    write("a.json", "2026-02", (2, "ddp", 8.0), (2, "step", 4.0))
    write("b.json", "2026-01", (2, "ddp", 7.0), (2, "step", 3.0))
    write("alone.json", "2026-03", (2, "step", 2.0))
    write("four.json", "2026-04", (4, "ddp", 2.0), (4, "step", 1.0))
    monkeypatch.setattr(picture, "REPORTS", tmp_path)
    assert picture.Row("m", "step").read() == (4.0, 8.0)
    with pytest.raises(SystemExit, match="no report has dp of m"):
        picture.Row("m", "dp").read()


TABLE = """
| what | ms |
|---|---|
| m | 9.9 |

| model | DistributedDataParallel | loop | by |
|---|---|---|---|
| m, small | 8.00 (7.9 to 8.1) | **4.00** (3.9 to 4.1) | graphs |
| n | 8.00 | 2.00, a later run | graphs |
"""


def test_a_table_is_read_by_its_columns(monkeypatch, tmp_path):
    (tmp_path / "r.md").write_text(TABLE)
    monkeypatch.setattr(picture, "REPORTS", tmp_path)
    assert picture.Line("r", "m", "loop").read() == (4.0, 8.0)
    for begins, column in (("n", "loop"), ("m", "step"), ("what", "ms")):
        with pytest.raises(SystemExit, match=f"r has no {column} of {begins}"):
            picture.Line("r", begins, column).read()
