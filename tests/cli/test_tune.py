"""``everygpu tune``: an unchanged script, run up to its DataLoader, or for two steps at another size."""

import contextlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import everygpu
from everygpu.cli import main, observe, tune

ROOT = Path(__file__).parents[2]
HEAD = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
def loader(num, **options):
    return DataLoader(TensorDataset(torch.arange(float(num)), torch.arange(num)), **options)
"""
TRAIN = """
def main():
    print("begin", *sys.argv[1:])
    for x, y in loader(100, batch_size=8):
        if len(x) > 20:
            raise torch.OutOfMemoryError("does not fit")
        print("step", len(x), len(y))
    print("end")

if __name__ == "__main__":
    main()
"""
SAVES = """
import everygpu, io
from safetensors.torch import save_file
from torch import save
def save_all(value):
    t = torch.full((2,), float(value))
    checkpoints.save(value, t=t)
    background.save(value, t=t)
    everygpu.save("own", t=t)
    torch.save(t, "dotted.pt")
    save(t, f="imported.pt")
    save_file({"t": t}, "t.safetensors")
    memory = io.BytesIO()
    torch.save(t, memory)
    memory.seek(0)
    assert torch.load(memory)[0] == value
    with open("opened.pt", "wb") as file: torch.save(t, file)
    assert torch.load("opened.pt")[0] == value  # what opening has emptied must not stay empty
checkpoints = everygpu.CheckpointManager("kept", keep=1)
background = everygpu.CheckpointManager("written", keep=1, asynchronous=True)
with background:
    save_all(1)
    try:
        for step, _ in enumerate(loader(9), 2): save_all(step)
    finally:
        save_all(5)
"""
AT_THE_END = """
import everygpu
def make(): return {}
def is_used():
    data = make()
    for _ in data: state = data.state_dict()
    return state
data, state = make(), is_used()
data.load_state_dict(state)
for epoch in range(data.epoch if hasattr(data, "epoch") else 0, 1):
    for x, y in data: print(len(x))
"""
WITH_A_POSITION = [
    "everygpu.ResumableLoader(loader(9, batch_size=3, shuffle=True))",
    "everygpu.Feeder(everygpu.ResumableLoader(loader(9, batch_size=3)), 'cpu')",
    "everygpu.Feeder(loader(9, batch_size=3, shuffle=True), 'cpu')",
]


def read_saved():
    """Read what SAVES writes, from the working directory."""
    files = [torch.load("dotted.pt"), torch.load("imported.pt"), load_file("t.safetensors")["t"]]
    runs = [everygpu.load(name)["t"] for name in ("kept", "written", "own")]
    return [int(t[0]) for t in (*files, *runs)]


@pytest.fixture(autouse=True)
def same_interpreter(monkeypatch):
    """Put back what running a script in this process changes."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    plain = DataLoader.__iter__, torch.save, everygpu.CheckpointManager.save
    yield
    assert (DataLoader.__iter__, torch.save, everygpu.CheckpointManager.save) == plain


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "train.py"
        path.write_text(HEAD + textwrap.dedent(text))
        return str(path)

    return write


