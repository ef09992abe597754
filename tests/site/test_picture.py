"""The picture of speeds: it is what the results say, and compares rows of one run."""

from website import picture


def test_the_picture_is_what_the_results_say():
    assert picture.draw() == picture.PICTURE.read_text("utf-8")


def test_the_newest_run_with_both_rows_counts():
    def row(name, ms, date, commit="a", hardware=picture.GPUS):
        return {
            "workload": "m",
            "row": name,
            "median_ms": ms,
            "date": date,
            "commit": commit,
            "hardware": hardware,
        }

    rows = [
        *(row("ddp", 8.0, "2026-02"), row("step", 4.0, "2026-02")),
        *(row("ddp", 7.0, "2026-01"), row("step", 3.0, "2026-01")),
        row("step", 2.0, "2026-03"),
        *(row("ddp", 9.0, "2026-04"), row("step", 1.0, "2026-04", commit="b")),
        *(row("ddp", 2.0, "2026-05", hardware="one"), row("step", 1.0, "2026-05", hardware="one")),
    ]
    assert picture.find(rows, "m", "step") == (4.0, 8.0)
    assert picture.find(rows, "m", "dp") is None
    assert picture.find(rows, "n", "step") is None
