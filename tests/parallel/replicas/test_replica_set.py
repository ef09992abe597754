"""Replicas that persist, follow their module, and give their gradients to it."""

import pytest
import torch
from torch import nn

from everygpu.errors import DeviceError, ModuleError, PlacementError
from everygpu.parallel import replicate
from everygpu.parallel.replicas.replica_set import ReplicaSet


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.extra = nn.ParameterList([nn.Parameter(torch.ones(2))])
        self.frozen = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)

    def forward(self, x):
        return self.layers(x) * self.extra[0]


def build(device, net=Net):
    torch.manual_seed(0)
    return net().to(device)


def everyone(used):
    return list(range(len(used)))


def same_tensors(replica, module):
    mine, theirs = module.state_dict(), replica.state_dict()
    return mine.keys() == theirs.keys() and all(mine[k].cpu().equal(theirs[k].cpu()) for k in mine)


class TestReplicate:
    def test_one_module_per_device(self, devices):
        used = devices(3)
        net = build(used[0])
        replicas = replicate(net, used)
        assert replicas[0] is net
        assert [next(r.parameters()).device for r in replicas] == used
        assert all(type(r) is Net for r in replicas)
        assert all(same_tensors(r, net) for r in replicas)

    def test_detached_replicas_give_none(self, devices):
        used = devices(2)
        net = build(used[0])
        _, replica = replicate(net, used, detach=True)
        assert all(p.is_leaf for p in replica.parameters())
        replica(torch.ones(4, 3, device=used[1])).sum().backward()
        assert all(p.grad is None for p in net.parameters())
        assert torch.is_grad_enabled()

    def test_wrong_arguments(self):
        with pytest.raises(ModuleError, match="replicate: needs a torch.nn.Module, got the optimizer SGD"):
            replicate(torch.optim.SGD([torch.ones(1)]), ["cpu"])
        with pytest.raises(DeviceError, match="device_ids is empty"):
            replicate(Net(), [])
        net = Net()
        net.extra = nn.ParameterList([nn.Parameter(torch.ones(2, device="meta"))])
        with pytest.raises(PlacementError, match="'extra.0' on meta"):
            replicate(net, ["cpu"] * 2)


class TestReplicaSet:
    @pytest.mark.parametrize(
        "change",
        [
            lambda net: torch.optim.SGD(net.layers.parameters(), lr=1.0).step(),
            lambda net: net.load_state_dict({k: v + 1 for k, v in net.state_dict().items()}),
            lambda net: net.extra[0].data.clamp_(max=0.5),
            lambda net: setattr(net.extra[0], "data", torch.full_like(net.extra[0], 9)),
            lambda net: setattr(net.layers[0], "bias", nn.Parameter(torch.full_like(net.layers[0].bias, 9))),
            lambda net: setattr(net.layers[1], "running_mean", torch.full_like(net.layers[1].running_mean, 9)),
            lambda net: net.layers[1].running_var.fill_(9),
            lambda net: net.layers[1].num_batches_tracked.add_(5),
            lambda net: net.frozen.data.fill_(9),
            lambda net: net.layers.append(nn.Linear(2, 2).to(net.frozen.device)),
            lambda net: setattr(net, "layers", nn.Linear(3, 2).to(net.frozen.device)),
            lambda net: net.register_buffer("late", torch.ones(1, device=net.frozen.device)),
            lambda net: net.double(),
            lambda net: net.to(memory_format=torch.preserve_format).requires_grad_(False),
            lambda net: net.layers[0].register_parameter("bias", None),
        ],
        ids=["optimizer", "load", "write through data", "new data", "new parameter", "new buffer", "buffer", "counter",
             "frozen", "new module", "another module", "another buffer", "dtype", "freeze", "parameter removed"],
    )  # fmt: skip
    def test_every_change_arrives(self, devices, change):
        used = devices(3)
        net = build(used[0])
        net(torch.ones(4, 3, device=used[0])).sum().backward()
        replicas = ReplicaSet(net, used)
        replicas.refresh(everyone(used))
        change(net)
        for replica, device in zip(replicas.refresh(everyone(used)), used):
            assert same_tensors(replica, net)
            assert {t.device for t in replica.state_dict().values()} == {device}
            assert [p.requires_grad for p in replica.parameters()] == [p.requires_grad for p in net.parameters()]
            assert str(replica).replace(str(device), str(used[0])) == str(net)

    def test_tensors_that_share_no_bucket(self, devices):
        used = devices(2)

        class Marked(torch.Tensor):
            pass

        net = nn.Module()
        net.sparse = nn.Parameter(torch.eye(2).to_sparse().to(used[0]))
        net.register_buffer("marked", torch.ones(2, device=used[0]).as_subclass(Marked))
        net.plain = nn.Parameter(torch.ones(2, device=used[0]))
        _, replica = ReplicaSet(net, used).refresh([0, 1])
        assert replica.sparse.is_sparse
        assert isinstance(replica.sparse, nn.Parameter)
        assert isinstance(replica.marked, Marked)
        (torch.sparse.sum(replica.sparse) + replica.plain.sum()).backward()
        assert net.sparse.grad.to_dense().tolist() == [[1, 0], [0, 1]]
        assert net.plain.grad.tolist() == [1, 1]

    def test_what_cannot_be_copied_is_named(self):
        class Odd(torch.Tensor):
            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                if func is torch.Tensor.to:
                    raise KeyError("no copies")
                return super().__torch_function__(func, types, args, kwargs)

        net = build("cpu")
        net.layers[0].odd = [torch.ones(2).as_subclass(Odd)]
        with pytest.raises(KeyError, match="no copies") as caught:
            ReplicaSet(net, [torch.device("cpu")] * 2).refresh([0, 1])
        assert "attribute 'odd' of Linear can't be copied" in str(caught.value.__cause__)


class TestAverageBuffers:
    def make(self, used):
        net = nn.Module()
        net.register_buffer("mean", torch.tensor([1.0, float("-inf")], device=used[0]))
        net.register_buffer("count", torch.tensor(7, device=used[0]))
        net.register_buffer("again", net.mean)
        replicas = ReplicaSet(net, used)
        return net, replicas, replicas.refresh(everyone(used))

    def test_only_replicas_that_ran_count(self):
        net, replicas, modules = self.make([torch.device("cpu")] * 3)
        modules[1].mean[0] = 100
        modules[2].mean = torch.full((2,), 3.0)  # as a forward may
        replicas.average_buffers([0, 2], [1, 1])
        assert net.mean[0].item() == 2

    def test_infinities_stay_and_shared_buffers_move_once(self, devices):
        used = devices(2)
        net, replicas, modules = self.make(used)
        modules[1].mean[0] = 3
        replicas.average_buffers([0, 1], [1, 1])
        assert net.mean.tolist() == [2, float("-inf")]
        assert net.again is net.mean

    def test_without_rows_nothing_changes(self, devices):
        used = devices(2)
        net, replicas, modules = self.make(used)
        modules[0].mean[0] = 5
        replicas.average_buffers([0], [0])
        assert net.mean[0].item() == 5

    def test_it_is_no_edit_for_autograd(self):
        net, replicas, modules = self.make([torch.device("cpu")] * 2)
        version = net.mean._version
        modules[1].mean.data[0] = 3
        replicas.average_buffers([0, 1], [1, 1])
        assert net.mean._version == version
