"""Settings of the main process, applied in a helper."""

from collections.abc import Iterator

import pytest
import torch

from everygpu.parallel.engines.processes.settings import apply_settings, read_settings


@pytest.fixture(autouse=True)
def as_they_were() -> Iterator[None]:
    before = read_settings()
    yield
    torch.use_deterministic_algorithms(False)
    apply_settings(before)


def test_what_is_set_already_is_not_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def set_again(*_: object, **__: object) -> None:
        pytest.fail("it imports torch's compiler")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "use_deterministic_algorithms", set_again)
        apply_settings(read_settings())


@pytest.mark.parametrize(("mode", "warn_only"), [(True, False), (True, True), (False, False)])
def test_determinism_follows(mode: bool, warn_only: bool) -> None:
    torch.use_deterministic_algorithms(mode, warn_only=warn_only)
    wanted = read_settings()
    torch.use_deterministic_algorithms(not mode, warn_only=not warn_only)
    apply_settings(wanted)
    assert read_settings() == wanted
