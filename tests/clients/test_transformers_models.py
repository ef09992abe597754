"""Models of transformers of many kinds, small and with random weights: outputs and gradients are one device's."""

import pytest
import torch

import everygpu

transformers = pytest.importorskip("transformers")

VOCABULARY, ROWS = 32, 5
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BOTH = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, **ENDS, "decoder_start_token_id": 1,
    "dropout": 0.0,
}  # fmt: skip
IMAGES = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 16,
}  # fmt: skip
KINDS = {
    "GPT2": ("LMHeadModel", {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, **ENDS,
                             "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}),
    "Mistral": ("ForCausalLM", {**TEXT, "num_key_value_heads": 1, "sliding_window": 4}),
    "Mamba": ("ForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}),
    "T5": ("ForConditionalGeneration", {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, **ENDS,
                                        "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0,
                                        "decoder_start_token_id": 0}),
    "Whisper": ("ForConditionalGeneration", {**BOTH, "num_mel_bins": 8, "max_source_positions": 20}),
    "Bart": ("ForConditionalGeneration", BOTH),
    "MBart": ("ForCausalLM", BOTH),
    "Llava": ("ForConditionalGeneration", {"text_config": {"model_type": "llama", **TEXT, **ENDS},
                                           "vision_config": {"model_type": "clip_vision_model", **IMAGES}}),
    "ViT": ("ForImageClassification", IMAGES),
    "Segformer": ("ForSemanticSegmentation", {"depths": [1] * 4, "hidden_sizes": [8] * 4, "sr_ratios": [1] * 4,
                                              "num_attention_heads": [1] * 4, "decoder_hidden_size": 8}),
}  # fmt: skip


def inputs_of(name):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, VOCABULARY, (ROWS, 6), generator=generator)
    labels = tokens.clone()
    labels[0], labels[1, 2:] = -100, -100  # replicas count differently, with each row's first label and without
    if name == "ViT":
        images = torch.randn(ROWS, 3, 32, 32, generator=generator, dtype=torch.float64)
        return {"pixel_values": images, "labels": torch.arange(ROWS) % 2}
    if name == "Segformer":
        images = torch.randn(ROWS, 3, 32, 32, generator=generator, dtype=torch.float64)
        pixels = torch.randint(0, 2, (ROWS, 32, 32), generator=generator)
        pixels[0], pixels[1, 5:] = 255, 255  # what it ignores
        return {"pixel_values": images, "labels": pixels}
    if name == "Whisper":
        sounds = torch.randn(ROWS, 8, 40, generator=generator, dtype=torch.float64)
        return {"input_features": sounds, "labels": labels}
    return {"input_ids": tokens, "labels": labels}


@pytest.mark.parametrize("name", KINDS)
def test_outputs_and_gradients_equal_one_device(devices, name):
    kind, config = KINDS[name]
    torch.manual_seed(0)
    bare = getattr(transformers, name + kind)(getattr(transformers, name + "Config")(**config))
    bare = bare.double().to(devices(2)[0]).train(name != "Segformer")  # its BatchNorm sees a replica's rows
    model = everygpu.DataParallel(bare, devices(2))
    inputs = {key: value.to(devices(2)[0]) for key, value in inputs_of(name).items()}
    found, expected = model(**inputs), bare(**inputs)
    assert type(found) is type(expected)
    assert list(found) == list(expected)
    torch.testing.assert_close(found.logits + 0, expected.logits)
    torch.testing.assert_close(found.loss.mean(), expected.loss)
    parameters = [p for p in bare.parameters() if p.requires_grad]
    losses, unused = (found.loss.mean(), expected.loss), {"allow_unused": True, "materialize_grads": True}
    gradients = [torch.autograd.grad(loss, parameters, **unused) for loss in losses]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", ["GPT2", "Mistral", "Llava", "ViT"])
def test_losses_of_their_loss_functions_equal_one_devices_without_gradients(devices, name, caplog):
    kind, config = KINDS[name]
    torch.manual_seed(0)
    bare = getattr(transformers, name + kind)(getattr(transformers, name + "Config")(**config))
    bare = bare.double().to(devices(2)[0]).eval()
    inputs = {key: value.to(devices(2)[0]) for key, value in inputs_of(name).items()}
    with torch.no_grad():
        found, expected = everygpu.DataParallel(bare, devices(2))(**inputs), bare(**inputs)
        torch.testing.assert_close(found.loss.mean(), expected.loss)
    assert not found.loss.requires_grad
    assert "taken by rows" not in caplog.text


@pytest.mark.parametrize("name", ["T5", "Bart", "Whisper"])
def test_losses_of_their_own_count_by_rows_without_gradients_and_say_so(devices, name, caplog):
    kind, config = KINDS[name]
    bare = getattr(transformers, name + kind)(getattr(transformers, name + "Config")(**config))
    bare = bare.double().to(devices(2)[0]).eval()
    inputs = {key: value.to(devices(2)[0]) for key, value in inputs_of(name).items()}
    with torch.no_grad():
        everygpu.DataParallel(bare, devices(2))(**inputs).loss.mean()
    assert "taken by rows" in caplog.text


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_with_a_trained_prompt_before_each_row_the_first_label_counts(devices, kind):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=2)
    bare = peft.get_peft_model(transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, use_cache=False)), config)
    bare = bare.double().to(devices(2)[0])
    inputs = {key: value.to(devices(2)[0]) for key, value in inputs_of("Llama").items()}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    found, expected = everygpu.DataParallel(bare, devices(2))(**inputs), bare(**inputs)
    torch.testing.assert_close(found.loss.mean(), expected.loss)


def test_a_model_that_compares_rows_sees_those_of_its_gpu(devices):
    text = {**TEXT, **ENDS}
    config = transformers.CLIPConfig(text_config=text, vision_config=IMAGES, projection_dim=8)
    torch.manual_seed(0)
    model = everygpu.DataParallel(transformers.CLIPModel(config).double(), devices(2))
    tokens, images = torch.randint(5, VOCABULARY, (4, 6)), torch.randn(4, 3, 32, 32, dtype=torch.float64)
    found = model(input_ids=tokens, pixel_values=images)
    assert found.image_embeds.shape == (4, 8)
    assert found.logits_per_image.shape == (4, 2)
