"""``everygpu trace``: an unchanged script, ended after the traced steps, and what their time went to."""

import gzip
import json
import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch
from click.testing import CliRunner
from torch.optim.optimizer import _global_optimizer_post_hooks as hooks

from everygpu.cli import main
from everygpu.cli.trace import describe
from everygpu.feed.one_pass import Feed
from everygpu.step.train_step import TrainStep
from everygpu.tracing.events import parse_trace
from everygpu.tracing.shares import device_shares
from everygpu.tracing.steps import StepTracer
from tests.cli.runs import command_of
from tests.tracing.made import kernel, step, wait

HEAD = """
import sys, time, torch, everygpu
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = DataLoader(TensorDataset(torch.randn(24, 4), torch.randint(0, 3, (24,))), batch_size=2)
model = torch.nn.Linear(4, 3)
criterion = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def slow(batches, seconds):
    for batch in batches:
        yield batch
        time.sleep(seconds)
"""
LOOP = """
print("begin", *sys.argv[1:])
for x, y in data:
    criterion(model(x), y).backward()
    optimizer.step()
    print("step")
print("end")
"""
QUICK = ("--warmup", "2", "--steps", "3")


@pytest.fixture(autouse=True)
def same_interpreter(monkeypatch, tmp_path):
    """Put back what running a script in this process changes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    for name in ("DISABLE_CUPTI_LAZY_REINIT", "TEARDOWN_CUPTI"):
        monkeypatch.setenv(name, "0")
    plain = TrainStep.__call__, Feed.__next__, len(hooks)
    yield
    assert (TrainStep.__call__, Feed.__next__, len(hooks)) == plain


@pytest.fixture
def trace(tmp_path):
    """Run the command on a script."""

    def invoke(text, *options, code=0, args=()):
        (tmp_path / "train.py").write_text(HEAD + textwrap.dedent(text))
        done = CliRunner().invoke(main, ["trace", *options, "train.py", *args], catch_exceptions=False)
        assert done.exit_code == code, done.output
        return done

    return invoke


def shares_of(done):
    found = json.loads(done.stdout)
    (cpu,) = found["devices"]
    assert cpu["operators"] + cpu["data"] + cpu["python"] == pytest.approx(100)
    return found, cpu


def test_the_script_ends_after_the_traced_steps(trace, tmp_path):
    done = trace(LOOP, *QUICK, args=["--lr", "3"])
    assert done.stdout.startswith("begin --lr 3\n" + "step\n" * 4 + "3 steps of ")
    assert re.search(r"The CPU is in operators \d+% of the time; \d+% waiting for data, \d+% Python", done.stdout)
    assert f"Trace: {tmp_path / 'trace.json.gz'}, " in done.stdout
    assert "https://ui.perfetto.dev" in done.stdout
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    assert sum(e["name"].startswith("ProfilerStep#") for e in events) == 3
    assert {"aten::addmm", "Optimizer.step#SGD.step"} <= {e["name"] for e in events}


def test_the_script_goes_on_where_it_is_asked_to(trace):
    done = trace(LOOP + "sys.exit(7)", *QUICK, "--keep-running", code=7)
    assert done.stdout.count("step\n") == 12
    assert done.stdout.index("3 steps of") < done.stdout.index("end")
    assert done.stdout.count("Trace:") == 1


def test_json_is_all_that_comes_out_where_the_script_goes_on(trace):
    done = trace(LOOP, *QUICK, "--keep-running", "--json")
    assert shares_of(done)[0]["num_steps"] == 3
    assert "end\n" in done.stderr


def test_a_script_that_ends_in_between(trace):
    done = trace(LOOP + "sys.exit(7)", "--warmup", "9", "--steps", "10", code=7)
    assert "end\n3 steps of" in done.stdout


def test_a_script_that_ends_before(trace):
    done = trace(LOOP, code=1)
    assert "must take 20 steps before the first that is traced, but ended after 12, with exit code 0." in done.stderr


@pytest.mark.slow
def test_a_thread_that_trains_and_ends_in_between(tmp_path):
    """In a process of its own: nothing can end that thread's profiler."""
    train = "import threading\ndef train():\n" + textwrap.indent(LOOP, "    ")
    (tmp_path / "train.py").write_text(f"{HEAD}{train}\nt = threading.Thread(target=train)\nt.start()\nt.join()")
    done = subprocess.run(**command_of("trace", "--warmup", "9", "train.py"), cwd=tmp_path, capture_output=True)
    assert done.returncode == 1
    assert "trains in a thread of its own, and must take 19 steps there, but ended after 12" in done.stderr


def test_a_script_that_fails_is_shown(trace):
    done = trace("1 / 0", code=1)
    assert "ZeroDivisionError" in done.stderr
    assert "ended after 0, with exit code 1" in done.stderr


