"""Which public models are captured, and how fast: 300 classes in small, one row each, on one GPU.

    python benchmarks/coverage.py --results coverage.jsonl --limit 540             # the same command goes on
    python benchmarks/coverage.py --results coverage.jsonl --part 0/8              # of eight calls, on a GPU each
    python benchmarks/coverage.py --results coverage.jsonl --cpu --only "pyg:.*"   # without captures

Torchvision, timm, transformers by configuration, and layers of PyG; what isn't installed is left out. Every model
trains without dropout, in float32 and from the same weights: eagerly, by a CUDA graph of the whole step made by hand,
by everygpu.DataParallel and by TrainStep. A row has whether the last two were captured, or the reason; milliseconds of
each; and how far losses are from the eager ones. Several models share a process; one that hangs ends after --timeout.
"""

import argparse
import copy
import faulthandler
import gc
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everygpu.bench.measure import time_rounds
from everygpu.bench.report import describe_versions, find_card
from everygpu.bench.runner import Results, find_commit
from everygpu.bench.training import Training
from everygpu.bench.ways import WAYS, Work, engine_in_use

WARM_UP, TIMED, ROUNDS, IN_A_PROCESS, LEAST_S = 12, 10, 3, 10, 40
WAYS_HERE = ("bare", "graph", "loop", "step")
Row = dict[str, Any]

TORCHVISION = """alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 maxvit_t
mnasnet0_5 mobilenet_v2 mobilenet_v3_small mobilenet_v3_large regnet_x_400mf regnet_y_400mf resnet18 resnet50
resnext50_32x4d shufflenet_v2_x0_5 shufflenet_v2_x1_0 squeezenet1_0 squeezenet1_1 swin_t swin_v2_t vgg11 vgg11_bn
vit_b_32 wide_resnet50_2"""
SMALL = ("atto", "femto", "pico", "nano", "xxs", "xx_small", "tiny", "_xs", "mini", "x_small", "small", "_s", "050",
         "18", "_b0", "s12", "_26", "_t", "lite", "34", "50", "base")  # fmt: skip
