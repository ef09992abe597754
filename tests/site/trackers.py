"""The recipe of docs/recipes.md that logs figures: run as it stands, for each place where they can go."""

import everygpu
from tests.site.running import blocks, page_path


def run_recipe(place, names):
    """Train for 100 steps of a tiny model, and log twice.

    Args:
        place: A word of the block that says where figures go.
        names: What the blocks find besides ``step``, ``loader`` and ``everygpu``.
    """
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    model = everygpu.DataParallel(torch.nn.Linear(4, 3), ["cpu"] * 2)
    step = everygpu.TrainStep(model, torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(200, 4), torch.randint(0, 3, (200,)))
    names |= {"everygpu": everygpu, "step": step, "loader": DataLoader(data, batch_size=2)}
    code = [code for _, code in blocks(page_path("recipes").read_text("utf-8"))]
    for word in (place, "log({"):
        (found,) = [block for block in code if word in block]
        exec(compile(found, f"<recipes.md, {word}>", "exec"), names)
    return names
