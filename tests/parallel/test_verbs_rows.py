"""What a call's rows are stays known where a subclass overrides one of the four verbs."""

import pytest
import torch
from torch import nn

import everygpu


class OwnGather(everygpu.DataParallel):
    def gather(self, outputs, output_device):
        return super().gather(outputs, output_device)


class SumOver(nn.Module):
    def forward(self, x, num_items=None):
        return x.sum() / x.numel() if num_items is None else x.sum() / num_items


@pytest.mark.parametrize("wrapper", [everygpu.DataParallel, OwnGather])
def test_results_are_weighed_by_rows_but_where_the_caller_normalizes(wrapper):
    model, x = wrapper(SumOver(), ["cpu"] * 2), torch.arange(5.0).unsqueeze(1)
    torch.testing.assert_close(model(x).mean(), x.mean())
    for shape in ((2,), (2, 1)):  # as transformers' Trainer passes it
        found = model(x, num_items=torch.tensor([5]).expand(shape))
        torch.testing.assert_close(found.mean() * 2, x.mean())


class Detections(nn.Module):
    def forward(self, x):
        return [{"boxes": row.expand(int(row), 4)} for row in x]


@pytest.mark.parametrize("wrapper", [everygpu.DataParallel, OwnGather])
def test_lists_of_one_item_per_row_are_joined(wrapper):
    found = wrapper(Detections(), ["cpu"] * 2)(torch.arange(5.0).unsqueeze(1))
    assert [item["boxes"].shape[0] for item in found] == [0, 1, 2, 3, 4]
