"""Which models of well-known families are recorded as CUDA graphs, and why others aren't.

python benchmarks/families.py [--family transformers] [--model llama] [--steps 12]   # all GPUs

Small models are built from configurations, without downloads: of torch.nn, and of torchvision, timm and transformers
where these are installed. Each trains on a synthetic batch, with ``DataParallel(engine="graphs")`` and with
``TrainStep``; a line says for both whether steps were launched as recordings, or the reason why not. Without GPUs only
the guards are checked: whether a module's attributes may change unseen, or have changed in a training step.
"""

import argparse
import functools
import gc
import json
import logging.handlers
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import everygpu
from everygpu.bench.report import describe_machine
from everygpu.parallel.cuda_graphs.guards import ModuleGuards

ROWS, LENGTH, WIDTH, VOCABULARY, CLASSES, PIXELS = 16, 12, 64, 97, 10, 64


class Case(NamedTuple):
    """A model with a batch."""

    net: nn.Module
    inputs: tuple[Any, ...] | dict[str, Any]
    targets: tuple[Tensor, ...] = ()  # without them the model returns its loss


Make = Callable[[], Case]
Models = Iterator[tuple[str, Make]]


class Calling(nn.Module):
    """Calls layers in a way of their own, and ends with scores of classes."""

    def __init__(self, layers: nn.Module, call: Callable[..., Tensor], width: int = WIDTH) -> None:
        super().__init__()
        self.layers, self.call, self.head = layers, call, nn.Linear(width, CLASSES)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.head(self.call(self.layers, *inputs))


def tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(2, VOCABULARY, (ROWS, length))


def labels() -> tuple[Tensor]:
    return (torch.randint(0, CLASSES, (ROWS,)),)


def vectors() -> Tensor:
    return torch.randn(ROWS, LENGTH, WIDTH)


def images(pixels: int = PIXELS) -> Tensor:
    return torch.randn(ROWS, 3, pixels, pixels)


def of_torch() -> Models:
    sizes = {"dim_feedforward": 128, "batch_first": True}

    def case(make: Callable[[], nn.Module], call: Callable[..., Tensor], *inputs: Callable[[], Tensor]) -> Make:
        return lambda: Case(Calling(make(), call), tuple(x() for x in inputs), labels())

    def mean(m: nn.Module, *x: Tensor) -> Tensor:
        return m(*x).mean(1)

    encoder = functools.partial(nn.TransformerEncoderLayer, WIDTH, 4, **sizes)
    yield "Transformer", case(lambda: nn.Transformer(WIDTH, 4, 2, 2, **sizes), mean, vectors, vectors)
    yield "TransformerEncoder", case(lambda: nn.TransformerEncoder(encoder(), 2), mean, vectors)
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        for name, options in (("", {}), ("-dropout", {"dropout": 0.1})):
            cells = functools.partial(kind, WIDTH, WIDTH, 2, batch_first=True, **options)
            yield kind.__name__ + name, case(cells, lambda m, x: m(x)[0][:, -1], vectors)
    attention = functools.partial(nn.MultiheadAttention, WIDTH, 4, batch_first=True)
    yield "MultiheadAttention", case(attention, lambda m, x: m(x, x, x)[0].mean(1), vectors)
    yield "Embedding", case(lambda: nn.Embedding(VOCABULARY, WIDTH), mean, tokens)
    yield "EmbeddingBag", case(lambda: nn.EmbeddingBag(VOCABULARY, WIDTH), lambda m, x: m(x), tokens)
    for ndim in (1, 2, 3):
        layers = getattr(nn, f"Conv{ndim}d"), getattr(nn, f"BatchNorm{ndim}d")
        make = functools.partial(lambda conv, norm: nn.Sequential(conv(3, WIDTH, 3), norm(WIDTH), nn.ReLU()), *layers)
        x = functools.partial(torch.randn, ROWS, 3, *[8] * ndim)
        yield layers[0].__name__, case(make, lambda m, x: m(x).flatten(2).mean(2), x)


def of_torchvision() -> Models:
    from torchvision.models import get_model

    names = (
        "resnet18 resnext50_32x4d efficientnet_b0 convnext_tiny vit_b_32 swin_t swin_v2_t mobilenet_v2 "
        "mobilenet_v3_small densenet121 regnet_y_400mf shufflenet_v2_x0_5 squeezenet1_1 mnasnet0_5"
    )

    def make(name: str) -> Case:
        options = {"image_size": PIXELS} if name.startswith("vit") else {}
        net = get_model(name, weights=None, num_classes=CLASSES, **options)
        return Case(net, (images(),), labels())

    return ((name, functools.partial(make, name)) for name in names.split())


def of_timm() -> Models:
    import timm

    def make(name: str) -> Case:
        net = timm.create_model(name, pretrained=False, num_classes=CLASSES)
        return Case(net, (images(net.default_cfg["input_size"][-1]),), labels())

    return ((name, functools.partial(make, name)) for name in timm.list_models("test_*"))


DECODER = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
GROUPED = {**DECODER, "num_key_value_heads": 2}
BOTH = {f"{side}_{part}": n for side in ("encoder", "decoder") for part, n in
        (("layers", 2), ("attention_heads", 4), ("ffn_dim", 128))}  # fmt: skip
