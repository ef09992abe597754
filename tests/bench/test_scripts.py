"""benchmarks/feeding.py and checkpoints.py, as they are called."""

import json

import pytest

from tests.scripts import run_script


@pytest.fixture
def rows_of(capsys):
    """Run a script, and read the lines of JSON that it prints after the machine."""

    def run(script, *options):
        run_script(f"benchmarks/{script}.py", *options)
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()[1:]]

    return run


@pytest.mark.parametrize("model", ["tiny", "tests.bench.own:small_bert"])
def test_feeding_on_replicas(rows_of, model):
    (row,) = rows_of("feeding", "--cpu", 2, "--models", model, "--rounds", 2, "--steps", 2, "--rows", 3)
    assert (row["model"], row["num_devices"], row["rows_per_device"]) == (model, 2, 3)
    assert 0 < row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    assert row["there_ms"] > 0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_way_saves_and_loads(tmp_path, capsys):
    run_script("benchmarks/checkpoints.py", "--bytes", 1, "--rounds", 1, "--directory", tmp_path)
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert len(lines) == 11
    assert all(float(median) > 0 for _, median, _ in lines)
    assert not list(tmp_path.iterdir())
