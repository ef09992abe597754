"""transformers' Trainer with everygpu's DataParallel where it takes torch's: ``torch.nn.DataParallel`` is replaced."""

import numpy as np
import pytest
import torch
from torch import nn

import everygpu
from tests.clients.replacing import replace_data_parallel

transformers = pytest.importorskip("transformers")

BATCH, VOCABULARY, LENGTH = 8, 32, 6
NUM_ROWS = {"plain": 21, "llama": 21, "bert": 24}
"""Of the last batch's five rows, one replica gets three, the other two. BERT's batches are all of eight."""
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(autouse=True, scope="module")
def no_network():
    """Models are made of configurations, and nothing may be looked for elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield


@pytest.fixture
def replaced(monkeypatch, devices):
    """Replace torch's class; on the CPU by one that knows which devices are meant, as Trainer names none."""

    class OnTheseDevices(everygpu.DataParallel):
        def __init__(self, module):
            super().__init__(module, devices(2))

    replace_data_parallel(monkeypatch, OnTheseDevices)


class Plain(nn.Module):
    """A module of the user's own: its loss is the mean over the rows it sees."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, input_ids, labels=None):
        logits = self.out(self.embedding(input_ids).mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2))


def bert():
    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, **without))


MODELS = {"llama": llama, "bert": bert, "plain": Plain}


def dataset(name, num_rows):
    """Make rows of tokens; of a language model's some labels are left out, so that replicas count differently."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (num_rows, LENGTH), generator=generator)
    if name != "llama":
        labels = tokens.sum(1) % 2
        return [{"input_ids": t, "labels": y} for t, y in zip(tokens, labels)]
    labels = tokens.clone()
    labels[torch.arange(len(tokens)) % 8 < 3, :4] = -100
    return [{"input_ids": t, "labels": y} for t, y in zip(tokens, labels)]


def make_trainer(folder, name, devices, num_replicas, num_rows=None, **options):
    """Make a Trainer for batches of ``BATCH`` rows over so many replicas."""
    # What rounding leaves of a gradient that is zero must not become a step.
    options = {"adam_epsilon": 1e-4, **options}
    options = {"max_steps": 6, "learning_rate": 1e-2, "save_strategy": "no", "seed": 0, **options}
    extras = {key: options.pop(key) for key in ("compute_metrics", "compute_loss_func") if key in options}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH // num_replicas,
        per_device_eval_batch_size=BATCH // num_replicas,
        use_cpu=devices[0].type == "cpu",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        **options,
    )
    assert arguments.device.type == devices[0].type
    arguments._n_gpu = num_replicas  # Trainer wraps the model for two GPUs or more
    torch.manual_seed(0)
    data = dataset(name, num_rows or NUM_ROWS[name])
    return transformers.Trainer(model=MODELS[name](), args=arguments, train_dataset=data, eval_dataset=data, **extras)


def logged(trainer):
    """What training has logged at each step: losses and norms of gradients."""
    return [[entry[key] for key in ("loss", "grad_norm")] for entry in trainer.state.log_history if "loss" in entry]


def train_pair(folder, name, devices, **options):
    """Train on one device and on two replicas; return both trainers."""
    trainers = [make_trainer(folder / str(n), name, devices, n, **options) for n in (1, 2)]
    for trainer in trainers:
        trainer.train()
    assert isinstance(trainers[1].model_wrapped, everygpu.DataParallel)
    assert len(logged(trainers[0])) == trainers[0].args.max_steps
    return trainers


def assert_same_training(one, two):
    torch.testing.assert_close(logged(two), logged(one), **CLOSE)
    torch.testing.assert_close(two.model.state_dict(), one.model.state_dict(), **CLOSE)


def sum_over_items(outputs, labels, num_items_in_batch):
    return nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch


def sum_for_two_gpus(outputs, labels, num_items_in_batch):
    """Divide by what Trainer multiplies with; on one device ``num_items_in_batch`` is one number."""
    return sum_over_items(outputs, labels, num_items_in_batch) / num_items_in_batch.numel()