IMAGE = {**DECODER, "image_size": 32, "patch_size": 8}
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("ForMaskedLM", DECODER),
    "Roberta": ("ForMaskedLM", {**DECODER, "max_position_embeddings": 64, "pad_token_id": 1}),
    "DistilBert": ("ForMaskedLM", {"dim": WIDTH, "n_layers": 2, "n_heads": 4, "hidden_dim": 128}),
    "GPT2": ("LMHeadModel", {"n_embd": WIDTH, "n_layer": 2, "n_head": 4}),
    "GPTNeoX": ("ForCausalLM", DECODER),
    "Llama": ("ForCausalLM", GROUPED),
    "Qwen2": ("ForCausalLM", GROUPED),
    "Mistral": ("ForCausalLM", GROUPED),
    "Mixtral": ("ForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "Mamba": ("ForCausalLM", {"hidden_size": WIDTH, "num_hidden_layers": 2}),
    "T5": ("ForConditionalGeneration", {"d_model": WIDTH, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4}),
    "Bart": ("ForConditionalGeneration", {"d_model": WIDTH, **BOTH}),
    "ViT": ("ForImageClassification", IMAGE),
    "CLIP": ("Model", {"text_config": {**DECODER, "vocab_size": VOCABULARY}, "vision_config": IMAGE}),
    "Whisper": ("ForConditionalGeneration", {"d_model": WIDTH, **BOTH, "max_source_positions": 32}),
}


def of_transformers() -> Models:
    import transformers

    def make(name: str) -> Case:
        suffix, options = CONFIGURATIONS[name]
        words = {} if name in ("ViT", "CLIP") else {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 1}
        if suffix == "ForConditionalGeneration":
            words |= {"pad_token_id": 0, "decoder_start_token_id": 1}
        config = getattr(transformers, f"{name}Config")(**{**words, **options})
        config.use_cache = False  # else outputs have a cache for generation, which no recording returns
        ids = tokens()
        inputs: dict[str, Any] = {"input_ids": ids, "labels": ids.clone()}
        if name == "ViT":
            config.num_labels = CLASSES
            inputs = {"pixel_values": images(32), "labels": labels()[0]}
        elif name == "CLIP":
            inputs = {"input_ids": ids, "pixel_values": images(32), "return_loss": True}
        elif name == "Whisper":
            inputs = {"input_features": torch.randn(ROWS, config.num_mel_bins, 64), "labels": ids}
        return Case(getattr(transformers, name + suffix)(config).train(), inputs)

    return ((name, functools.partial(make, name)) for name in CONFIGURATIONS)


FAMILIES = {"torch": of_torch, "torchvision": of_torchvision, "timm": of_timm, "transformers": of_transformers}


def loss_of(model: nn.Module, case: Case) -> Tensor:
    output = model(**case.inputs) if isinstance(case.inputs, dict) else model(*case.inputs)
    return F.cross_entropy(output, case.targets[0].to(output.device)) if case.targets else output.loss.mean()


def check_guards(case: Case) -> str:
    """Train two steps without everygpu; say what would keep them from being recorded."""
    loss_of(case.net, case).backward()  # what it sets at its first step is no change later
    guards = ModuleGuards([case.net])
    found = guards.find_volatile()
    loss_of(case.net, case).backward()
    return found or ("nothing changes unseen" if guards.is_current([case.net]) else "attributes have changed in a step")


def check_recorded(case: Case, steps: int, *, whole: bool) -> str:
    """Train with everygpu; say whether steps were recorded, or why not."""
    log, logger = logging.handlers.BufferingHandler(capacity=1000), logging.getLogger("everygpu")
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    try:
        model = everygpu.DataParallel(case.net, **({} if whole else {"engine": "graphs"}))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        step = everygpu.TrainStep(model, F.cross_entropy if case.targets else None, optimizer) if whole else None
        for _ in range(steps):
            if step is not None:
                step(case.inputs, *case.targets)
                continue
            optimizer.zero_grad()
            loss_of(model, case).backward()
            optimizer.step()
        owner = getattr(model._engine, "recorder", None) if step is None else step
        capture = getattr(owner, "_capture", None)
        num = 0 if capture is None else capture._num_launches
        reasons = [m for r in log.buffer if "CUDA graphs" in (m := r.getMessage()) or "recordings" in m]
        return f"{num} of {steps} recorded" if num else "; ".join(reasons) or "not recorded, no reason given"
    finally:
        logger.removeHandler(log)
        logger.setLevel(logging.NOTSET)


def check(make: Make, steps: int) -> Iterator[str]:
    ways: dict[str, Callable[[Case], str]] = {"guards": check_guards}
    for name, whole in (("DataParallel", False), ("TrainStep", True)) if torch.cuda.is_available() else ():
        ways[name] = functools.partial(check_recorded, steps=steps, whole=whole)
    for name, way in ways.items():
        torch.manual_seed(0)
        try:
            yield f"{name}: {way(make())}"
        except Exception as error:  # noqa: BLE001 - the other models are checked all the same
            yield f"{name}: failed with {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, help="only this one")
    parser.add_argument("--model", default="", help="only those with this in their name")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(json.dumps(describe_machine()))
    if not torch.cuda.is_available():
        print("no GPUs: nothing is recorded, only the guards are checked")
    for family in [options.family] if options.family else FAMILIES:
        try:
            models = dict(FAMILIES[family]())
        except (ImportError, RuntimeError) as error:  # torchvision made for another torch
            print(f"{family:12} can't be imported: {error}")
            continue
        for name, make in models.items():
            if options.model.lower() in name.lower():
                print(f"{family:12} {name:20} {'  |  '.join(check(make, options.steps))}", flush=True)


if __name__ == "__main__":
    main()
