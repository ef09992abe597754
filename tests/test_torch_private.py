"""What every private name of torch's must do.

A test that fails with a new version of torch says what that has changed; see ``everygpu.torch_private``.
"""

import ast
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import everygpu
from everygpu import torch_private
from everygpu.torch_private import autograd, compiler, cuda, data, distributed, modes, modules, pytree, tensors
from tests.private_names import private_names

# Importing torch's compiler warns of torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

FOLDER = Path(torch_private.__file__).parent
FILES = sorted(path for path in FOLDER.glob("*.py") if path.stem != "__init__")


def public_names(path):
    for node in ast.parse(path.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
        names = [getattr(target, "id", getattr(target, "name", "_")) for target in targets]
        yield from (name for name in names if not name.startswith("_"))


def test_every_name_has_a_test():
    source = "".join(path.read_text() for path in Path(__file__).parent.glob("test_torch_private*.py"))
    for path in FILES:
        assert [n for n in public_names(path) if f"{path.stem}.{n}" not in source] == []


@pytest.mark.parametrize(("version", "tried"), [("2.11.0", True), ("2.15.1+cu132", True), ("2.16.0", False)])
def test_a_torch_that_is_newer_than_those_tried_is_told(version, tried):
    assert torch_private.is_tried(version) is tried


def test_attributes():
    x, layer, loader = torch.ones(2), nn.Linear(1, 1), DataLoader([1])
    iterator = iter(DataLoader([1]))
    adam = torch.optim.Adam([x])
    states = x, x.untyped_storage(), layer, layer.state_dict(), adam
    owners = [*states, torch.ops.aten.add.Tensor, None, loader, iterator]
    for owner, (kind, names) in zip(owners, torch_private.ATTRIBUTES.items(), strict=True):
        # Of workers' iterators, of compiled functions, and of parameters only.
        kept = {"_worker_pids_set", "_workers", "_shutdown_workers", "_try_get_data", "_is_param"}
        for name in [] if owner is None else {*names.split()} - kept:
            assert hasattr(owner, name), f"{kind} has no {name}"
    workers = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    assert all(callable(getattr(workers, name)) for name in ("_shutdown_workers", "_try_get_data"))
    assert isinstance(_marked(x), nn.Parameter)
    compiled = torch.compile(layer, backend="eager")
    assert compiled.dynamo_ctx._dynamic is None
    assert compiled.dynamo_ctx.callback._torchdynamo_orig_backend is not None


def _marked(x):
    x._is_param = True
    return x


# autograd


def test_saved_tensor_hooks_can_be_read_left_and_entered_again():
    def same(x):
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks
    seen: autograd.SavedTensorHooks | None = autograd.top_saved_tensor_hooks()
    assert seen is None
    with hooks(same, same), hooks(abs, abs):
        assert autograd.top_saved_tensor_hooks() == (abs, abs)
        autograd.pop_saved_tensor_hooks()
        assert autograd.top_saved_tensor_hooks() == (same, same)
        autograd.push_saved_tensor_hooks(abs, abs)
        with autograd.without_saved_tensor_hooks() as left:
            assert left == [(abs, abs), (same, same)]
            assert autograd.top_saved_tensor_hooks() is None
        assert autograd.top_saved_tensor_hooks() == (abs, abs)
    with torch.autograd.graph.disable_saved_tensors_hooks("not now"):
        assert autograd.top_saved_tensor_hooks() is None


def test_a_hook_is_told_about_the_backward_it_runs_in():
    x, other = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    seen = []

    def look(_):
        nodes = [torch.autograd.graph.get_gradient_edge(t).node for t in (x, other)]
        seen.append((autograd.backward_id() != autograd.NO_BACKWARD, *map(autograd.will_execute, nodes)))

    y = x * 2
    y.register_hook(look)
    y.backward(retain_graph=True)
    assert seen == [(True, True, False)]
    assert autograd.backward_id() == autograd.NO_BACKWARD
    with pytest.raises(RuntimeError, match="leaf node"):
        torch.autograd.grad(y, x)


def test_transformations_are_told():
    seen = []

    def look(x):
        seen.append((autograd.is_transforming(), bool(autograd.are_transforms_active())))
        return x

    look(torch.ones(1))
    torch.func.vmap(look)(torch.ones(1))
    with torch.autograd.forward_ad.dual_level():
        look(torch.ones(1))
    assert seen == [(False, False), (True, True), (True, False)]


# modes


def test_after_backward_calls_when_all_gradients_are_there():
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen = []
    x.register_hook(lambda _: autograd.after_backward(lambda: seen.append((x.grad, y.grad))))
    ((x * y).exp() * x).sum().backward()
    assert [[g is not None for g in row] for row in seen] == [[True, True]]
    with pytest.raises(RuntimeError):
        autograd.after_backward(seen.clear)


def test_device_constructors_are_what_takes_the_default_device():
    found = modes.device_constructors()
    assert {torch.ones, torch.arange, torch.tensor, torch.randn, torch.empty} <= found
    assert torch.relu not in found
    assert torch.ones_like not in found


def test_function_modes_are_carried():
    device = modes.DeviceContext(torch.device("cpu"))
    assert modes.function_modes() == []
    modes.push_function_mode(device)
    assert modes.function_modes() == [device]
    modes.pop_function_mode()
    with torch.device("meta"):
        assert [type(mode) for mode in modes.function_modes()] == [modes.DeviceContext]


class Seen(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("asked")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("dispatched")


def test_subclasses_are_not_asked():
    with modes.without_torch_function():
        seen = tensors.make_wrapper_subclass(Seen, (2,), dtype=torch.float32, device="cpu")
        assert seen.shape == (2,)
        with pytest.raises(AssertionError, match="dispatched"):
            torch.ops.aten.add.Tensor(seen, 1)
    with pytest.raises(AssertionError, match="asked"):
        torch.add(seen, 1)


def test_dispatch_modes_are_counted():
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    seen = []
    assert modes.num_dispatch_modes() == 0
    with modes.TorchDispatchMode():
        seen.append(modes.is_tracing())
        assert modes.num_dispatch_modes() == 1
        with modes.without_dispatch_modes():
            assert modes.num_dispatch_modes() == 0
    with FakeTensorMode():
        seen.append(modes.is_tracing())
    make_fx(lambda x: (seen.append(modes.is_tracing()), x)[1])(torch.ones(1))
    assert seen == [False, True, True]


MATRIX = torch.tensor([[1 + 2j, 3j], [0.5, 1 - 1j], [2, 1 + 1j]])


class Inverting(torch.Tensor):
    """Inverts a matrix below ``__torch_dispatch__``; on the way, torch makes conjugated tensors."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with modes.reading_lazy_values():
            return torch.linalg.pinv(MATRIX)


def test_lazy_values_are_read_below_dispatch():
    seen = tensors.make_wrapper_subclass(Inverting, (1,), dtype=torch.complex64, device="cpu")
    with modes.without_torch_function():
        torch.testing.assert_close(torch.neg(seen), torch.linalg.pinv(MATRIX))


# tensors


def test_two_tensors_are_exchanged():
    x, y = torch.zeros(2), torch.ones(3)
    view = x[:1]
    tensors.swap_tensors(x, y)
    assert (x.tolist(), y.tolist(), view.tolist()) == ([1, 1, 1], [0, 0], [0])
    y.fill_(2)
    assert view.tolist() == [2]


def test_memory_is_shown_as_another_tensor():
    x = torch.ones(2, requires_grad=True) * 2
    alias = tensors.reshape_alias(x, x.shape, x.stride())
    assert alias.data_ptr() == x.data_ptr()
    assert alias._base is x
    seen = tensors.make_subclass(nn.Parameter, x.detach())
    assert type(seen) is nn.Parameter
    assert seen.data_ptr() == x.data_ptr()


def test_a_pointer_into_nothing_raises():
    empty = tensors.make_wrapper_subclass(Seen, (2,), dtype=torch.float32, device="cpu")
    tensors.throw_on_data_ptr(empty)
    with pytest.raises((RuntimeError, AssertionError)), modes.without_torch_function():
        empty.data_ptr()


def test_uses_of_a_storage_are_counted():
    x = torch.ones(4)
    before = tensors.num_storage_uses(x)
    view = x[1:]
    assert tensors.num_storage_uses(x) == before + 1
    del view
    assert tensors.num_storage_uses(x) == before


def test_lists_of_tensors():
    xs = [torch.tensor([3.0, 4.0]), torch.tensor([6.0])]
    assert [n.item() for n in tensors.foreach_norm(xs)] == [5, 6]
    tensors.foreach_mul_(xs, 2)
    into = [torch.empty(2), torch.empty(1)]
    tensors.foreach_copy_(into, xs)
    assert [t.tolist() for t in into] == [[6, 8], [12]]


@pytest.mark.parametrize(("grad", "left", "scale"), [(8.0, 4.0, 6.0), (float("inf"), float("inf"), 1.5)])
def test_a_loss_scale_is_undone_and_updated(grad, left, scale):
    grads, found, now = [torch.tensor([grad])], torch.zeros(1), torch.tensor([3.0])
    tensors.unscale_(grads, found, torch.tensor([0.5]))
    assert grads[0].item() == left
    tensors.update_scale_(now, torch.zeros(1, dtype=torch.int32), found, 2.0, 0.5, 1)
    assert now.item() == scale


# modules, data, pytree


def test_base_classes_of_normalisation():
    assert issubclass(nn.InstanceNorm2d, modules.NormBase)
    assert issubclass(modules.BatchNorm, modules.NormBase)
    assert isinstance(nn.SyncBatchNorm(1), modules.BatchNorm)


def test_iterators_of_a_loader():
    iterator = iter(DataLoader([1, 2]))
    assert isinstance(iterator, data.LoaderIterator)
    torch._C._set_worker_pids(id(iterator), ())
    data.remove_worker_pids(id(iterator))
    with pytest.raises(ValueError, match="Cannot find worker information"):
        data.remove_worker_pids(id(iterator))


def test_trees_of_containers():
    tree = {"a": [1, 2.0]}
    leaves, spec = pytree.tree_flatten(tree)
    assert leaves == [1, 2.0]
    assert pytree.tree_unflatten(leaves, spec) == tree
    assert pytree.tree_map_only(int, str, tree) == {"a": ["1", 2.0]}
    assert pytree.SUPPORTED_NODES[list].flatten_fn([3])[0] == [3]
    stopped, _ = pytree.tree_flatten(tree, is_leaf=lambda node: node is not tree)
    assert stopped == [[1, 2.0]]


# cuda


@pytest.mark.parametrize(
    "function", [cuda.route_stream_to_pool, cuda.end_route_to_pool, cuda.release_pool, cuda.clear_cublas_workspaces]
)
def test_names_of_the_allocator(function):
    """Builds without CUDA lack them; those names that a build may have are listed for torch's compiler."""
    (name,) = (n for n in function.__code__.co_names if n.startswith("_cuda"))
    listed_by_torch = (Path(torch.__file__).parent / "_dynamo/trace_rules.py").read_text()
    assert f'"torch._C.{name}"' in listed_by_torch


def test_libraries_are_told():
    assert cuda.has_nccl() is hasattr(torch._C, "_nccl_version") is hasattr(torch._C, "_nccl_broadcast")
    assert cuda.has_triton() in (True, False)


@pytest.mark.gpu
def test_memory_comes_from_a_pool_on_one_stream_in_every_thread():
    device, pool = torch.device("cuda", 0), torch.cuda.graph_pool_handle()
    made, stream = [], torch.cuda.Stream(device)

    def make():
        with torch.cuda.stream(stream):
            made.append(torch.ones(2**20, device=device))

    with torch.cuda.stream(stream):
        cuda.route_stream_to_pool(device, pool)
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    cuda.end_route_to_pool(device, pool)
    cuda.clear_cublas_workspaces()
    found = {s["segment_pool_id"] for s in torch.cuda.memory_snapshot() if s["address"] == made[0].data_ptr()}
    assert found == {pool}
    made.clear()
    cuda.release_pool(device, pool)


# compiler


def test_frames_can_be_left_alone():
    frame_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback  # what this thread's frames are compiled by
    traced, seen = [], []

    def backend(graph, inputs):
        traced.append(len([node for node in graph.graph.nodes if node.op == "call_function"]))
        return graph.forward

    def below(x):
        return x + 1

    def skipped(x):
        return below(x) * 2

    def partly(x):
        seen.append(frame_callback() is not None)
        return below(x) * 2

    compiler.skip_code(skipped.__code__, with_calls=True)
    compiler.skip_code(partly.__code__, with_calls=False)
    for function in (skipped, partly):
        torch.compile(function, backend=backend)(torch.ones(2))
    assert traced == [1]
    assert seen == [True]
    assert frame_callback() is None


def test_settings_of_the_compiler():
    assert not compiler.is_scripted(torch.add)
    wrapper = compiler.InductorWrapper("reduce-overhead", None, False)
    assert wrapper.config["triton.cudagraphs"] is True
    assert compiler.inductor_config().triton.cudagraphs in (True, False)
    with compiler.functorch_config().patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True):
        pass


def test_what_is_read_off_compiled_code():
    assert compiler.tracing_context() is None, "beside a compilation"
    boxes = compiler.make_boxes(1)
    assert (bool(boxes["cudagraphs"]), boxes["boxed_forward_device_index"].value) == (False, 1)
    key = compiler.write_code("# nothing\n")
    assert key == compiler.write_code("# nothing\n") != compiler.write_code("# something\n")


def test_graphs_are_compiled_by_inductor(monkeypatch):
    from torch._inductor.compile_fx import compile_fx_inner

    seen = []
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", lambda *args, **kwargs: seen.append(kwargs))
    compiler.compile_fx_inner(None, [], is_backward=True)
    assert seen == [{"is_backward": True}]
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda *args, **kwargs: kwargs)
    patches = {"inner_compile": compile_fx_inner, "config_patches": {}}
    assert compiler.compile_fx(None, [], **patches) == patches


# dynamo


def test_only_private_names_are_listed():
    assert "torch._C._storage_Use_Count" in private_names(FOLDER / "tensors.py")
    assert private_names(Path(everygpu.__file__)) == set()


def test_frames_of_checkpoints():
    found = []

    def region(x):
        found.append(autograd.checkpoint_frames())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    assert autograd.checkpoint_frames() == ([], None)
    checkpoint(region, x, use_reentrant=False).sum().backward()
    (frames, none), (others, again) = found
    assert (len(frames), none, others) == (1, None, [])
    assert again is frames[0]


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
