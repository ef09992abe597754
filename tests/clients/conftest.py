"""Other people's libraries, as their users call them: no part of ``make test``, see ``make test-clients``."""

import pytest
import torch

# torchvision asks for these operators while it is imported, and its build for GPUs can't load them beside torch's build
# for the CPU. Declaring them is enough: none of these libraries calls one here.
TORCHVISION = torch.library.Library("torchvision", "FRAGMENT") if torch.version.cuda is None else None
if TORCHVISION is not None:
    for name in ("nms", "qnms"):
        TORCHVISION.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def pytest_collection_modifyitems(items):
    """Heed warnings about everygpu only: these libraries' own are theirs to mend."""
    for item in items:
        if item.path.parent.name == "clients":
            item.add_marker(pytest.mark.filterwarnings("ignore", "error:.*everygpu", "error:.*AccumulateGrad"))
