"""What may be wrapped, in which process, and what a wrapper's loss may be called for."""

import functools
import re

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import everygpu
from everygpu.errors import LossError, ModuleError, OptionError, RankError

CPUS = ["cpu"] * 3


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


class TestProcess:
    @pytest.mark.parametrize("make", [everygpu.DataParallel, lambda m: everygpu.TrainStep(m, torch.mean, sgd(m))])
    def test_a_rank_without_a_meeting_place_says_so(self, monkeypatch, make):
        for name, value in {"RANK": "1", "WORLD_SIZE": "4"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("MASTER_ADDR", raising=False)
        with pytest.raises(RankError, match="rank 1 of 4 .*MASTER_ADDR.*torchrun"):
            make(nn.Linear(2, 2))

    @pytest.mark.parametrize("environment", [{"WORLD_SIZE": "1", "RANK": "0"}, {"WORLD_SIZE": "4"}, {"RANK": "1"}])
    def test_one_alone_is_not(self, monkeypatch, environment):
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert everygpu.DataParallel(nn.Linear(2, 2), CPUS)(torch.ones(4, 2)).shape == (4, 2)


class TestRewrapping:
    @pytest.mark.parametrize("wrap", [lambda m: everygpu.DataParallel(m, ["cpu"] * 2), nn.DataParallel])
    def test_a_cell_that_is_run_again(self, wrap, caplog):
        module = nn.Linear(4, 2)
        optimizer, x = sgd(module), torch.randn(7, 4)
        model = everygpu.DataParallel(wrap(wrap(module)), CPUS, split="even")
        assert model.module is module
        assert [r.levelname for r in caplog.records] == ["WARNING"] * 2
        assert "taking the module out of" in caplog.text
        expected = module.weight.detach() - 0.1 * torch.autograd.grad(module(x).mean(), module.weight)[0]
        model(x).mean().backward()
        optimizer.step()
        torch.testing.assert_close(module.weight.detach(), expected)

    def test_where_ours_is_in_the_place_of_torchs(self, monkeypatch):
        """Libraries that wrap models themselves then take it."""
        torchs, module, x = nn.DataParallel(nn.Linear(4, 2)), nn.Linear(4, 2), torch.randn(3, 4)
        monkeypatch.setattr(nn, "DataParallel", everygpu.DataParallel)
        torch.testing.assert_close(nn.DataParallel(module, CPUS)(x) + 0, module(x))
        assert nn.DataParallel(torchs, CPUS).module is torchs.module

    def test_train_step_takes_the_module_out_of_torchs(self):
        module, x = nn.Linear(4, 2), torch.randn(3, 4)
        step = everygpu.TrainStep(nn.DataParallel(module), torch.mean, sgd(module))
        assert step.model.module is module
        torch.testing.assert_close(step(x), module(x).mean().detach() + 0.1 * (x.mean(0).square().sum() + 1) / 2)

    def test_nothing_is_said_of_a_bare_module(self, caplog):
        everygpu.DataParallel(nn.Linear(2, 2), CPUS)
        assert not caplog.records

    def test_distributed_data_parallel_is_refused(self, tmp_path):
        distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
        try:
            model = DistributedDataParallel(nn.Linear(2, 2))
            for wrapped in (model, nn.Sequential(model)):
                with pytest.raises(ModuleError, match="got DistributedDataParallel at"):
                    everygpu.DataParallel(wrapped, CPUS)
            with pytest.raises(ModuleError, match="DistributedDataParallel"):
                everygpu.TrainStep(model, torch.mean, sgd(model))
        finally:
            distributed.destroy_process_group()

    @pytest.mark.parametrize("kind", [FullyShardedDataParallel, FSDPModule])
    def test_sharded_modules_are_refused(self, kind):
        bases = (kind,) if issubclass(kind, nn.Module) else (kind, nn.Linear)
        module = object.__new__(type("Sharded", bases, {}))  # torch's constructors take a process group
        nn.Module.__init__(module)
        with pytest.raises(ModuleError, match=f"got {kind.__name__} at 'the top'"):
            everygpu.DataParallel(module, CPUS)


class Scoring(nn.Module):
    """Returns its loss."""

    def __init__(self, reduce):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.reduce = reduce

    def forward(self, x):
        return self.reduce(self.linear(x).square())


class TestLoss:
    @pytest.mark.parametrize("kind", [LossError, RuntimeError, ValueError])
    @pytest.mark.parametrize("reduce", [torch.mean, lambda y: y.mean().reshape(1)], ids=["0-dim", "(1,)"])
    def test_backward_of_one_per_replica_says_what_to_do(self, reduce, kind):
        loss = everygpu.DataParallel(Scoring(reduce), CPUS)(torch.ones(7, 4))
        with pytest.raises(kind, match=r"got one entry from each of 3 replicas.*loss\.mean\(\).*loss\.sum\(\)"):
            loss.backward()
        with pytest.raises(kind, match=r"loss\.mean\(\)"):
            (loss * 2).backward(retain_graph=True)

    @pytest.mark.parametrize(
        ("read", "call"),
        [(lambda loss: loss.item(), "loss.mean().item()"), (float, "float(loss.mean())"), (int, "int(loss.mean())"),
         (lambda loss: f"{loss:.3f}", 'f"{loss.mean():.3f}"')],
    )  # fmt: skip
    def test_reading_one_per_replica_as_a_number_says_what_to_do(self, read, call):
        loss = everygpu.DataParallel(Scoring(torch.mean), CPUS)(torch.ones(7, 4))
        with pytest.raises(LossError, match=f"got one entry from each of 3 replicas. Call {re.escape(call)}"):
            read(loss)
        assert f"{loss}".startswith("tensor([")
        read(loss.mean().detach())

    @pytest.mark.parametrize(("reduce", "join"), [(torch.mean, torch.mean), (torch.sum, torch.sum)])
    def test_what_it_says_gives_the_gradient_of_the_whole_batch(self, reduce, join):
        x, module = torch.randn(7, 4), Scoring(reduce)
        (expected,) = torch.autograd.grad(module(x), module.linear.weight)
        join(everygpu.DataParallel(module, CPUS)(x)).backward()
        torch.testing.assert_close(module.linear.weight.grad, expected)

    def test_with_a_gradient_it_is_torchs(self):
        module = Scoring(torch.sum)
        loss = everygpu.DataParallel(module, CPUS)(torch.ones(7, 4))
        loss.backward(torch.ones(3), retain_graph=True)
        loss.backward(gradient=torch.ones(3))
        assert module.linear.weight.grad is not None

    def test_rows_are_no_losses(self):
        with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
            everygpu.DataParallel(nn.Linear(4, 2), CPUS)(torch.ones(7, 4)).backward()

    def test_on_one_row_there_is_one_loss(self):
        everygpu.DataParallel(Scoring(torch.mean), CPUS)(torch.ones(1, 4)).backward()


@pytest.mark.parametrize("make", [everygpu.DataParallel, everygpu.Feeder])
def test_wrong_split_is_told_all_choices(make):
    with pytest.raises(OptionError, match=r"'chunk', 'even', 'auto' or one weight .* got 'uneven'"):
        make(nn.Linear(2, 2) if make is everygpu.DataParallel else [], CPUS, split="uneven")


@pytest.mark.parametrize(
    ("loss", "name"),
    [(nn.MSELoss(), "MSELoss"), (torch.nn.functional.mse_loss, "mse_loss"), (None, "None"),
     (functools.partial(torch.nn.functional.mse_loss, reduction="mean"), "partial")],
)  # fmt: skip
def test_train_step_shows_what_it_does(loss, name):
    module = nn.Linear(2, 2)
    step = everygpu.TrainStep(everygpu.DataParallel(module, CPUS), loss, sgd(module), precision="bf16", clip_norm=1.0)
    assert repr(step) == (
        f"TrainStep(model=Linear, loss={name}, optimizer=SGD, device_ids=['cpu', 'cpu', 'cpu'], precision='bf16', "
        f"accumulate=1, clip_norm=1.0, num_steps=0)"
    )
