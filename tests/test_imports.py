"""Imports point one way, do nothing but define, and never reach for torch's own data parallelism."""

import ast
import graphlib
import importlib.util
import inspect
import subprocess
import sys

import pytest
import torch

import everygpu
from tests.exports import EXPORTS, PACKAGES
from tests.source import ROOT, tree_of

LAYERS = [
    {"errors", "torch_private"},
    {"tree", "units", "keys", "folders", "child", "named", "exit_codes", "progress", "once"},
    {"ranks"},
    {"devices"},
    {"comm", "_watchdog"},
    {"parallel"},
    {"step"},
    {"checkpoint"},
    {"feed"},
    {""},
    {"bench"},
    {"cli"},
    {"__main__"},
]
HEIGHT = {name: height for height, layer in enumerate(LAYERS) for name in layer}


def module_name(path):
    parts = ("everygpu", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def resolve(dotted):
    """The module of ours that a dotted name is, or is in."""
    while dotted not in FILES:
        dotted = dotted.rpartition(".")[0]
    return dotted


def imported_names(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def walk(node, *, with_types):
    for child in ast.iter_child_nodes(node):
        is_for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if with_types or not is_for_types:
            yield child
            yield from walk(child, with_types=with_types)


def imports_of(name, *, with_types=True):
    nodes = walk(tree_of(FILES[name].read_text()), with_types=with_types)
    dotted = [n for node in nodes for n in imported_names(node)]
    return {resolve(n) for n in dotted if n.split(".")[0] == "everygpu"}


def part_of(name):
    return [*name.split("."), ""][1]


def test_imports_point_down():
    assert {part_of(name) for name in FILES} <= set(HEIGHT), "every file has its layer"
    for name in FILES.keys() - {"everygpu"}:  # which names what is public, everywhere
        part = part_of(name)
        for other in imports_of(name):
            below = part_of(other)
            assert below == part or HEIGHT[below] < HEIGHT[part], f"{name} imports {other}"


def test_no_two_modules_import_each_other():
    graph = {name: imports_of(name, with_types=False) - {name} for name in FILES}
    graphlib.TopologicalSorter(graph).prepare()


# Imported where its kernels run: torch for GPUs brings Triton, torch for the CPU doesn't.
NEEDS_TRITON = () if importlib.util.find_spec("triton") else ("everygpu.comm.kernels",)


def run_python(code):
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_does_not_import_torch():
    code = "import sys, everygpu; print(*[m for m in ('torch', 'numpy', 'rich', 'pynvml') if m in sys.modules])"
    assert run_python(code).split() == []


LOOK_ON = """
import importlib, os, signal, sys, threading
import torch, safetensors.torch, click, rich.progress, rich.table, pynvml

seen = []

def asked_by_us():
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__") in ("os", "_collections_abc", "collections.abc"):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "").split(".")[0] == "everygpu"

def watch(owner, name):
    plain = getattr(owner, name)
    def watched(*args, **kwargs):
        if asked_by_us():
            seen.append(f"{owner.__name__}.{name}")
        return plain(*args, **kwargs)
    setattr(owner, name, watched)

watch(type(os.environ), "__getitem__")
watch(pynvml, "nvmlInit")
for name in ("is_available", "device_count", "current_device", "init", "_lazy_init"):
    watch(torch.cuda, name)
for name in ("is_available", "device_count", "current_accelerator"):
    watch(torch.accelerator, name)
for name in ("manual_seed", "set_default_device", "set_default_dtype", "set_num_threads"):
    watch(torch, name)

environment, threads, hook = dict(os.environ), threading.active_count(), sys.excepthook
handlers = [signal.getsignal(n) for n in (2, 15)]
for name in {modules!r}:
    importlib.import_module(name)
assert not seen, seen
assert dict(os.environ) == environment
assert threading.active_count() == threads
assert sys.excepthook is hook
assert [signal.getsignal(n) for n in (2, 15)] == handlers
assert not torch.cuda.is_initialized()
print("nothing happened")
"""


def test_importing_any_module_asks_no_device_and_changes_nothing():
    modules = [name for name in FILES if not name.endswith("__main__") and not name.startswith(NEEDS_TRITON)]
    assert run_python(LOOK_ON.replace("{modules!r}", repr(modules))) == "nothing happened\n"


def test_public_names_resolve_and_are_documented():
    for value in EXPORTS.values():
        assert inspect.getdoc(value)
        assert value.__module__.startswith("everygpu.")
    assert {*everygpu.__all__, *PACKAGES} <= set(dir(everygpu))


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'everygpu' has no attribute 'DataParalel'"):
        everygpu.DataParalel  # noqa: B018


FORBIDDEN = {"scatter", "scatter_kwargs", "scatter_gather", "replicate", "parallel_apply", "gather", "comm",
             "data_parallel", "get_a_var", "_functions"}  # fmt: skip


def test_source_names_none_of_torchs_own_data_parallelism():
    for name in FILES:
        for node in ast.walk(tree_of(FILES[name].read_text())):
            dotted = [*imported_names(node), *([ast.unparse(node)] if isinstance(node, ast.Attribute) else [])]
            for _, found, what in (text.partition("nn.parallel.") for text in dotted):
                assert not found or what.split(".")[0] not in FORBIDDEN, f"{name} names nn.parallel.{what}"


def test_training_calls_none_of_torchs_own_data_parallelism(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("torch.nn.parallel was called")

    for home in ("scatter_gather", "replicate", "parallel_apply", "data_parallel", "comm"):
        module = sys.modules[f"torch.nn.parallel.{home}"]
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__:
                monkeypatch.setattr(module, name, refuse)
    for name in ("scatter", "replicate", "parallel_apply", "gather", "data_parallel"):
        monkeypatch.setattr(torch.nn.parallel, name, refuse)
    model = everygpu.DataParallel(torch.nn.Linear(3, 2), ["cpu"] * 3)
    model(torch.ones(7, 3)).sum().backward()
    assert model.weight.grad.tolist() == [[7, 7, 7]] * 2