@pytest.mark.usefixtures("replaced")
class TestTrainer:
    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("plain", {}),
            ("llama", {"gradient_accumulation_steps": 2}),
            ("llama", {"gradient_checkpointing": True}),
            ("llama", {"optim": "adafactor"}),
            ("llama", {"auto_find_batch_size": True}),
            # BERT takes the mean whatever Trainer tells it, which it then should not multiply by the number of GPUs.
            ("bert", {"average_tokens_across_devices": False}),
            ("bert", {"compute_loss_func": sum_for_two_gpus}),
        ],
        ids=lambda value: value if isinstance(value, str) else "-".join(value),
    )
    def test_training_equals_one_device(self, devices, tmp_path, name, options):
        assert_same_training(*train_pair(tmp_path, name, devices(2), **options))

    @pytest.mark.parametrize("name", ["plain", "llama"])
    def test_evaluate_and_predict_equal_one_device(self, devices, tmp_path, name):
        def metrics(predicted):
            return {"accuracy": np.mean(predicted.predictions.argmax(-1) == predicted.label_ids)}

        trainers = [make_trainer(tmp_path, name, devices(2), n, compute_metrics=metrics) for n in (1, 2)]
        evaluated = [trainer.evaluate() for trainer in trainers]
        for key in ("eval_loss", "eval_accuracy"):
            assert evaluated[1][key] == pytest.approx(evaluated[0][key], rel=1e-5)
        predicted = [trainer.predict(trainer.eval_dataset) for trainer in trainers]
        np.testing.assert_allclose(predicted[1].predictions, predicted[0].predictions, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(predicted[1].label_ids, predicted[0].label_ids)

    def test_resumed_run_equals_the_uninterrupted(self, devices, tmp_path):
        options = {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "constant"}
        whole = make_trainer(tmp_path / "whole", "llama", devices(2), 2, **options)
        whole.train()
        cut = make_trainer(tmp_path / "cut", "llama", devices(2), 2, **{**options, "max_steps": 3})
        cut.train()
        resumed = make_trainer(tmp_path / "cut", "llama", devices(2), 2, **options)
        resumed.train(resume_from_checkpoint=True)
        assert_same_training(whole, resumed)

    def test_saved_model_is_a_plain_one(self, devices, tmp_path):
        trainer = make_trainer(tmp_path, "llama", devices(2), 2, max_steps=2)
        trainer.train()
        trainer.save_model(tmp_path / "saved")
        loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
        expected = {k: v.cpu() for k, v in trainer.model.state_dict().items()}
        torch.testing.assert_close(loaded.state_dict(), expected, rtol=0, atol=0)


class ChunksInTurn(nn.DataParallel):
    """What ``torch.nn.DataParallel`` computes, which has no replicas on the CPU: chunks in turn, by one module."""

    def forward(self, **inputs):
        parts = [dict(zip(inputs, values)) for values in zip(*(x.chunk(2) for x in inputs.values()))]
        outputs = [self.module(**part) for part in parts]
        join = {key: [torch.atleast_1d(out[key]) for out in outputs] for key in outputs[0]}
        return type(outputs[0])({key: torch.cat(values) for key, values in join.items()})


class OnTwoGPUs(nn.DataParallel):
    def __init__(self, module):
        super().__init__(module, [0, 1])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("bert", {}),
        ("llama", {"average_tokens_across_devices": False}),
        ("llama", {"label_smoothing_factor": 0.1}),
        ("bert", {"compute_loss_func": sum_over_items}),
        ("llama", {"num_rows": 17}),  # of which the last batch has one: a single replica runs
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
@pytest.mark.cards(2)  # nn.DataParallel's own
def test_training_equals_nn_data_parallel(devices, tmp_path, monkeypatch, request, name, options):
    """Trainer multiplies some losses by the number of GPUs; the same happens here, so a script may stay as it is."""
    chosen, trainers = devices(2), []
    with monkeypatch.context() as within:
        replace_data_parallel(within, ChunksInTurn if chosen[0].type == "cpu" else OnTwoGPUs)
        trainers.append(make_trainer(tmp_path / "theirs", name, chosen, 2, **options))
        trainers[0].train()
    request.getfixturevalue("replaced")
    trainers.append(make_trainer(tmp_path / "ours", name, chosen, 2, **options))
    trainers[1].train()
    assert_same_training(*trainers)


class TestCalls:
    """A wrapped model, called by a loop of the user's own."""

    @pytest.fixture
    def make_pair(self, devices):
        """``make_pair()`` gives a wrapped model and the model itself."""

        def make():
            torch.manual_seed(0)
            bare = llama().double().eval().to(devices(2)[0])
            return everygpu.DataParallel(bare, devices(2)), bare

        return make

    @pytest.fixture
    def tokens(self, devices):
        generator = torch.Generator().manual_seed(2)
        return torch.randint(6, VOCABULARY, (5, 4), generator=generator).to(devices(2)[0])

    def test_generate_until_each_row_has_ended(self, make_pair, tokens):
        """A replica stops when its rows have ended: what is shorter than the longest is filled up."""
        model, bare = make_pair()
        options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        free = bare.generate(tokens, **options)
        lengths = set()
        for end in range(VOCABULARY):
            expected = bare.generate(tokens, eos_token_id=end, **options)
            found = model.call_method("generate", tokens, eos_token_id=end, pad_value=0, **options)
            assert torch.equal(found + 0, expected)
            parts = [bare.generate(part, eos_token_id=end, **options) for part in (tokens[:3], tokens[3:])]
            lengths.add(len({part.shape[1] for part in parts}))
        assert free.shape == (5, 16)
        assert 2 in lengths

    def test_a_cache_goes_back_to_the_replicas_that_filled_it(self, make_pair, tokens):
        model, bare = make_pair()
        with torch.no_grad():
            ours, theirs = model(tokens), bare(tokens)
            for _ in range(2):
                ours, theirs = (
                    m(tokens[:, :1], past_key_values=out.past_key_values) for m, out in ((model, ours), (bare, theirs))
                )
                torch.testing.assert_close(everygpu.parallel.gather(ours.logits), theirs.logits)

    def test_outputs_have_all_that_one_device_gives(self, make_pair, tokens):
        model, bare = make_pair()
        with torch.no_grad():
            found = model(tokens, labels=tokens, output_hidden_states=True)
            expected = bare(tokens, labels=tokens, output_hidden_states=True)
        assert type(found) is type(expected)
        assert found.keys() == expected.keys()
        torch.testing.assert_close(found.logits + 0, expected.logits)
        torch.testing.assert_close([h + 0 for h in found.hidden_states], list(expected.hidden_states))
        torch.testing.assert_close(found.loss.mean(), expected.loss)

    def test_batch_of_a_tokenizer(self, devices):
        words = pytest.importorskip("tokenizers").Tokenizer(
            pytest.importorskip("tokenizers.models").WordLevel({"?": 0, "a": 1, "b": 2}, unk_token="?")
        )
        words.pre_tokenizer = pytest.importorskip("tokenizers.pre_tokenizers").Whitespace()
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", pad_token="?")
        batch = tokenizer(["a b", "b", "a a a", "a", "b b"], padding=True, return_tensors="pt")

        class Masked(nn.Module):
            def forward(self, batch):
                return batch["input_ids"] * batch.attention_mask, batch

        product, returned = everygpu.DataParallel(Masked(), devices(2))(batch)
        assert torch.equal((product + 0).cpu(), batch["input_ids"] * batch["attention_mask"])
        assert isinstance(returned, transformers.BatchEncoding)
        assert returned.tokens(3) == batch.tokens(3)

    def test_model_keeps_its_methods(self, make_pair, tmp_path):
        model, bare = make_pair()
        assert (model.config, model.dtype, model.num_parameters()) == (bare.config, bare.dtype, bare.num_parameters())
        model.save_pretrained(tmp_path)
        loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
        torch.testing.assert_close(loaded.state_dict(), model.state_dict(), check_device=False, rtol=0, atol=0)


def small_bert():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=100, **sizes))


