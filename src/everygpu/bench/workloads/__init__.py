"""The models that `everygpu bench` brings along, with their losses, optimizers and batches.

Each function returns what ``--model module:function`` asks of a user's own. They are written as training scripts are,
without regard to how everygpu works, and take sizes so that tests can run them on the CPU.
"""

MODELS = {
    "gpt2": "everygpu.bench.workloads.gpt:gpt2",
    "resnet50": "everygpu.bench.workloads.images:resnet50",
    "resnet18": "everygpu.bench.workloads.images:resnet18",
    "bert": "everygpu.bench.workloads.bert:bert",
    "tiny": "everygpu.bench.workloads.gpt:tiny",
}
"""As ``module:function``: the names are known before torch is loaded."""
