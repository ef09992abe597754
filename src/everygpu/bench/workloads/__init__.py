"""The models that `everygpu bench` brings along, with their losses, optimizers and batches.

Each function returns what ``--model module:function`` asks of a user's own. They are written as training scripts are,
without regard to how everygpu works, and take sizes so that tests can run them on the CPU.
"""

_HERE = "everygpu.bench.workloads"
MODELS = {
    "gpt2": f"{_HERE}.gpt:gpt2",
    "bert": f"{_HERE}.bert:bert",
    "unet": f"{_HERE}.unet:unet",
    "moe": f"{_HERE}.moe:moe",
    "resnet50": f"{_HERE}.images:resnet50",
    "vit": f"{_HERE}.images:vit",
    "convnext": f"{_HERE}.images:convnext",
    "llama": f"{_HERE}.llama:llama",
    "resnet18": f"{_HERE}.images:resnet18",
    "tiny": f"{_HERE}.gpt:tiny",
}
"""As ``module:function``: the names are known before torch is loaded."""
DEFAULT = ("gpt2", "bert", "unet")
"""Those that need torch alone."""
DYNAMIC = ("moe",)
"""Those whose steps differ in the parameters that they use."""
