"""A reader's own model."""

import torch

model = torch.nn.Linear(4, 2)
