"""What we rely on in torch's thread-local states, and in the tensors of its transforms; see test_torch_private.py."""

import torch

from everygpu.torch_private import autograd, distributed


def test_batched_tensors_are_told_from_others():
    x, seen = torch.ones(2, requires_grad=True), []
    y = x * 2
    y.register_hook(lambda grad: seen.append(autograd.are_batched([grad])))
    y.sum().backward(retain_graph=True)
    torch.autograd.grad(y, x, torch.ones(3, 2), is_grads_batched=True, retain_graph=True)
    torch.func.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True))(torch.ones(3, 2))
    assert seen == [False, True, True]
    assert not autograd.are_batched([None, torch.ones(1)])
    assert autograd.are_batched([]) is False


def test_ranks_that_are_not_there():
    with distributed.fake_ranks(5):
        x = torch.ones(2)
        torch.distributed.all_reduce(x)
        assert torch.distributed.get_world_size() == 5
    assert not torch.distributed.is_initialized()


def test_the_store_of_a_process_group(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        distributed.default_store().set("key", "value")
        assert distributed.default_store().get("key") == b"value"
    finally:
        torch.distributed.destroy_process_group()


def test_a_flat_state_is_nested_again():
    state = {"model.weight": 1, "optimizer.0": 2}
    places = {"model.weight": ("model", "weight"), "optimizer.0": ("optimizer", 0)}
    assert distributed.unflatten(state, places) == {"model": {"weight": 1}, "optimizer": [2]}
