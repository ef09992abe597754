"""What goes wrong with FSDP2 without a word, or in words of its own."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import everygpu
from everygpu.errors import CallError, CopyError, ModuleError, OptimizerError, RankError
from everygpu.parallel.fully_sharded.shards import is_shard
from everygpu.ranks.group import init_group
from tests.parallel.fully_sharded.training import (
    VOCABULARY,
    Case,
    Net,
    batch,
    train_alone,
    train_on_ranks,
    whole_state,
)
from tests.ranks.harness import run_checks, run_ranks

pytestmark = pytest.mark.usefixtures("warm_python")


def share(module, level="parameters", **options):
    return everygpu.DataParallel(module, ["cpu"], shard=level, **options)


def an_optimizer_of_before():
    """One that was made before is found at the wrapping, one made of an old list at the first forward."""
    net = Net()
    early = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(OptimizerError, match=r"SGD was made before .* embedding.weight"):
        share(net)
    del early
    net = Net()
    params = list(net.parameters())
    model = share(net)
    late = torch.optim.SGD(params, 0.1)
    with pytest.raises(OptimizerError, match="trains? nothing"):
        model(batch(0, 2)[0])
    del late, params


def steps_of_optimizers():
    """torch's optimizers update shards as they do whole parameters, or say which others can."""
    refused = {"Adafactor": {}, "LBFGS": {}, "Rprop": {}, "SGD": {"fused": True}, "Adagrad": {"fused": True}}
    ids, y = batch(0, 4)

    def step(module, name, **options):
        params = [p for p in module.parameters() if p.ndim == 2]  # as Muon has it
        optimizer = getattr(torch.optim, name)(params, lr=0.01, **options)
        F.cross_entropy(module(ids), y).backward()
        optimizer.step(*([lambda: None] if name == "LBFGS" else []))
        return whole_state(module)

    for name, options in refused.items():
        todo = r" Leave that out\." if options else ""
        with pytest.raises(OptimizerError, match=rf"torch's {name} can't .* over ranks.*{todo} AdamW, .* SGD can\."):
            step(share(Net()), name, **options)
    names = {name for name in torch.optim.__all__ if name[0].isupper()} - {"Optimizer", "SparseAdam"}
    others = [(name, {}) for name in sorted(names) if refused.get(name) != {}]
    for name, options in [*others, ("Adam", {"fused": True}), ("AdamW", {"fused": True})]:
        found = []
        for wrap in (share, lambda net: net):
            torch.manual_seed(0)
            found.append(step(wrap(Net()), name, **options))
        atol = 2e-3 if name == "Muon" else 1e-5  # which computes in bfloat16
        torch.testing.assert_close(*found, rtol=0, atol=atol)


def values_of_rank_0():
    """All begin with rank 0's values, wherever theirs were from."""
    torch.manual_seed(init_group().rank)
    net = Net()
    expected = init_group().broadcast_object(net.state_dict())
    found = whole_state(share(net))
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def models_that_cannot_be_shared():
    for module, message in (
        (Scalar(), "parameter scale is of shape"),
        (nn.Embedding(4, 2, sparse=True), "sparse gradients"),
        (nn.LazyLinear(2), "lazy"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.GRU(2, 2)), "0.weight is of torch.float32 and 1"),
        (torch.compile(nn.Linear(2, 2)), "engine='compile'"),
        (meta(Net), "buffer scale is on the meta device"),
    ):
        with pytest.raises(ModuleError, match=message):
            share(module, wrap=[nn.GRU] if isinstance(module, nn.Sequential) else None)
    with pytest.raises(RankError, match="must be the same on all ranks"):
        share(nn.Linear(2, 2 + init_group().rank))


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


def meta(make):
    with torch.device("meta"):
        return make()


class NoReset(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 2))
        self.register_buffer("kept", torch.ones(2, device="cpu"), persistent=False)

    def forward(self, x):
        return x


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(meta(lambda: nn.Linear(6, 6)) for _ in range(2))
        self.other = meta(NoReset)

    def forward(self, x):
        return self.other(x)


def parameters_on_the_meta_device():
    """They get values where their modules say how, each rank others; what has values keeps them."""
    torch.manual_seed(0)
    module = Mixed()
    model = share(module)
    state = whole_state(model)
    weight = state["blocks.0.weight"]
    assert weight.abs().max() <= 6**-0.5
    assert len(weight.flatten().unique()) == 36
    assert state["other.weight"].isnan().all()
    assert model.other.kept.tolist() == [1, 1]
    model.load_state_dict({key: torch.full_like(value, 2) for key, value in state.items()})
    assert all((value == 2).all() for value in whole_state(model).values())
    tied = meta(lambda: Net(tied=True))
    tied.scale = torch.ones(2)
    tied = share(tied)
    assert tied.embedding.weight is tied.head.weight
    assert not any(value.isnan().any() for value in whole_state(tied).values())
    F.cross_entropy(tied(batch(0, 2)[0]), batch(0, 2)[1]).backward()
    assert is_shard(tied.head.weight.grad)


class Past(Net):
    """Uses a weight of a block from outside of it."""

    def forward(self, ids):
        return F.linear(self.embedding(ids).mean(1), self.blocks[0].up.weight)


def blocks_called_past_forward():
    ids = batch(0, 2)[0]
    with pytest.raises(CallError, match="Pass wrap="):
        share(Past())(ids)
    assert share(Past(), wrap=[nn.LayerNorm])(ids).shape == (2, 7)


class Generating(Net):
    """Looks at its own parts before it calls itself, as an encoder's ``generate`` does."""

    def generate(self, ids):
        for _ in range(2):
            picked = (self.norm.weight[0].sum() + self(ids).sum(1)).argmax(0) % VOCABULARY
            ids = torch.cat([ids, picked.expand(len(ids), 1)], 1)
        return ids