"""What a module's smallest model has in its name, the surest word first."""
CAUSAL = """afmoe apertus arcee bamba biogpt bitnet bloom codegen cohere cohere2 ctrl cwm deepseek_v2 deepseek_v3
diffllama doge dots1 ernie4_5 ernie4_5_moe exaone4 falcon falcon_mamba flex_olmo gemma gemma2 gemma3_text glm glm4
glm4_moe gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite granitemoe helium hunyuan_v1_dense jamba jetmoe lfm2
llama mamba mamba2 minimax mistral mixtral modernbert-decoder mpt nemotron olmo olmo2 olmo3 olmoe openai-gpt opt
persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next recurrent_gemma rwkv seed_oss smollm3 stablelm
starcoder2 xglm xlnet"""
MASKED = """albert bert camembert convbert data2vec-text deberta deberta-v2 distilbert electra ernie esm eurobert
flaubert fnet ibert megatron-bert mobilebert modernbert mpnet nystromformer rembert roberta roformer squeezebert xlm
xlm-roberta"""
SEQ2SEQ = "bart blenderbot led longt5 m2m_100 marian mbart mt5 mvp pegasus plbart switch_transformers t5 umt5"
IMAGES = """beit bit convnext convnextv2 cvt dinov2 efficientnet focalnet hiera ijepa mobilenet_v1
mobilenet_v2 mobilevit poolformer pvt pvt_v2 regnet resnet segformer siglip swiftformer swin swinv2 vit
vit_msn"""
PYG = """AGNNConv AntiSymmetricConv APPNP ARMAConv ChebConv ClusterGCNConv EdgeConv EGConv FAConv FeaStConv FiLMConv
GATConv GATv2Conv GatedGraphConv GCNConv GeneralConv GENConv GINConv GraphConv LEConv LGConv MFConv MixHopConv
ResGatedGraphConv SAGEConv SGConv SimpleConv SSGConv SuperGATConv TAGConv TransformerConv WLConvContinuous"""
SIZES = {
    "vocab_size": 128, "hidden_size": 64, "d_model": 64, "n_embd": 64, "embedding_size": 64, "emb_dim": 64,
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_decoder_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "n_head": 4, "n_heads": 4,
    "num_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "intermediate_size": 128,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "d_ff": 128, "d_kv": 16, "n_inner": 128,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "ffn_dim": 128, "head_dim": 16, "n_positions": 64, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "word_embed_proj_dim": 64,
    "rotary_dim": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "decoder_vocab_size": 128,
    "expand": 1, "mamba_expand": 1, "mamba_n_heads": 4, "mamba_d_head": 16, "max_position_embeddings": 128,
    "n_groups": 1, "n_shared_experts": 1, "image_size": 32, "patch_size": 8, "use_cache": False, "num_labels": 10,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
"""Of a configuration, where it has them; lists of layers' kinds are cut to two."""


def list_models() -> list[str]:
    """Name all models that can be made here."""
    names = []
    if find_spec("torchvision"):
        names += [f"torchvision:{name}" for name in TORCHVISION.split()]
    if find_spec("timm"):
        import timm

        for module in timm.list_modules():
            found = timm.list_models(module=module)
            names += [f"timm:{min(found, key=_smallness)}"] if found else []
    if find_spec("transformers"):
        kinds = {"causal": CAUSAL, "masked": MASKED, "seq2seq": SEQ2SEQ, "images": IMAGES}
        names += [f"transformers:{kind}:{name}" for kind, text in kinds.items() for name in text.split()]
    if find_spec("torch_geometric"):
        names += [f"pyg:{name}" for name in PYG.split()]
    return names


def _smallness(name: str) -> tuple[int, int, str]:
    return next((i for i, word in enumerate(SMALL) if word in name), len(SMALL)), len(name), name


def make(name: str) -> Training:
    """Make a model, the same every time, with what it takes to train it."""
    torch.manual_seed(0)
    family, _, rest = name.partition(":")
    model, loss, batch = MAKERS[family](rest)
    for module in model.modules():  # losses are to be compared, and generators differ
        for attribute in ("p", "drop_prob", "dropout", "attention_dropout"):
            if isinstance(vars(module).get(attribute), float):
                setattr(module, attribute, 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return Training(model.train(), loss, optimizer, batch)


def first_cross_entropy(output: Any, target: Tensor) -> Tensor:
    """Classify by a model's main output, where it has others as well."""
    logits = output if isinstance(output, Tensor) else output[0]
    return F.cross_entropy(logits, target)


def _images(size: int, channels: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(4, channels, size, size), torch.randint(0, 10, (4,))


def make_torchvision(name: str) -> tuple[Any, ...]:
    from torchvision.models import get_model

    size = 299 if name == "inception_v3" else 224
    return get_model(name, weights=None, num_classes=10), first_cross_entropy, _images(size)


def make_timm(name: str) -> tuple[Any, ...]:
    import timm

    model = timm.create_model(name, pretrained=False, num_classes=10)
    channels, size, _ = model.pretrained_cfg.get("input_size", (3, 224, 224))
    return model, first_cross_entropy, _images(size, channels)


def make_transformers(name: str) -> tuple[Any, ...]:
    import transformers
    from transformers import AutoConfig

    kind, _, model_type = name.partition(":")
    config = AutoConfig.for_model(model_type)
    for key, value in SIZES.items():
        # Models with several stages are small already, and have sizes that go together.
        if hasattr(config, "depths") and key not in ("num_labels", "use_cache"):
            continue
        if hasattr(config, key) and not isinstance(getattr(config, key), (list, tuple, dict)):
            with suppress(AttributeError, ValueError, NotImplementedError):  # one that is computed from others
                setattr(config, key, value)
    for key, value in list(vars(config).items()):
        if re.search(r"drop", key) and isinstance(value, float):
            setattr(config, key, 0.0)
        if key in ("layer_types", "mlp_layer_types", "layers_block_type") and isinstance(value, list):
            setattr(config, key, [*dict.fromkeys(value), *value][:2])
    if hasattr(config, "kv_lora_rank"):  # latent attention has no groups
        config.num_key_value_heads = config.num_attention_heads
    if kind == "seq2seq" and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    head = {"causal": "CausalLM", "masked": "MaskedLM", "seq2seq": "Seq2SeqLM", "images": "ImageClassification"}[kind]
    model = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    if kind == "images":
        size = getattr(config, "image_size", 224)
        images, labels = _images(size if isinstance(size, int) else size[0], getattr(config, "num_channels", 3))
        return model, None, {"pixel_values": images, "labels": labels}
    ids = torch.randint(3, 100, (4, 32))
    return model, None, {"input_ids": ids, "labels": ids.clone()}


def make_pyg(name: str) -> tuple[Any, ...]:
    from torch_geometric import nn as pyg
    from torch_geometric.data import Batch, Data

    class Net(nn.Module):
        """Two layers of one kind, between others that have their sizes."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(8, 16), nn.LazyLinear(10)
            self.layers = nn.ModuleList(_layer(name) for _ in range(1 if name == "MixHopConv" else 2))

        def forward(self, data: Any) -> Tensor:
            first = x = self.embed(data.x).relu()
            for layer in self.layers:
                x = layer(x, first, data.edge_index) if name == "FAConv" else layer(x, data.edge_index)
            return self.head(pyg.global_mean_pool(x, data.batch, size=4))

    def graph() -> Any:
        return Data(x=torch.randn(12, 8), edge_index=torch.randint(0, 12, (2, 40)))

    net, batch = Net(), Batch.from_data_list([graph() for _ in range(4)])
    net(batch)  # the last layer's width
    return net, F.cross_entropy, (batch, torch.randint(0, 10, (4,)))


def _layer(name: str) -> nn.Module:
    from torch_geometric import nn as pyg

    kind = getattr(pyg, name)
    if name in ("GINConv", "EdgeConv"):
        return kind(nn.Sequential(nn.Linear(32 if name == "EdgeConv" else 16, 16), nn.ReLU()))
    if name in ("LGConv", "SimpleConv", "AGNNConv", "WLConvContinuous"):
        return kind()
    if name in ("FAConv", "AntiSymmetricConv"):
        return kind(16)
    more = {"APPNP": (3, 0.1), "ChebConv": (16, 16, 2), "GatedGraphConv": (16, 2), "SSGConv": (16, 16, 0.1)}
    return kind(*more.get(name, (16, 16)))


MAKERS: dict[str, Callable[[str], tuple[Any, ...]]] = {
    "torchvision": make_torchvision,
    "timm": make_timm,
    "transformers": make_transformers,
    "pyg": make_pyg,
}


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect why steps aren't captured, as everygpu logs it."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            _, is_reason, reason = record.getMessage().partition("without CUDA graphs: ")
            found.extend([reason.rstrip(".")] if is_reason else [])

    logger, handler = logging.getLogger("everygpu"), Handler()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def measure_model(name: str, device: torch.device) -> Row:
    """Train by each way, and return the row."""
    made: Training | str
    try:
        made = make(name)
    except Exception as error:  # noqa: BLE001 - is the row's outcome
        return {"not_made": _describe(error)}
    row: Row = {"num_params": sum(p.numel() for p in made.model.parameters())}
    del made
    for way in WAYS_HERE:
        if way == "graph" and device.type != "cuda":
            continue
        try:
            with heard() as reasons:
                row[way] = measure_way(name, way, device)
        except Exception as error:  # noqa: BLE001 - is the row's outcome
            row[way] = {"error": _describe(error)}
            if way == "bare":
                return {"not_made": row[way]["error"]}
        if way in ("loop", "step") and row[way].get("engine") != "capture":
            row[way]["reason"] = reasons[0] if reasons else "" if device.type == "cuda" else "no GPU"
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize()  # after an error on the device, nothing more can be measured in this process
            torch.cuda.empty_cache()
    return row


def measure_way(name: str, way: str, device: torch.device) -> Row:
    step = WAYS[way].make(Work(training=make(name), devices=[device]))

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    losses = [float(step().mean()) for _ in range(WARM_UP)]
    times = time_rounds(step, wait, ROUNDS, TIMED)
    losses.append(float(step().mean()))
    return {**times, "losses": losses, "engine": engine_in_use(step.net)}


def _describe(error: Exception) -> str:
    """Name an error, and the last line of a file that isn't torch's or everygpu's."""
    places, frame = [], error.__traceback__
    while frame is not None:
        places.append((frame.tb_frame.f_code.co_filename, frame.tb_lineno))
        frame = frame.tb_next
    theirs = [p for p in places if "site-packages" in p[0] and f"{os.sep}torch{os.sep}" not in p[0]]
    where = f" ({theirs[-1][0].partition('site-packages' + os.sep)[2]}:{theirs[-1][1]})" if theirs else ""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:400] + where


def finish(row: Row) -> Row:
    """Compare with the eager way: losses, by the largest relative distance, and times."""
    bare = row.get("bare", {})
    for way in WAYS_HERE[1:]:
        found = row.get(way, {})
        if "losses" in found:
            pairs = zip(found["losses"], bare["losses"])
            found["loss_difference"] = max(abs(a - b) / max(abs(b), 1e-6) for a, b in pairs)
            found["speed"] = bare["ms"] / found["ms"]
    for way in WAYS_HERE:
        row.get(way, {}).pop("losses", None)
    return row


def measure_here(job: Row) -> None:
    """Measure some models in this process; begin a line for each, and add what came of it."""
    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision("high")
    device = torch.device("cpu" if job["cpu"] else "cuda:0")
    for name in job["models"]:
        print(json.dumps(name), flush=True)
        faulthandler.dump_traceback_later(job["timeout"], exit=True)
        print(json.dumps(finish(measure_model(name, device))), flush=True)
    os._exit(0)


def run_batch(names: list[str], options: argparse.Namespace, limit_s: float) -> Iterator[tuple[str, Row]]:
    """Measure models in a process; one that ends it, or hangs, is a row as well, and the rest is left."""
    job = {"models": names, "cpu": options.cpu, "timeout": options.timeout}
    command = [sys.executable, __file__, "--job", json.dumps(job)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+", errors="replace") as errors:
        is_cut = False
        with subprocess.Popen(command, stdout=out, stderr=errors, start_new_session=True) as process:
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                is_cut = True
                process.kill()
        out.seek(0)
        errors.seek(0)
        said = [json.loads(line) for line in out.read().splitlines() if line.startswith(("{", '"'))]
        reason = errors.read()
    yield from zip(said[::2], said[1::2])
    if len(said) % 2 and not is_cut:
        frames = re.findall(r'File "(?:.*site-packages/)?(.*?)", line (\d+)', reason.partition("Timeout (")[2])
        where = f": {frames[0][0]}:{frames[0][1]}" if frames else ""
        ended = f"no result in {options.timeout:g} s{where}" if "Timeout (" in reason else reason.strip()[-300:]
        yield said[-1], {"not_made": ended or f"exit code {process.returncode}"}


def describe(name: str, row: Row) -> str:
    if "not_made" in row:
        return f"{name:48} not made: {row['not_made']}"
    cells = [f"{name:48} {row['bare']['ms']:8.2f}"]
    for way in WAYS_HERE[1:]:
        found = row.get(way, {})
        text = f"{found['ms']:8.2f} {found['loss_difference']:.0e}" if "ms" in found else f"{'-':>14}"
        cells.append(text + (" captured" if found.get("engine") == "capture" else f" {found.get('reason', '')}"[:60]))
    return "  ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    more = parser.add_argument
    more("--results", type=Path, help="file of rows, to which they are added")
    more("--commit", help="name of the code's state; git's commit by default")
    more("--only", default="", metavar="REGEX", help="models whose names match from their beginning")
    more("--part", default="0/1", metavar="I/N", help="every N-th model from the I-th on")
    more("--limit", type=float, default=1e9, metavar="SECONDS", help="end before so many have passed")
    more("--timeout", type=float, default=120, metavar="SECONDS", help="for a model")
    more("--cpu", action="store_true")
    more("--list", action="store_true", help="print the names only")
    more("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        measure_here(json.loads(options.job))
    deadline = time.monotonic() + options.limit
    index, _, number = options.part.partition("/")
    names = [name for name in list_models() if re.match(options.only, name)][int(index) :: int(number)]
    if options.list:
        print("\n".join(names), len(names), sep="\n")
        return
    results = Results(options.results)
    common = {"commit": options.commit or find_commit(), "card": find_card("cpu" if options.cpu else "cuda"),
              "way": "coverage", "num_devices": 1, "rows": None, "precision": "fp32"}  # fmt: skip
    versions = describe_versions()
    while left := [name for name in names if results.find({**common, "model": name}) is None]:
        left_s = deadline - time.monotonic()
        if left_s < LEAST_S:
            print(f"The time is up: {len(left)} of {len(names)} models are left. The same command goes on.", flush=True)
            return
        for name, row in run_batch(left[:IN_A_PROCESS], options, left_s):
            date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
            results.add({**common, "model": name, "versions": copy.copy(versions), "date": date, **row})
            print(describe(name, row), flush=True)


if __name__ == "__main__":
    main()
