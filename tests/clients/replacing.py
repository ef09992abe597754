"""Have a library's code find everygpu's DataParallel where it looks for torch's."""

import importlib.util
from types import ModuleType

import pytest
import torch

import everygpu


def replace_data_parallel(monkeypatch: pytest.MonkeyPatch, wrapper: type | None = None) -> None:
    """Replace ``torch.nn.DataParallel``, under both of its names, as a user does before other imports."""
    for home in (torch.nn, torch.nn.parallel):
        monkeypatch.setattr(home, "DataParallel", wrapper or everygpu.DataParallel)


def load_again(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Run a module's source with everygpu's class in the place of torch's, beside the module that is loaded already."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as within:
        replace_data_parallel(within)
        spec.loader.exec_module(module)
    return module
