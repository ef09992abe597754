"""What every private name of torch's must do."""

import ast
import copy
import copyreg
import functools
import math
import sys
import threading
from contextvars import ContextVar
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import everygpu
from everygpu import torch_private
from everygpu.torch_private import compiler, core
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
    source = Path(__file__).read_text()
    for path in FILES:
        assert [n for n in public_names(path) if f"{path.stem}.{n}" not in source] == []


@pytest.mark.parametrize(("version", "tried"), [("2.11.0", True), ("2.15.1+cu132", True), ("2.16.0", False)])
def test_a_torch_that_is_newer_than_those_tried_is_told(version, tried):
    assert torch_private.is_tried(version) is tried


@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 2)])
def test_nll_losses(shape):
    scores, classes = torch.randn(shape, requires_grad=True), torch.tensor([0, -100, 2, 1])
    target, weight = classes.view(shape[:1] + shape[2:]), torch.tensor([1.0, 2.0, 3.0])
    loss = nn.functional.cross_entropy(scores, target, weight)
    found = core.nll_loss_of(loss.grad_fn)
    assert isinstance(found, core.NllLoss)
    assert (found.ignore_index, found.is_mean, found.total_weight.item()) == (-100, True, 6)
    assert torch.equal(found.target.flatten(), target.flatten())
    assert torch.equal(found.weight, weight)
    assert core.nll_loss_of((2 * loss).grad_fn) is core.nll_loss_of(None) is None
    summed = nn.functional.nll_loss(scores, target.clamp(min=0), reduction="sum", ignore_index=2)
    assert core.nll_loss_of(summed.grad_fn)[2:4] == (2, False)
    loss.backward()
    assert core.nll_loss_of(loss.grad_fn) is None
    loss = checkpoint(nn.functional.cross_entropy, scores, target, use_reentrant=False)
    assert core.nll_loss_of(loss.grad_fn) is None


def test_attributes():
    x, layer, loader = torch.ones(2), nn.Linear(1, 1), DataLoader([1])
    iterator = iter(DataLoader([1]))
    adam = torch.optim.Adam([x])
    states = x, x.untyped_storage(), layer, layer.state_dict(), adam
    owners = [*states, torch.ops.aten.add.Tensor, None, copyreg, loader, iterator]
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


def test_saved_tensor_hooks_can_be_read():
    def same(x):
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks
    seen: core.SavedTensorHooks | None = core.top_saved_tensor_hooks()
    assert seen is None
    with hooks(same, same), hooks(abs, abs):
        assert core.top_saved_tensor_hooks() == (abs, abs)
    with torch.autograd.graph.disable_saved_tensors_hooks("not now"):
        assert core.top_saved_tensor_hooks() is None


def test_a_hook_is_told_about_the_backward_it_runs_in():
    x, other = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    seen = []

    def look(_):
        nodes = [torch.autograd.graph.get_gradient_edge(t).node for t in (x, other)]
        seen.append((core.backward_id() != core.NO_BACKWARD, *map(core.will_execute, nodes)))

    y = x * 2
    y.register_hook(look)
    y.backward(retain_graph=True)
    assert seen == [(True, True, False)]
    assert core.backward_id() == core.NO_BACKWARD
    with pytest.raises(RuntimeError, match="leaf node"):
        torch.autograd.grad(y, x)


def test_transformations_are_told():
    seen = []

    def look(x):
        seen.append((core.is_transforming(), bool(core.are_transforms_active())))
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
    x.register_hook(lambda _: core.after_backward(lambda: seen.append((x.grad, y.grad))))
    ((x * y).exp() * x).sum().backward()
    assert [[g is not None for g in row] for row in seen] == [[True, True]]
    with pytest.raises(RuntimeError):
        core.after_backward(seen.clear)


def test_device_constructors_are_what_takes_the_default_device():
    found = core.device_constructors()
    assert {torch.ones, torch.arange, torch.tensor, torch.randn, torch.empty} <= found
    assert torch.relu not in found
    assert torch.ones_like not in found


def test_function_modes_are_carried():
    device = core.DeviceContext(torch.device("cpu"))
    assert core.function_modes() == []
    core.push_function_mode(device)
    assert core.function_modes() == [device]
    core.pop_function_mode()
    with torch.device("meta"):
        assert [type(mode) for mode in core.function_modes()] == [core.DeviceContext]


