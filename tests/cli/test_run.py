"""``everygpu run``: a script that can't tell it from ``python``."""

import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from click.testing import CliRunner

from everygpu.cli import main
from everygpu.cli.choose import NO_GPU
from everygpu.cli.script import run_script
from everygpu.devices import nvml
from tests.cli.runs import command_of, everygpu, install_driver


@pytest.fixture
def script(tmp_path):
    """Write a script into a folder of its own, and return its path."""

    def write(text, name="script.py"):
        path = tmp_path / "folder" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write


def run(*arguments, fake_gpus=None, **options):
    """Run ``everygpu run`` as a user would; ``fake_gpus`` is a folder to put a driver's stand-in into."""
    if fake_gpus is not None:
        install_driver(fake_gpus)
    return everygpu("run", *arguments, fake_gpus=fake_gpus, **options)


REPORT = """
    import json, os, sys
    print(json.dumps({
        "name": __name__,
        "file": __file__,
        "argv": sys.argv,
        "path0": sys.path[0],
        "main": sys.modules["__main__"].__dict__ is globals(),
        "spec": __spec__,
        "package": __package__,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "torch": "torch" in sys.modules,
    }))
"""
ARGUMENTS = ["--gpus", "7", "--cpu", "--", "-x", "--help", "a b", ""]


def test_script_sees_what_python_would_show_it(script):
    path = script(REPORT)
    relative = os.path.join("folder", path.name)
    ours = json.loads(run(relative, *ARGUMENTS, cwd=path.parents[1]).stdout)
    plain = subprocess.run(
        [sys.executable, relative, *ARGUMENTS], cwd=path.parents[1], capture_output=True, text=True, check=True
    )
    expected = json.loads(plain.stdout)
    assert ours["argv"] == [relative, *ARGUMENTS]
    for key in ("name", "file", "argv", "path0", "main", "spec", "package", "torch"):
        assert ours[key] == expected[key], key


@pytest.mark.parametrize(
    ("options", "visible"), [(["--gpus", "1"], "GPU-a5013c05-0df6-c9f7-a45c-22c4343803ae"), (["--cpu"], "-1")]
)
def test_environment_is_set_before_the_script_starts(script, tmp_path, options, visible):
    done = run(*options, script(REPORT), fake_gpus=tmp_path)
    assert json.loads(done.stdout)["visible"] == visible
    assert done.stderr == ""


@pytest.mark.parametrize(("arguments", "code"), [(["--min-free", "999GiB"], 3), (["--name", "A100"], 3), ([], 0)])
def test_a_named_demand_that_is_not_met_does_not_fall_to_the_cpu(script, tmp_path, arguments, code):
    started = time.monotonic()
    waiting = run("--wait", "--timeout", "60", *arguments, script("print('ran')"), fake_gpus=tmp_path)
    assert (waiting.returncode, waiting.stdout) == (code, "" if code else "ran\n")
    assert time.monotonic() - started < 60  # no GPU comes to have more memory, or another name
    if code:
        assert "Omit --gpus and the filters, or pass --cpu, to use the CPU." in waiting.stderr


def test_one_process_for_each_gpu_needs_a_gpu(script, tmp_path):
    install_driver(tmp_path, "")
    done = everygpu("run", "--processes", "auto", script("print('ran')"), fake_gpus=tmp_path)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "Error: No GPU for --processes auto. Pass --processes N --cpu to use the CPU.\n"


def test_a_script_may_run_without_an_output(script):
    path = script("raise SystemExit(3)")
    command = command_of("run", path)
    words = " ".join(shlex.quote(word) for word in command.pop("args"))
    done = subprocess.run(["sh", "-c", f"{words} >&-"], **command, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 3
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_note_that_cannot_be_written_keeps_no_script(script, tmp_path):
    install_driver(tmp_path, "")  # says that it runs on the CPU
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            **command_of("run", script("print('ran')"), fake_gpus=tmp_path), stdout=subprocess.PIPE, stderr=full
        )
    assert (done.returncode, done.stdout) == (0, "ran\n")


@pytest.mark.parametrize(
    ("text", "warns"),
    [
        ("import torch", True),
        ("import torch, sys; sys.exit(0)", True),
        ("import torch; torch.cuda.used = True", False),
        ("import torch, sys; sys.exit(2)", False),
        ("import torch, subprocess, sys; subprocess.run([sys.executable, '-c', ''])", False),
        ("", False),
    ],
)
def test_unused_gpus_are_told(script, tmp_path, text, warns):
    # A stand-in for torch saves the seconds the real one takes.
    (tmp_path / "torch.py").write_text(
        "from types import SimpleNamespace as S\n"
        "__version__ = '2.13.0+cpu'; version = S(cuda=None); cuda = S(used=False)\n"
        "cuda.is_initialized = lambda: cuda.used"
    )
    error = run(script(text), fake_gpus=tmp_path).stderr
    assert ("CUDA is there but unused: the script had 2 GPU(s)" in error) == warns
    assert len(error.splitlines()) == int(warns)


