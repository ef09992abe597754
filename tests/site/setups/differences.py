"""What a reader of docs/differences.md has: a model of images of any size, and batch classes of the reader's own."""

import torch

import everygpu


class Batch:
    def __init__(self, x, y):
        self.x, self.y = x, y


class Ragged:
    def __init__(self, values, lengths):
        self.values, self.lengths = values, lengths

    def split(self, rows):
        lengths = self.lengths.split(rows)
        return list(map(Ragged, self.values.split([int(part.sum()) for part in lengths]), lengths))

    @staticmethod
    def join(parts):
        return Ragged(torch.cat([part.values for part in parts]), torch.cat([part.lengths for part in parts]))


class Model(torch.nn.Module):
    def forward(self, images, labels):
        return torch.stack([image.mean() for image in images]) - labels


model, labels = everygpu.DataParallel(Model(), ["cpu"] * 2), torch.ones(2)