class Seen(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("asked")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("dispatched")


def test_subclasses_are_not_asked():
    with core.without_torch_function():
        seen = core.make_wrapper_subclass(Seen, (2,), dtype=torch.float32, device="cpu")
        assert seen.shape == (2,)
        with pytest.raises(AssertionError, match="dispatched"):
            torch.ops.aten.add.Tensor(seen, 1)
    with pytest.raises(AssertionError, match="asked"):
        torch.add(seen, 1)


def test_dispatch_modes_are_counted():
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    seen = []
    assert core.num_dispatch_modes() == 0
    with core.TorchDispatchMode():
        seen.append(core.is_tracing())
        assert core.num_dispatch_modes() == 1
        with core.without_dispatch_modes():
            assert core.num_dispatch_modes() == 0
    with FakeTensorMode():
        seen.append(core.is_tracing())
    make_fx(lambda x: (seen.append(core.is_tracing()), x)[1])(torch.ones(1))
    assert seen == [False, True, True]


MATRIX = torch.tensor([[1 + 2j, 3j], [0.5, 1 - 1j], [2, 1 + 1j]])


class Inverting(torch.Tensor):
    """Inverts a matrix below ``__torch_dispatch__``; on the way, torch makes conjugated tensors."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with core.reading_lazy_values():
            return torch.linalg.pinv(MATRIX)


def test_lazy_values_are_read_below_dispatch():
    seen = core.make_wrapper_subclass(Inverting, (1,), dtype=torch.complex64, device="cpu")
    with core.without_torch_function():
        torch.testing.assert_close(torch.neg(seen), torch.linalg.pinv(MATRIX))


# tensors


def test_two_tensors_are_exchanged():
    x, y = torch.zeros(2), torch.ones(3)
    view = x[:1]
    core.swap_tensors(x, y)
    assert (x.tolist(), y.tolist(), view.tolist()) == ([1, 1, 1], [0, 0], [0])
    y.fill_(2)
    assert view.tolist() == [2]


def test_memory_is_shown_as_another_tensor():
    x = torch.ones(2, requires_grad=True) * 2
    alias = core.reshape_alias(x, x.shape, x.stride())
    assert alias.data_ptr() == x.data_ptr()
    assert alias._base is x
    seen = core.make_subclass(nn.Parameter, x.detach())
    assert type(seen) is nn.Parameter
    assert seen.data_ptr() == x.data_ptr()


def test_a_pointer_into_nothing_raises():
    empty = core.make_wrapper_subclass(Seen, (2,), dtype=torch.float32, device="cpu")
    core.throw_on_data_ptr(empty)
    with pytest.raises((RuntimeError, AssertionError)), core.without_torch_function():
        empty.data_ptr()


def test_uses_of_a_storage_are_counted():
    x = torch.ones(4)
    before = core.num_storage_uses(x)
    view = x[1:]
    assert core.num_storage_uses(x) == before + 1
    del view
    assert core.num_storage_uses(x) == before


def test_lists_of_tensors():
    xs = [torch.tensor([3.0, 4.0]), torch.tensor([6.0])]
    assert [n.item() for n in core.foreach_norm(xs)] == [5, 6]
    core.foreach_mul_(xs, 2)
    into = [torch.empty(2), torch.empty(1)]
    core.foreach_copy_(into, xs)
    assert [t.tolist() for t in into] == [[6, 8], [12]]


@pytest.mark.parametrize(("grad", "left", "scale"), [(8.0, 4.0, 6.0), (float("inf"), float("inf"), 1.5)])
def test_a_loss_scale_is_undone_and_updated(grad, left, scale):
    grads, found, now = [torch.tensor([grad])], torch.zeros(1), torch.tensor([3.0])
    core.unscale_(grads, found, torch.tensor([0.5]))
    assert grads[0].item() == left
    core.update_scale_(now, torch.zeros(1, dtype=torch.int32), found, 2.0, 0.5, 1)
    assert now.item() == scale


# modules, data, pytree


def test_base_classes_of_normalisation():
    assert issubclass(nn.InstanceNorm2d, core.NormBase)
    assert issubclass(core.BatchNorm, core.NormBase)
    assert isinstance(nn.SyncBatchNorm(1), core.BatchNorm)


def test_iterators_of_a_loader():
    iterator = iter(DataLoader([1, 2]))
    assert isinstance(iterator, core.LoaderIterator)
    torch._C._set_worker_pids(id(iterator), ())
    core.remove_worker_pids(id(iterator))
    with pytest.raises(ValueError, match="Cannot find worker information"):
        core.remove_worker_pids(id(iterator))


def test_seeds_of_workers():
    first, second = core.numpy_seed_of_worker(7, 0), core.numpy_seed_of_worker(7, 1)
    assert first == core.numpy_seed_of_worker(7, 0) != second
    assert all(0 <= word < 2**32 for word in (*first, *second))


def test_trees_of_containers():
    tree = {"a": [1, 2.0]}
    leaves, spec = core.tree_flatten(tree)
    assert leaves == [1, 2.0]
    assert core.tree_unflatten(leaves, spec) == tree
    assert core.tree_map_only(int, str, tree) == {"a": ["1", 2.0]}
    assert core.SUPPORTED_NODES[list].flatten_fn([3])[0] == [3]
    stopped, _ = core.tree_flatten(tree, is_leaf=lambda node: node is not tree)
    assert stopped == [[1, 2.0]]


# cuda


@pytest.mark.parametrize(
    "function", [core.route_stream_to_pool, core.end_route_to_pool, core.release_pool, core.clear_cublas_workspaces]
)
def test_names_of_the_allocator(function):
    """Builds without CUDA lack them; those names that a build may have are listed for torch's compiler."""
    (name,) = (n for n in function.__code__.co_names if n.startswith("_cuda"))
    listed_by_torch = (Path(torch.__file__).parent / "_dynamo/trace_rules.py").read_text()
    assert f'"torch._C.{name}"' in listed_by_torch


def test_libraries_are_told():
    assert core.has_nccl() is hasattr(torch._C, "_nccl_version") is hasattr(torch._C, "_nccl_broadcast")
    assert core.has_triton() in (True, False)


@pytest.mark.gpu
def test_memory_comes_from_a_pool_on_one_stream_in_every_thread():
    device, pool = torch.device("cuda", 0), torch.cuda.graph_pool_handle()
    made, stream = [], torch.cuda.Stream(device)

    def make():
        with torch.cuda.stream(stream):
            made.append(torch.ones(2**20, device=device))

    with torch.cuda.stream(stream):
        core.route_stream_to_pool(device, pool)
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    core.end_route_to_pool(device, pool)
    core.clear_cublas_workspaces()
    found = {s["segment_pool_id"] for s in torch.cuda.memory_snapshot() if s["address"] == made[0].data_ptr()}
    assert found == {pool}
    made.clear()
    core.release_pool(device, pool)


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

    for function in (compiler.not_compiled(skipped), compiler.left_to_run(partly)):
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
    assert "torch._C._storage_Use_Count" in private_names(FOLDER / "core.py")
    assert private_names(Path(everygpu.__file__)) == set()


def test_modules_with_a_way_of_their_own_to_be_copied():
    class Own(torch.nn.Linear):
        def _replicate_for_data_parallel(self):
            return super()._replicate_for_data_parallel()

    assert [core.replicates_itself(m) for m in (torch.nn.Linear(1, 1), torch.nn.GRU(1, 1), Own(1, 1))] == [0, 0, 1]


def test_parametrizations_are_cached_apart():
    first = parametrize.register_parametrization(torch.nn.Linear(2, 2), "weight", torch.nn.Tanh())
    other = copy.deepcopy(first)
    assert not core.caches_parametrizations()
    with parametrize.cached():
        assert core.caches_parametrizations()
        before = first.weight
        core.cache_parametrizations_apart([first, other, torch.nn.ReLU()])
        core.cache_parametrizations_apart([first, other])
        assert first.weight is before
        assert other.weight is other.weight is not before
    assert first.weight is not first.weight
    parametrize.remove_parametrizations(first, "weight")
    assert type(first) is torch.nn.Linear


def test_batched_tensors_are_told_from_others():
    x, seen = torch.ones(2, requires_grad=True), []
    y = x * 2
    y.register_hook(lambda grad: seen.append(core.are_batched([grad])))
    y.sum().backward(retain_graph=True)
    torch.autograd.grad(y, x, torch.ones(3, 2), is_grads_batched=True, retain_graph=True)
    torch.func.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True))(torch.ones(3, 2))
    assert seen == [False, True, True]
    assert not core.are_batched([None, torch.ones(1)])
    assert core.are_batched([]) is False