class TestFindLoader:
    def test_the_script_ends_where_it_iterates(self, script, capsys):
        loader, code = observe.find_loader(script(TRAIN), ["--lr", "3"], 1)
        assert (loader.batch_size, code) == (8, 0)
        assert capsys.readouterr().out == "begin --lr 3\n"

    def test_another_loader(self, script):
        text = "for _ in range(2):\n  list(loader(4))\nfor x in loader(9, batch_size=3): print(len(x))"
        loader, _ = observe.find_loader(script("small = loader(4)\nlist(small); list(small)\n" + text), [], 3)
        assert len(loader.dataset) == 4
        loader, _ = observe.find_loader(script("small = loader(4)\nlist(small); list(small)\n" + text), [], 4)
        assert len(loader.dataset) == 9

    def test_through_a_feeder(self, script):
        loader, _ = observe.find_loader(script("import everygpu\nlist(everygpu.Feeder(loader(5)))"), [], 1)
        assert len(loader.dataset) == 5

    def test_it_is_not_caught_on_the_way(self, script):
        text = "try:\n  list(loader(3))\nexcept Exception:\n  print('caught')"
        assert observe.find_loader(script(text), [], 1)[0] is not None

    @pytest.mark.parametrize("data", WITH_A_POSITION, ids=["loader", "both", "feeder"])
    def test_a_position_at_the_end_of_a_pass(self, script, data):
        # The second that is iterated: the first one uses a pass up.
        loader, _ = observe.find_loader(script(AT_THE_END.format(data)), [], 2)
        assert [len(x) for x, _ in loader] == [3, 3, 3]

    def test_saves_as_the_script_ends(self, script, tmp_path, monkeypatch, caplog):
        monkeypatch.chdir(tmp_path)
        observe.find_loader(script(SAVES), [], 1)
        assert read_saved() == [1] * 6
        assert caplog.messages == ["tune: saves are left out."]

    @pytest.mark.parametrize(("text", "code"), [("", 0), ("sys.exit(3)", 3), ("1 / 0", 1)])
    def test_a_script_without_one(self, script, text, code, capsys):
        assert observe.find_loader(script(text), [], 1) == (None, code)
        assert ("ZeroDivisionError" in capsys.readouterr().err) == (code == 1)


