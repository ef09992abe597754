"""Rules of the house, read off the source: sizes, state, private torch. Layers are tests/test_imports.py's."""

import ast
import re
from pathlib import Path

import pytest

from everygpu import torch_private
from tests.private_names import private_names
from tests.source import ROOT, trees

MAX_FUNCTION = 60
STATE = {
    "comm/copies.py:_linked",  # GPUs map memory once a process
    "comm/nccl.py:_one_at_a_time",  # NCCL's communicators are the process's
    "comm/streams.py:_making",  # streams are the process's
    "devices/p2p.py:_one_at_a_time",  # the test of copies runs once a process
    "parallel/cuda_graphs/multi_gpu_graph.py:CAPTURE_LOCK",  # captures are the process's
    "parallel/cuda_graphs/host_rng.py:DRAW_GATE",  # generators are the process's
}
"""What modules may keep between calls."""


def length_of(function):
    """Count a function's lines, without its docstring."""
    first, *_ = function.body
    docstring = first.end_lineno - first.lineno + 1 if ast.get_docstring(function) is not None else 0
    return function.end_lineno - function.lineno + 1 - docstring


def test_functions_are_short():
    nodes = [(name, node) for name, tree in trees().items() for node in ast.walk(tree)]
    found = {f"{name}:{node.name}": length_of(node) for name, node in nodes if isinstance(node, ast.FunctionDef)}
    assert {name: size for name, size in found.items() if size > MAX_FUNCTION} == {}


def misused_base(tree):
    """Give the lines that raise the base class of our errors itself, or inherit from it and from no builtin."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if ast.unparse(raised).rpartition(".")[2] == "EveryGPUError":
                yield node.lineno
        if isinstance(node, ast.ClassDef) and [ast.unparse(b) for b in node.bases] == ["EveryGPUError"]:
            yield node.lineno


def test_errors_are_of_a_kind_and_of_a_builtins():
    assert {name: lines for name, tree in trees().items() if (lines := list(misused_base(tree)))} == {}
    for line in ("raise EveryGPUError('x')", "raise errors.EveryGPUError('x') from e", "class A(EveryGPUError): ..."):
        assert list(misused_base(ast.parse(line))) == [1]


MUTATING = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}


def assigned(tree):
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((t.id, node.value) for t in targets if isinstance(t, ast.Name))


def own_classes(tree):
    """Name the classes whose objects change: those that assign to ``self`` beyond ``__init__``, or hold containers."""
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.decorator_list}


def mutated_names(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATING:
            yield getattr(node.func.value, "id", None)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield getattr(node.value, "id", None)
        elif isinstance(node, ast.AugAssign):
            yield getattr(node.target, "id", None)


def state_of(tree):
    """Name what a module keeps between calls: containers that functions change, locks, objects of its classes."""
    names, changed, classes = dict(assigned(tree)), set(mutated_names(tree)), own_classes(tree)
    made = {n: ast.unparse(v.func) for n, v in names.items() if isinstance(v, ast.Call)}
    objects = {
        n for n, f in made.items() if f in classes or f.startswith(("threading.", "weakref.", "itertools.count"))
    }
    return objects | (changed & set(names))


def test_modules_keep_no_state():
    assert {f"{name}:{state}" for name, tree in trees().items() for state in state_of(tree)} == STATE


@pytest.mark.parametrize(
    ("source", "state"),
    [
        ("x = []\ndef f(): x.append(1)", {"x"}),
        ("x = 0\ndef f():\n    global x\n    x = 1", {"x"}),
        ("import threading\nlock = threading.Lock()", {"lock"}),
        ("class A:\n    pass\na = A()", {"a"}),
        ("TABLE = {1: 2}\ndef f(): return TABLE[1]", set()),
    ],
)
def test_state_is_found(source, state):
    assert state_of(ast.parse(source)) == state


def test_private_torch_is_named_in_torch_private_only():
    elsewhere = [path for path in ROOT.rglob("*.py") if path.parent.name != "torch_private"]
    assert {str(path): names for path in elsewhere if (names := private_names(path))} == {}


@pytest.mark.parametrize(
    "line",
    ["torch._C._x()", "from torch.overrides import _push_mode", "import torch._inductor", "Tensor._make_subclass(t)",
     "from torch.utils import _pytree", "torch.utils.data.dataloader._BaseDataLoaderIter"],
)  # fmt: skip
def test_private_torch_is_found(line, tmp_path):
    (tmp_path / "module.py").write_text(f"import torch\nfrom torch import Tensor\n{line}\n")
    assert len(private_names(tmp_path / "module.py")) == 1


def test_no_source_text_is_read():
    """No result may rest on how code is written."""
    names = ("getsource", "getsourcelines", "findsource", "getcomments", "linecache")
    nodes = [(name, node) for name, tree in trees().items() for node in ast.walk(tree)]
    used = {(name, getattr(node, "attr", getattr(node, "id", getattr(node, "name", "")))) for name, node in nodes}
    assert {(name, found) for name, found in used if found in names} == set()


PYTHONS_OWN = {"_DummyThread", "_current_frames", "_exit", "_fields", "_getframe", "_make", "_replace"}


def test_private_attributes_are_ours_or_listed():
    """An attribute with an underscore that nothing here defines is torch's, and in ``torch_private.ATTRIBUTES``."""
    nodes = [n for name, tree in trees().items() if not name.startswith("torch_private/") for n in ast.walk(tree)]
    own = {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    own |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    attributes = [n for n in nodes if isinstance(n, ast.Attribute) and re.match("_[^_]", n.attr)]
    own |= {n.attr for n in attributes if isinstance(n.ctx, ast.Store) and ast.unparse(n.value) == "self"}
    listed = {name for names in torch_private.ATTRIBUTES.values() for name in names.split()}
    assert {n.attr for n in attributes} - own - PYTHONS_OWN <= listed
    assert listed <= {n.attr for n in attributes} | {n.value for n in nodes if isinstance(n, ast.Constant)}


REPOSITORY = Path(__file__).parents[1]
FILES = {path.relative_to(top).as_posix() for top in (ROOT, REPOSITORY / "src") for path in ROOT.rglob("*.py")}
FILES |= {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "tests").rglob("*.py")}


def missing_files(text):
    """Name the Python files and the folders of code in a text that there are none of."""
    ends = {"/".join(file.split("/")[i:]) for file in FILES for i in range(file.count("/") + 1)}
    folders = {end[: match.end()] for end in ends for match in re.finditer("/", end)}
    named = re.findall(r"(?<![\w/.])[\w/]+\.py\b", text)
    named_folders = [n for n in re.findall(r"`(\w+(?:/\w+)*/)`", text) if not (REPOSITORY / n).is_dir()]
    return {n for n in named if n not in ends} | {n for n in named_folders if n not in folders}


@pytest.mark.parametrize("page", ["docs/design.md", "CONTRIBUTING.md"])
def test_files_that_a_page_names_exist(page):
    assert missing_files((REPOSITORY / page).read_text()) == set()


def test_files_that_there_are_none_of_are_found():
    text = "`tree.py`, `parallel/gather.py` and `parallel/sharded/` exist; `arena.py`, `step/tree.py`, `old/` don't"
    assert missing_files(text) == {"arena.py", "step/tree.py", "old/"}