def test_ranks_that_are_not_there():
    with core.fake_ranks(5):
        x = torch.ones(2)
        torch.distributed.all_reduce(x)
        assert torch.distributed.get_world_size() == 5
    assert not torch.distributed.is_initialized()


def test_the_store_of_a_process_group(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        core.default_store().set("key", "value")
        assert core.default_store().get("key") == b"value"
    finally:
        torch.distributed.destroy_process_group()


def test_a_flat_state_is_nested_again():
    state = {"model.weight": 1, "optimizer.0": 2}
    places = {"model.weight": ("model", "weight"), "optimizer.0": ("optimizer", 0)}
    assert core.unflatten(state, places) == {"model": {"weight": 1}, "optimizer": [2]}


def test_a_trace_shows_what_a_function_writes_and_reads():
    found, kept = {}, []

    def backend(graph, inputs):
        trace = compiler.current_trace()
        effects = trace.side_effects
        written = [v for v in compiler.modified_variables(effects) if compiler.is_from_before(v)]
        found.update(objects=compiler.traced_objects(trace), code=compiler.traced_code(trace), written=len(written))
        found["constants"] = [compiler.written_constants(effects, v) for v in written]
        found["rest"] = trace.random_calls, effects.tensor_hooks, effects.store_attr_mutations, trace.root_tx.f_globals
        return graph.forward

    cached = functools.lru_cache(lambda: 1)  # as Dynamo warns of

    def function(layer, x):
        kept.append(cached())
        layer.size = 3
        return layer(x) if not torch.compiler.is_compiling() else x

    layer, x = nn.Linear(2, 2), torch.ones(2)
    with (
        compiler.captured_answers(),
        compiler.traced_context_vars(),
        compiler.without_warnings(),
        compiler.scoped_config({"trace_numpy": False, "no such setting": 1}),
    ):
        torch.compile(function, backend=backend)(layer, x)
    assert found["written"] == 2
    assert [rows for rows in found["constants"] if rows] == [[(layer, "size", 3)]]
    assert any(value is layer for value in found["objects"])
    assert {function.__code__, nn.Linear.forward.__code__} <= set(found["code"])
    assert found["rest"][:2] == ([], {})
    assert found["rest"][3] is globals()
    (entry,) = compiler.cache_entries(function.__code__)
    assert not entry.guard_manager.check({"layer": layer, "x": x})  # ``kept`` is longer now
    compiler.drop_code(function.__code__)
    assert compiler.cache_entries(function.__code__) == []
    assert torch.compile(lambda x: x + torch.compiler.is_compiling(), backend="eager")(torch.zeros(())) == 1


def test_compiled_code_says_what_it_was_made_from():
    def inner(x):
        return x * 2

    def outer(x):
        return inner(x)

    ran = []

    def backend(graph, inputs):
        compiler.note_inlined()
        return graph.forward

    def note(frame, event, arg):
        if event == "call" and frame.f_code.co_name == "outer":
            ran.append(frame.f_code)

    function = torch.compile(outer, backend=backend)
    function(torch.ones(2))
    sys.setprofile(note)
    function(torch.ones(2))
    sys.setprofile(None)
    original, inlined = compiler.compiled_from(ran[-1])
    assert original is outer.__code__
    assert inner.__code__ in inlined
    assert compiler.compiled_from(inner.__code__) is None


def test_operators_of_a_higher_order_are_told():
    assert compiler.is_higher_order(torch.ops.higher_order.cond)
    assert not compiler.is_higher_order(torch.ops.aten.add.Tensor)


def test_context_variables_are_traced():
    read, kept = ContextVar("read", default=3), ContextVar("kept")
    found = {}

    def backend(graph, inputs):
        trace = compiler.current_trace()
        found.update(reads=compiler.context_var_reads(trace), open=compiler.open_context_vars(trace))
        return graph

    def run(x):
        token = kept.set(x * 2)
        y = kept.get() * read.get()
        kept.reset(token)
        kept.set(1)
        return y

    with compiler.traced_context_vars():
        ours = torch.compile(run, backend=backend, fullgraph=True)(torch.ones(2))
    torch.testing.assert_close(ours, torch.full((2,), 6.0))
    assert found == {"reads": {read: 3}, "open": ["kept"]}
    assert (compiler.value_in_context(read), compiler.value_in_context(kept)) == (3, ...)


def test_names_that_python_modules_do_not_have_are_noted():
    found = {}

    def backend(graph, inputs):
        found.update(absent=compiler.absences(compiler.current_trace()))
        return graph

    def run(x):
        y = x * getattr(math, "no_such_number", 3) + hasattr(math, "pi") + getattr(math, "pi", 0)
        try:
            return y * math.no_other_number
        except AttributeError:
            return y

    with compiler.noted_absences():
        torch.compile(run, backend=backend, fullgraph=True)(torch.ones(2))
    assert set(found["absent"]) == {(math, "no_such_number"), (math, "no_other_number")}