class TestTrial:
    def run(self, script, tmp_path, num_rows, text=TRAIN):
        result = tmp_path / "result.json"
        observe.run_trial(script(text), [], 1, num_rows, 5.0, result)
        return json.loads(result.read_text()) if result.exists() else None

    def test_a_size_that_fits(self, script, tmp_path, capsys):
        record = self.run(script, tmp_path, 20)
        assert (record["num_rows"], record["fits"]) == (20, True)
        assert capsys.readouterr().out == "begin\nstep 20 20\nstep 20 20\n"

    def test_a_size_that_does_not(self, script, tmp_path, capsys):
        assert self.run(script, tmp_path, 21) == {"num_rows": 21, "fits": False}
        assert "Traceback" not in capsys.readouterr().err

    def test_the_scripts_own_size(self, script, tmp_path):
        assert self.run(script, tmp_path, 0)["num_rows"] == 8

    def test_other_loaders_are_left_alone(self, script, tmp_path, capsys):
        text = "for x in loader(9, batch_size=3):\n  for y in loader(4, batch_size=2): print(len(x[0]), len(y[0]))"
        self.run(script, tmp_path, 5, text)
        assert capsys.readouterr().out.split() == ["5", "2"] * 4

    def test_through_a_feeder(self, script, tmp_path, capsys):
        text = "import everygpu\nfor x, y in everygpu.Feeder(loader(9), ['cpu'] * 2): print(len(x))"
        assert self.run(script, tmp_path, 6, text)["fits"]
        assert capsys.readouterr().out.split() == ["6", "6"]

    def test_the_limit_holds_until_the_last_step_through_a_feeder(self, script, tmp_path, capsys, monkeypatch):
        @contextlib.contextmanager
        def limit(gpus, headroom_pct):
            print("limit", headroom_pct)
            yield
            print("no limit")

        monkeypatch.setattr(observe, "limited_memory", limit)
        text = "import everygpu, time\nfor x, y in everygpu.Feeder(loader(9), 'cpu'): time.sleep(0.1); print(len(x))"
        self.run(script, tmp_path, 6, text)
        assert capsys.readouterr().out.split("\n")[:-1] == ["limit 5.0", "6", "6", "no limit"]

    def test_batches_of_strings(self, script, tmp_path):
        record = self.run(script, tmp_path, 0, "for x in DataLoader(['a', 'b']): print(x)")
        assert (record["num_rows"], record["fits"]) == (0, True)

    def test_a_loader_without_batches(self, script, tmp_path, capsys):
        assert self.run(script, tmp_path, 0, "for x in DataLoader([]): print(x)") == {"is_empty": True}
        assert capsys.readouterr() == ("", "")

    @pytest.mark.parametrize("data", WITH_A_POSITION, ids=["loader", "both", "feeder"])
    def test_a_position_at_the_end_of_a_pass(self, script, tmp_path, data, capsys):
        result = tmp_path / "result.json"
        observe.run_trial(script(AT_THE_END.format(data)), [], 2, 5, 5.0, result)
        assert json.loads(result.read_text())["fits"]
        assert capsys.readouterr().out.split() == ["5", "5"]

    def test_saves_are_left_out(self, script, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        record = self.run(script, tmp_path, 4, SAVES)
        assert (record["fits"], record["saves_left_out"]) == (True, True)
        assert read_saved() == [1] * 6
        assert sorted(path.name for path in (tmp_path / "kept").glob("step-*")) == ["step-00000001"]

    def test_a_script_that_fails_while_a_feeder_is_ahead(self, script, tmp_path):
        text = "import everygpu, time\nfor x, y in everygpu.Feeder(loader(9), 'cpu'): time.sleep(0.1); 1 / 0"
        assert self.run(script, tmp_path, 4, text) is None

    def test_memory_that_runs_out_before_the_first_batch(self, script, tmp_path, capsys):
        assert self.run(script, tmp_path, 0, "raise torch.OutOfMemoryError('the model is too large')") is None
        assert "the model is too large" in capsys.readouterr().err

    def test_a_script_that_fails(self, script, tmp_path, capsys):
        assert self.run(script, tmp_path, 4, "for x in loader(9):\n  raise ValueError('mine')") is None
        assert "ValueError: mine" in capsys.readouterr().err


class TestCommand:
    @pytest.fixture
    def measured(self, monkeypatch):
        """Pretend that 37 rows fit, and note what is tried."""
        tried = []

        def try_rows(num_rows, script, args, which, headroom, is_module):
            tried.append(num_rows)
            return {"num_rows": num_rows or 8, "fits": num_rows <= 37, "peak_bytes": (num_rows or 8) * 2**20}

        monkeypatch.setattr(tune, "try_rows", try_rows)
        return tried

    def invoke(self, *args, code=0):
        done = CliRunner().invoke(main, ["tune", "--seconds", "0.02", *args], catch_exceptions=False)
        assert done.exit_code == code, done.output
        return done

    def test_workers(self, script):
        done = self.invoke(script(TRAIN))
        assert "is the smallest number that is as fast as any; now 0." in done.stdout

    def test_json(self, script, measured):
        done = self.invoke("--batch-size", "--json", script("for x in loader(64, batch_size=2, num_workers=1): pass"))
        found = json.loads(done.stdout)
        assert found["workers"]["num_workers_now"] == 1
        assert [t["num_workers"] for t in found["workers"]["trials"]][:2] == [0, 1]
        assert (found["batch_size"]["num_rows"], found["batch_size"]["num_rows_now"]) == (37, 8)
        assert measured == [0, 16, 32, 64, 48, 40, 36, 38, 37]

    def test_json_is_all_that_comes_out(self, script):
        done = self.invoke("--json", script(TRAIN))
        assert json.loads(done.stdout)["workers"]["num_workers_now"] == 0
        assert "begin" in done.stderr

    def test_batch_size(self, script, measured):
        done = self.invoke("--batch-size", script(TRAIN))
        assert "batches of 37 rows fit; now 8." in done.stdout
        assert "37.0 MiB" in done.stdout

    @pytest.mark.parametrize("are_left_out", [True, False])
    def test_saves_that_were_left_out(self, script, monkeypatch, are_left_out):
        monkeypatch.setattr(tune, "_tune_workers", lambda *args: {})
        trial = {"num_rows": 8, "fits": False} | ({"saves_left_out": True} if are_left_out else {})
        monkeypatch.setattr(tune, "try_rows", lambda *args: trial)
        done = self.invoke("--batch-size", script(TRAIN))
        assert ("tune: the script's saves are left out." in done.stdout) == are_left_out

    def test_a_module(self, script, tmp_path, monkeypatch):
        def run(command, **options):
            done = CliRunner().invoke(main, command[command.index("tune") :], catch_exceptions=False)
            return subprocess.CompletedProcess(command, done.exit_code, done.stdout, done.stderr)

        Path(script(TRAIN)).rename(tmp_path / "tuned_module.py")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(subprocess, "run", run)
        done = self.invoke("--batch-size", "-m", "tuned_module", "--lr", "3")
        assert "batches of 20 rows fit; now 8." in done.stdout
        assert "begin --lr 3\n" in done.stdout

    @pytest.mark.parametrize(("name", "todo"), [("nowhere.py", "For a module, write -m."), ("-", "write it to a file")])
    def test_a_script_that_is_not_there(self, name, todo):
        assert todo in self.invoke(name, code=2).stderr

    def test_a_loader_without_batches(self, script, monkeypatch):
        def run(command, **options):
            Path(command[command.index("--trial") + 2]).write_text('{"is_empty": true}')

        monkeypatch.setattr(subprocess, "run", run)
        done = self.invoke("--batch-size", script("list(loader(0))"), code=1)
        assert done.stderr.endswith("must give a batch, got none. Check its dataset and sampler.\n")

    def test_a_script_that_iterates_nothing(self, script):
        done = self.invoke(script("sys.exit(3)"), code=1)
        assert "must iterate a DataLoader, but ended before, with exit code 3." in done.stderr

    def test_a_second_loader_that_is_not_there(self, script):
        done = self.invoke("--loader", "2", script("list(loader(3))"), code=1)
        assert "must iterate 2 DataLoaders" in done.stderr
        assert "Pass a --loader below 2." in done.stderr

    def test_an_interrupt_before_the_loader_is_made(self, script):
        self.invoke(script("raise KeyboardInterrupt"), code=130)

    def test_an_interrupt_of_a_trial(self, script, monkeypatch):
        done = subprocess.CompletedProcess([], returncode=130, stdout="", stderr="")
        monkeypatch.setattr(subprocess, "run", lambda *args, **options: done)
        self.invoke("--batch-size", script(TRAIN), code=130)

    @pytest.mark.parametrize("which", ["0", "-1"])
    def test_loaders_are_counted_from_1(self, script, which):
        done = self.invoke("--loader", which, script(TRAIN), code=2)
        assert "Invalid value for '--loader'" in done.stderr

    @pytest.mark.parametrize("headroom", ["-1", "100"])
    def test_headroom_is_a_part_of_the_memory(self, script, headroom):
        done = self.invoke("--batch-size", "--headroom", headroom, script(TRAIN), code=2)
        assert "Invalid value for '--headroom'" in done.stderr

    def test_batches_without_rows(self, script, monkeypatch):
        monkeypatch.setattr(tune, "try_rows", lambda *args: {"num_rows": 0, "fits": True, "peak_bytes": None})
        done = self.invoke("--batch-size", script(TRAIN), code=1)
        assert "needs batches of tensors with rows" in done.stderr


class TestProcesses:
    @pytest.fixture(autouse=True)
    def path(self, monkeypatch):
        monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))

    @pytest.mark.usefixtures("warm_python")
    def test_trials_in_processes_of_their_own(self, script, tmp_path, monkeypatch):
        path = script("sys.stdout.buffer.write(b'\\xff')  # is no text" + TRAIN)
        where = tmp_path / "trap"  # no file of the working directory is run in their place
        where.mkdir()
        (where / "random.py").write_text("raise SystemExit('trapped')")
        monkeypatch.chdir(where)
        assert tune.try_rows(16, path, [], 1, 5.0) == {"num_rows": 16, "fits": True, "peak_bytes": None}
        assert tune.try_rows(32, path, [], 1, 5.0) == {"num_rows": 32, "fits": False}

    @pytest.mark.usefixtures("warm_python")
    def test_a_script_that_fails_is_shown(self, script):
        with pytest.raises(click.ClickException, match="exit code 1.*\n(.*\n)*.*KeyError: 'mine'"):
            tune.try_rows(4, script("for x in loader(9):\n  raise KeyError('mine')"), [], 1, 5.0)

    @pytest.mark.usefixtures("warm_python")
    def test_the_whole_command_where_output_is_not_unicode(self, script):
        command = [sys.executable, "-m", "everygpu", "tune", "--seconds", "0.02", script(TRAIN), "--lr", "3"]
        environ = {**os.environ, "PYTHONIOENCODING": "cp1252"}  # as Windows has it for files and pipes
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("begin --lr 3\n")
        assert "num_workers=" in done.stdout
