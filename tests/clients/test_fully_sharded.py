"""Models of transformers, and of peft around them, that two ranks share out train and generate as on one device."""

import pytest
import torch
from torch import nn

import everygpu
from everygpu.ranks.group import init_group
from tests.clients import conftest  # noqa: F401 - in each rank, for torchvision
from tests.parallel.fully_sharded.training import whole_state
from tests.ranks.harness import run_ranks

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
ROWS = (slice(0, 2), slice(2, 5))
"""Of each rank; they have other numbers of tokens, too."""


def llama(**options):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2, **options))


def tied_llama():
    return llama(tie_word_embeddings=True)


def t5():
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def lora():
    peft = pytest.importorskip("peft")
    options = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(llama(), peft.LoraConfig(r=3, **options))


def data(step):
    ids = torch.randint(1, 32, (5, 6), generator=torch.Generator().manual_seed(step))
    labels = ids.clone()
    labels[0, 3:] = -100
    return ids, labels


def train(model, rows):
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    for step in range(5):
        ids, labels = data(step)
        optimizer.zero_grad()
        model(input_ids=ids[rows], labels=labels[rows]).loss.backward()
        nn.utils.clip_grad_norm_(params, 0.5)
        optimizer.step()
    with torch.no_grad():
        prompt = {"input_ids": data(9)[0][:, :3][rows], "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        return model.eval().generate(**prompt).tolist()


def train_all(makers):
    rank, found = init_group().rank, {}
    for make in makers:
        for level, options in (("parameters", {"checkpoint_activations": "blocks"}), ("gradients", {})):
            torch.manual_seed(0)
            model = everygpu.DataParallel(make(), ["cpu"], shard=level, **options)
            found[make.__name__, level] = train(model, ROWS[rank]), whole_state(model)
    return found


def test_ranks_train_as_one_device(tmp_path):
    makers = [llama, tied_llama, t5, *([lora] if _has_peft() else [])]
    first, second = run_ranks(train_all, makers, size=2, folder=tmp_path)
    for make in makers:
        torch.manual_seed(0)
        model = make()
        tokens = train(model, slice(None))
        for level in ("parameters", "gradients"):
            name = make.__name__, level
            assert first[name][0] + second[name][0] == tokens
            for key, value in model.state_dict().items():
                torch.testing.assert_close(first[name][1][key], value, rtol=1e-4, atol=1e-5, msg=f"{name}: {key}")


def _has_peft():
    try:
        import peft  # noqa: F401
    except ImportError:
        return False
    return True