class TestInThisProcess:
    """Faster than a process each: what the script changes is put back by the fixture."""

    @pytest.fixture(autouse=True)
    def put_back(self, monkeypatch):
        monkeypatch.setattr(sys, "argv", list(sys.argv))
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
        monkeypatch.setattr(nvml, "sample_devices", lambda: None)

    @pytest.mark.parametrize(
        ("ending", "code"),
        [
            ("", 0),
            ("sys.exit()", None),
            ("sys.exit(0)", 0),
            ("sys.exit(5)", 5),
            ("raise SystemExit(300)", 300),
            ("sys.exit('broken')", "broken"),
            ("raise KeyboardInterrupt", 130),
            ("raise ValueError", 1),
            ("from everygpu.errors import DivergedError; raise DivergedError('bits')", 5),
            ("from everygpu.errors import NonFiniteError; raise NonFiniteError('nan')", 5),
            ("input()", 1),
            ("import everygpu; raise everygpu.EveryGPUError('the script has its own')", 1),
        ],
    )
    def test_every_ending(self, script, ending, code, monkeypatch, tmp_path):
        monkeypatch.setenv("EVERYGPU_REASON_FILE", str(tmp_path / "reason"))
        monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115 - closed below
        try:
            assert run_script(str(script(f"import sys\n{ending}")), []) == code
        finally:
            sys.stdin.close()
        is_ours = "DivergedError" in ending or "NonFiniteError" in ending
        assert (tmp_path / "reason").exists() == is_ours, "a script's own exit codes have no reason of ours"

    @pytest.mark.parametrize(("ending", "code"), [("7", 7), ("None", 0), ("'broken'", 1)])
    def test_command_passes_the_code_on(self, script, ending, code):
        result = CliRunner().invoke(main, ["run", str(script(f"import sys; sys.exit({ending})"))])
        assert result.exit_code == code
        assert "No NVIDIA GPU found" in result.stderr

    @pytest.mark.parametrize(
        ("option", "asked"), [([], [600]), (["--watchdog", "60"], [60]), (["--watchdog", "0"], [])]
    )
    def test_scripts_are_watched(self, script, option, asked, unwatched):
        assert CliRunner().invoke(main, ["run", *option, str(script(""))]).exit_code == 0
        assert unwatched == asked

    @pytest.mark.parametrize(
        ("args", "name"),
        [
            (["--cpu"], "--cpu"),
            (["ts", "--gpus", "2"], "--gpus"),
            (["--gpus=2"], "--gpus"),
            (["--lr", "2"], None),
            (["--", "--gpus", "2"], None),
            (["--local-rank=0"], None),
        ],
    )
    def test_options_of_ours_after_the_script_are_told(self, script, monkeypatch, args, name):
        for variable in NO_GPU:
            monkeypatch.setenv(variable, "0")  # put back after the command has set them
        path = str(script(""))
        said = f"everygpu run: {name} comes after {path} and goes to it. Put it before the script if it is meant for "
        assert CliRunner().invoke(main, ["run", "--cpu", path, *args]).stderr == f"{said}everygpu.\n" * bool(name)

    def test_traceback_is_the_scripts_own(self, script, capsys, monkeypatch):
        monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # torch.distributed sets its own
        path = script("def f():\n    raise ValueError('mine')\nf()")
        assert run_script(str(path), []) == 1
        error = capsys.readouterr().err
        assert error.splitlines()[1] == f'  File "{path}", line 3, in <module>'
        assert error.endswith("ValueError: mine\n")
        assert error.count("  File ") == 2

    @pytest.mark.parametrize(
        ("hook", "words"),
        [
            ("lambda *_: 1 / 0", ["ZeroDivisionError: division by zero", "ValueError: mine"]),
            ("3", ["TypeError: 'int' object is not callable", "ValueError: mine"]),
        ],
    )
    def test_a_failing_hook_hides_no_error(self, script, capsys, monkeypatch, hook, words):
        monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
        assert run_script(str(script(f"import sys; sys.excepthook = {hook}\nraise ValueError('mine')")), []) == 1
        error = capsys.readouterr().err
        assert error.startswith("Error in sys.excepthook:\n")
        assert "\nOriginal exception was:\nTraceback" in error
        assert [line for line in error.splitlines() if "Error: " in line and " " in line] == words
        assert "During handling" not in error

    def test_a_hook_may_choose_the_exit_code(self, script, monkeypatch):
        monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
        with pytest.raises(SystemExit) as stop:
            run_script(str(script("import sys; sys.excepthook = lambda *_: sys.exit(9)\nraise ValueError")), [])
        assert stop.value.code == 9

    def test_syntax_error_points_at_the_line(self, script, capsys, monkeypatch):
        monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
        path = script("x = = 1")
        assert run_script(str(path), []) == 1
        error = capsys.readouterr().err
        assert error.startswith(f'  File "{path}", line 1\n')
        assert "runpy" not in error
        assert "SyntaxError" in error

    def test_future_flags_and_encoding_are_the_files_own(self, script):
        path = script("x = 1")
        path.write_bytes("# coding: latin-1\nassert '\xe9' == chr(233)\ndef f(a: nix): pass\n".encode("latin-1"))
        assert run_script(str(path), []) == 1  # the annotation is evaluated, and there is no such name

    def test_main_stays_for_threads_that_outlive_it(self, script):
        run_script(str(script("marker = 42")), [])
        assert sys.modules["__main__"].marker == 42

    def test_symlink_has_the_folder_of_its_target(self, script, tmp_path):
        link = tmp_path / "link.py"
        link.symlink_to(script("import sys; sys.exit(sys.path[0])"))
        assert run_script(str(link), []) == str((tmp_path / "folder").resolve())

    @pytest.mark.parametrize(
        "arguments",
        [
            ["run"],
            ["run", "no_such_file.py"],
            ["run", "."],
            ["run", "--gpus", "none", "SCRIPT"],
            ["run", "--gups", "2", "SCRIPT"],
            ["run", "--cpu", "--gpus", "1", "SCRIPT"],
            ["run", "--cpu", "--min-free", "1GiB", "SCRIPT"],
            ["run", "--min-free", "lots", "SCRIPT"],
            ["run", "--cpu", "--name", "H200", "SCRIPT"],
            ["run", "--timeout", "3", "SCRIPT"],
            ["run", "--split", "3", "SCRIPT"],
            ["run", "--processes", "0", "SCRIPT"],
            ["run", "--processes", "all", "SCRIPT"],
            ["run", "--nnodes", "2", "SCRIPT"],
            ["run", "--processes", "auto", "--cpu", "SCRIPT"],
        ],
    )
    def test_wrong_usage_is_two_and_the_script_does_not_run(self, script, arguments):
        path = str(script("raise SystemExit(99)"))
        result = CliRunner().invoke(main, [path if word == "SCRIPT" else word for word in arguments])
        assert result.exit_code == 2
        assert result.stderr != ""