class TestCheckpoints:
    @pytest.mark.parametrize("shard_bytes", [5 * 10**9, 20_000], ids=["one file", "shards"])
    def test_a_directory_with_a_config_is_a_pretrained_one(self, tmp_path, monkeypatch, shard_bytes):
        monkeypatch.setattr("everygpu.checkpoint.format.SHARD_BYTES", shard_bytes)
        model, path = small_bert(), tmp_path / "checkpoint"
        wrapped = everygpu.DataParallel(model, ["cpu"] * 2)
        for epoch in (1, 2):  # the config stays when the checkpoint is saved again
            everygpu.save(path, model=wrapped, optimizer=torch.optim.AdamW(model.parameters()), epoch=epoch)
            model.config.save_pretrained(path) if epoch == 1 else None
            loaded, about = type(model).from_pretrained(path, output_loading_info=True)
            torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
            assert not any(about.values())
        assert everygpu.load(path, model=small_bert()) == {"epoch": 2}

    def test_a_pretrained_directory_loads(self, tmp_path):
        model, target = small_bert(), small_bert()
        model.save_pretrained(tmp_path)
        everygpu.load(tmp_path, model=everygpu.DataParallel(target, ["cpu"] * 2))
        torch.testing.assert_close(target.state_dict(), model.state_dict(), rtol=0, atol=0)
