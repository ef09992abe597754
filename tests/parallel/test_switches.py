"""Versions of torch with which switches are on."""

import pytest
import torch

from everygpu.parallel import switches


@pytest.mark.parametrize(("version", "on"), [("2.11.0", True), ("2.15.0+cu132", True), ("2.16.0a0", False)])
def test_switches_are_on_for_versions_that_were_tried(monkeypatch, version, on):
    monkeypatch.setattr(torch, "__version__", version)
    assert switches.is_on(True) is on
    assert not switches.is_on(False)