def test_an_interrupt(trace):
    trace("raise KeyboardInterrupt", code=130)


def test_calls_of_a_train_step_are_steps_and_waits_for_a_feeder_are_seen(trace):
    """Each call of accumulate=2 is a step; the loader takes 20 ms for each batch."""
    text = """
    step = everygpu.TrainStep(everygpu.DataParallel(model, ["cpu"] * 2), criterion, optimizer, accumulate=2)
    for x, y in everygpu.Feeder(slow(data, 0.02), step):
        step(x, y)
        print("step")
    """
    done = trace(text, *QUICK, "--json")
    assert done.stderr.count("step\n") == 4
    found, cpu = shares_of(done)
    assert found["num_steps"] == 3
    assert cpu["data"] > 50


def test_a_second_optimizer_does_not_count(trace):
    text = """
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in data:
        criterion(model(x), y).backward()
        optimizer.step()
        other.step()
        print("step")
    """
    assert trace(text, *QUICK).stdout.count("step\n") == 4


def test_json_without_a_loader(trace, tmp_path):
    text = "while True:\n    criterion(model(torch.randn(2, 4)), torch.tensor([0, 1])).backward(); optimizer.step()"
    found, cpu = shares_of(trace(text, "--warmup", "9", "--steps", "3", "--json", "--output", "t.json"))
    assert (found["file"], found["num_steps"], cpu["data"]) == (str(tmp_path / "t.json"), 3, 0)
    assert found["untraced_ms"] > 0
    assert found["step_ms"] > 0
    assert "can't be told" in trace(text, *QUICK).stdout


def test_a_module(trace, tmp_path):
    (tmp_path / "train_module.py").write_text(HEAD + LOOP)
    done = CliRunner().invoke(main, ["trace", *QUICK, "-m", "train_module", "--lr", "3"], catch_exceptions=False)
    assert done.exit_code == 0
    assert done.stdout.startswith("begin --lr 3\n" + "step\n" * 4 + "3 steps of ")
    assert "Traceback" not in done.stderr


def test_each_rank_has_a_file_of_its_own(trace, tmp_path, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert "steps of" not in trace(LOOP, *QUICK).stdout
    assert [path.name for path in tmp_path.glob("*.gz")] == ["trace.rank1.json.gz"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--output", "trace.txt"], "must end with .json or .json.gz, got trace.txt"),
        (["--output", "nowhere/trace.json"], "needs a folder that exists, got nowhere/trace.json"),
        (["--warmup", "1"], "1 is not in the range x>=2"),
        (["--steps", "0"], "0 is not in the range x>=1"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(trace, options, words):
    done = trace(LOOP, *options, code=2)
    assert words in done.stderr
    assert "begin" not in done.stdout


def test_a_folder_that_is_read_only_is_refused(trace, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "needs a folder that can be written to, got trace.json.gz" in trace(LOOP, code=2).stderr


def test_a_script_that_is_not_there():
    done = CliRunner().invoke(main, ["trace", "no.py"])
    assert done.exit_code == 2
    assert "For a module, write -m." in done.stderr


def test_gpus_are_described_in_words(tmp_path):
    """Two GPUs of 1 ms: one exchanges, half of it beside computing, the other waits for a launch and for data."""
    events = [step(1, 0, 1000), *kernel(0, 800), *kernel(600, 1000, name="ncclKernel"), wait(0, 200)]
    trace = parse_trace([*events, *kernel(700, 1000, device=1, launched=690)], 1)
    tracer = StepTracer(path=tmp_path, warmup=2, num_steps=1, on_end=lambda: None)
    assert describe(trace, device_shares(trace), tracer) == [
        "1 steps of 1.00 ms.",
        "cuda:0 computes 80% of the time; 20% exchange between GPUs (20% more is hidden beside computing).",
        "cuda:1 computes 30% of the time; 50% waiting for launches, 20% waiting for data.",
        "The largest loss is waiting for launches, 25%. The CPU doesn't launch fast enough: everygpu.TrainStep "
        "launches a step as one CUDA graph, torch.compile launches fewer kernels, and more rows a batch make each "
        "longer.",
    ]


@pytest.mark.gpu
def test_gpus_are_summed_up(trace):
    text = """
    model = everygpu.DataParallel(torch.nn.Linear(4, 3).cuda())
    step = everygpu.TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(9):
        for x, y in everygpu.Feeder(data, step):
            step(x, y)
    """
    devices = json.loads(trace(text, "--warmup", "40", "--json").stdout)["devices"]
    assert [d["device"] for d in devices] == [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    for shares in devices:
        whole = sum(value for name, value in shares.items() if name not in ("device", "exchange_hidden"))
        assert whole == pytest.approx(100)
        assert shares["computing"] + shares["exchange"] > 0
