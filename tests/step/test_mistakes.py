"""What people get wrong in a training step and a batch: a typed error says what to do."""

from typing import Any

import pytest
import torch
from torch import nn

import everygpu
from everygpu.errors import CallError, DeviceError, LossError, OptionError, SplitError

X, Y = torch.randn(8, 4), torch.randint(0, 2, (8,))


class Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> None:
        self.layer(x)


def make(net: nn.Module, num_replicas: int) -> everygpu.TrainStep:
    model = everygpu.DataParallel(net, ["cpu"] * num_replicas)
    return everygpu.TrainStep(model, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), 0.1))


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize(
    ("net", "batch", "error", "message"),
    [
        (nn.Linear(4, 2), ((X, Y),), CallError, r"Linear\.forward doesn't take 2\. Write step\(x, y\)"),
        (Nothing(), (X, Y), LossError, "the model returned None. Return its output"),
        (
            nn.Linear(4, 2).requires_grad_(False),
            (X, Y),
            LossError,
            "the loss takes no gradient: all parameters .* are frozen",
        ),
    ],
    ids=["a batch in one argument", "no output", "frozen"],
)
def test_a_step_says_what_is_wrong(
    net: nn.Module, batch: tuple[Any, ...], error: type[Exception], message: str, num_replicas: int
) -> None:
    with pytest.raises(error, match=message):
        make(net, num_replicas)(*batch)


def test_an_error_of_the_model_s_own_stays() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            raise TypeError("an error of its own")

    with pytest.raises(TypeError, match="an error of its own"):
        make(Own(), 1)((X, Y))


def test_a_list_of_images_of_one_size_goes_into_rows() -> None:
    images = [torch.randn(3, 16, 16) for _ in range(16)]
    model = everygpu.DataParallel(nn.Linear(4, 2), ["cpu"] * 2)
    with pytest.raises(
        SplitError, match=r"3 in args\[0\]\[0\] .* A list whose items are each a row goes into everygpu.Rows"
    ):
        model(images, torch.zeros(16))


def test_a_misspelt_split() -> None:
    with pytest.raises(OptionError, match=r"got 'evn'\. Did you mean 'even'\?"):
        everygpu.DataParallel(nn.Linear(4, 2), ["cpu"] * 2, split="evn")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU 0")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(DeviceError, match="^No CUDA for the device 0"):
        everygpu.DataParallel(nn.Linear(4, 2), [0])
