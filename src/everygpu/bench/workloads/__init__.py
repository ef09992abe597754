"""The models that `everygpu bench` brings along, with their losses, optimizers and batches.

Each function returns what ``--model module:function`` asks of a user's own. They are written as training scripts are,
without regard to how everygpu works, and take sizes so that tests can run them on the CPU.
"""

from collections.abc import Callable
from typing import Any

from everygpu.bench.workloads import bert, gpt, images, llama, lstm, moe, unet

MODELS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "gpt2": gpt.gpt2,
    "gpt2-xl": gpt.gpt2_xl,
    "resnet50": images.resnet50,
    "resnet18": images.resnet18,
    "efficientnet": images.efficientnet,
    "vit": images.vit,
    "unet": unet.unet,
    "bert": bert.bert,
    "llama": llama.llama,
    "lstm": lstm.lstm,
    "moe": moe.moe,
    "tiny": gpt.tiny,
}
