"""A Llama, as transformers builds it."""

from typing import Any

import torch

from everygpu.errors import BenchmarkError


def llama(
    *, rows: int = 8, length: int = 1024, vocabulary: int = 32000, width: int = 1024, num_layers: int = 15
) -> tuple[Any, ...]:
    """235M parameters, 8 × 1,024 tokens, AdamW."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise BenchmarkError("llama needs transformers: pip install transformers") from error
    num_heads = width // 64
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=num_layers,
        num_attention_heads=num_heads, num_key_value_heads=max(1, num_heads // 4), use_cache=False,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, vocabulary, (rows, length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    return model, None, optimizer, {"input_ids": ids, "labels": ids.clone()}