MODULE = """
import json, multiprocessing, sys
def work(queue): queue.put(__name__)
if __name__ == "__main__":
    from . import other
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    child = multiprocessing.get_context("spawn").Process(target=work, args=(queue,))
    child.start(); name = queue.get(); child.join()
    main = sys.modules["__main__"]
    print(json.dumps([sys.argv, sys.path[0], main.__file__, main.__package__, main.__spec__.name, __name__, name]))
    sys.exit(7)
"""


# Without the worker process: Python's own don't find a package's ``__main__``.
ALONE = MODULE.replace("child.start(); name = queue.get(); child.join()", "name = None")


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "package"
    folder.mkdir()
    for name, text in {"__init__": "", "other": "", "train": MODULE, "__main__": ALONE}.items():
        (folder / f"{name}.py").write_text(text)
    return tmp_path


@pytest.mark.parametrize("module", ["package.train", "package"])
def test_a_module_is_run_as_python_does(package, module):
    python = subprocess.run(
        [sys.executable, "-m", module, "--lr", "1"], cwd=package, capture_output=True, text=True, check=False
    )
    ours = everygpu("run", "--cpu", "-m", module, "--lr", "1", cwd=package)
    assert (ours.returncode, json.loads(ours.stdout)) == (7, json.loads(python.stdout))


@pytest.mark.parametrize("name", ["nowhere", "package.nowhere", "nowhere.train", "package.train.deeper"])
def test_a_module_that_is_not_there(name, package, monkeypatch):
    monkeypatch.chdir(package)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", sys.argv)
    for variable in NO_GPU:
        monkeypatch.setenv(variable, "-1")
    result = CliRunner().invoke(main, ["run", "--cpu", "-m", name])
    for loaded in [loaded for loaded in sys.modules if loaded.split(".")[0] == "package"]:
        del sys.modules[loaded]
    assert result.exit_code == 1
    assert result.output.startswith("everygpu run: ")
    assert name.partition(".")[0] in result.output


@pytest.mark.parametrize(("size", "said"), [("8", "Write 8GiB"), (" 1.5 ", "has no unit"), ("much", "looks like")])
def test_a_size_needs_its_unit(size, said):
    result = CliRunner().invoke(main, ["devices", "--min-free", size])
    assert result.exit_code == 2
    assert "Invalid value for '--min-free'" in result.stderr
    assert said in result.stderr


def test_worker_processes_find_the_script(script):
    path = script(
        """
        import multiprocessing

        def square(x):
            return x * x

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(square, [3]))
        """
    )
    done = run(path)
    assert done.stdout == "[9]\n", done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_interrupt_is_130(script, tmp_path):
    ready = tmp_path / "ready"
    path = script(f"import time; open({str(ready)!r}, 'w').close(); time.sleep(600)")
    with subprocess.Popen(**command_of("run", "--cpu", path), stderr=subprocess.PIPE) as process:
        while not ready.exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert error.endswith("KeyboardInterrupt\n")
    assert "click" not in error


@pytest.mark.gpu
def test_real_gpus_are_those_asked_for(script):
    samples = nvml.sample_devices()
    if len(samples) < 2:
        pytest.skip("needs two CUDA devices")
    path = script(
        "import torch; print([str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())])"
    )
    done = run("--gpus", "1,0", path)
    assert done.stdout.strip() == str([samples[1].uuid[4:], samples[0].uuid[4:]])