def methods_that_call_parts():
    torch.manual_seed(0)
    net, ids = Generating(), batch(0, 2)[0]
    with torch.no_grad():
        expected = net.generate(ids)
    for level in ("parameters", "gradients"):
        model = share(copy.deepcopy(net), level)
        with torch.no_grad():
            assert torch.equal(model.generate(ids), expected)
            assert torch.equal(model.call_method("generate", ids), expected)
            model(ids)
        assert all(map(is_shard, model.parameters())), "an optimizer made now has what trains"


def copies_names_and_hooks():
    model = share(Net())
    for make_copy in (copy.deepcopy, pickle.dumps):
        with pytest.raises(CopyError, match=r"everygpu\.save"):
            make_copy(model)
    assert type(model.module).__mro__[2] is Net
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in Net().named_parameters()]
    model.blocks[0].up.weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(CallError, match="a hook on parameter blocks.0.up.weight"):
        model(batch(0, 2)[0])


def losses_written_to_in_place():
    """Where ranks' batches differ, too."""
    model = share(Net())
    ids, y = batch(0, 2 + init_group().rank)
    loss = F.cross_entropy(model(ids), y)
    loss /= 2
    loss.backward()
    output = model(ids)
    output += 1
    output.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def an_error_in_forward():
    """The next forward and backward are as ever."""
    model = share(Net())
    with pytest.raises(IndexError):
        model(torch.full((2, 4), VOCABULARY))
    handle = model.blocks[1].up.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch(0, 2)[0])
    handle.remove()
    ids, y = batch(0, 2)
    F.cross_entropy(model(ids), y).backward()
    assert model.head.weight.grad is not None


class Branch(nn.Module):
    """Another layer on each rank, of the same shape."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        return self.layers[init_group().rank](x)


def branches_of_some_ranks():
    model = share(nn.Sequential(Branch(), Branch()))
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(CallError, match="go back to the last checkpoint"):
        model(torch.ones(2, 4))


def bf16_with_masters_in_fp32():
    model = share(Net(), precision="bf16")
    seen = []
    model.blocks[1].up.register_forward_hook(
        lambda module, args, output: seen.append((module.weight.dtype, output.dtype))
    )
    ids, y = batch(0, 2 + init_group().rank)
    F.cross_entropy(model(ids).float(), y).backward()
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
    half = share(Net().to(torch.bfloat16))
    F.cross_entropy(half(ids), y).backward()
    assert {p.grad.dtype for p in half.parameters()} == {torch.bfloat16}


class Gated(nn.Linear):
    """Backward needs a buffer."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("gate", torch.linspace(0, 1, 4))

    def forward(self, x):
        return (super().forward(x) * self.gate).tanh()


def two_forwards_before_a_backward():
    for level in ("parameters", "gradients", "optimizer"):
        torch.manual_seed(1)
        bare = nn.Sequential(Gated(), Gated())
        model = everygpu.DataParallel(copy.deepcopy(bare), ["cpu"], shard=level, wrap=[Gated])
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
        mine = x.split([5, 3])[init_group().rank]
        (model(mine).square().mean() + model(-2 * mine).mean()).backward()
        (bare(x).square().mean() + bare(-2 * x).mean()).backward()
        for p, q in zip(model.parameters(), bare.parameters()):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)


def parameters_that_come_later():
    for level in ("parameters", "gradients", "optimizer"):
        for change in (
            lambda net: net.append(nn.Linear(4, 4)),
            lambda net: setattr(net[1], "weight", nn.Parameter(torch.ones(4, 4))),
            lambda net: net[0].register_parameter("adapter", nn.Parameter(torch.ones(4))),
        ):
            model = everygpu.DataParallel(nn.Sequential(Gated(), Gated()), ["cpu"], shard=level, wrap=[Gated])
            for _ in range(2):
                model(torch.ones(2, 4)).sum().backward()
                model(torch.ones(2, 4))
                with torch.no_grad():
                    model(torch.ones(2, 4))
            change(model.module)
            with pytest.raises(CallError, match=r"parameter \S+ came after the model was sharded"):
                model(torch.ones(2, 4))


CHECKS = (
    two_forwards_before_a_backward,
    parameters_that_come_later,
    an_optimizer_of_before,
    steps_of_optimizers,
    values_of_rank_0,
    models_that_cannot_be_shared,
    parameters_on_the_meta_device,
    blocks_called_past_forward,
    methods_that_call_parts,
    copies_names_and_hooks,
    losses_written_to_in_place,
    an_error_in_forward,
    bf16_with_masters_in_fp32,
    branches_of_some_ranks,
)


def train_and_save_alone(folder):
    """The script of many GPUs runs on one, and saves what any other loads."""
    case = Case(clip=0.1)
    losses, state = train_on_ranks(case, 0, 1)
    steps, _ = train_on_ranks(case, 0, 1, as_step=True)
    torch.manual_seed(1)
    model = share(Net())
    everygpu.save(folder / "alone", model=model)
    net = Net()
    everygpu.load(folder / "alone", model=net)
    everygpu.load(folder / "alone", model=model)
    torch.testing.assert_close(whole_state(model), dict(net.state_dict()), rtol=0, atol=0)
    expected, end = train_alone(case, 1)
    torch.testing.assert_close(state, dict(end))
    torch.testing.assert_close(torch.tensor([losses, steps]), torch.tensor([expected] * 2))
    return True


def test_one_rank_is_a_rank(tmp_path):
    assert run_ranks(train_and_save_alone, tmp_path, size=1, folder=tmp_path) == [True]


def test_traps(tmp_path):
    run_checks(*CHECKS, size=2, folder=tmp_path)
