"""Graphs that are cut, so that gradients come while backward goes on: what they compute, and which stay whole."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everygpu.parallel import switches
from everygpu.parallel.compiler import inductor_backend, split_graph
from everygpu.parallel.compiler.inductor_backend import inductor
from everygpu.parallel.compiler.split_graph import SplitPolicy

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("quick", "quick_guards"),
]


class Tied(nn.Module):
    """A model whose first parameter is also its last, with a buffer that changes."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(num_blocks))
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        h = self.embedding(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace, cut and differentiate as ever, without generating C++: it takes a second for each piece."""
    from functorch.compile import make_boxed_func

    monkeypatch.setattr(
        inductor_backend, "compile_fx_inner", lambda graph, inputs, **options: make_boxed_func(graph.forward)
    )


class TestPieces:
    """Graphs that are cut, so that gradients come while backward goes on."""

    @pytest.fixture
    def order(self) -> list[str]:
        return []

    def train(self, backend: Any, order: list[str], module: nn.Module | None = None) -> None:
        """Compare training steps with those of the module as it is."""
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = Tied() if module is None else module
        twin, x = copy.deepcopy(net), torch.randint(50, (6, 7))
        for name, p in net.named_parameters():
            p.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))  # type: ignore[misc]
        compiled = torch.compile(net, backend=backend, dynamic=False)
        for _ in range(2):
            order.clear()
            torch.testing.assert_close(compiled(x), twin(x))
            compiled(x).square().mean().backward()
            twin(x).square().mean().backward()
            for p, expected in zip(net.parameters(), twin.parameters()):
                torch.testing.assert_close(p.grad, expected.grad)
        torch.testing.assert_close(dict(net.named_buffers()), dict(twin.named_buffers()))

    @pytest.fixture
    def cuts(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """How many pieces each graph was cut into."""
        from torch._dynamo.backends.distributed import DDPOptimizer

        found: list[int] = []
        compile_fn = DDPOptimizer.compile_fn

        def count(optimizer: Any, *args: Any) -> Any:
            function = compile_fn(optimizer, *args)
            found.append(len(optimizer.buckets))
            return function

        monkeypatch.setattr(DDPOptimizer, "compile_fn", count)
        return found

    def test_gradients_come_piece_by_piece(
        self, order: list[str], cuts: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(split_graph, "PIECE_BYTES", 4096)
        self.train(inductor(None, SplitPolicy(in_pieces=True)), order)
        assert cuts == [5]  # the weight that is used twice counts where its gradient is complete
        blocks = [name.split(".")[1] for name in order[:-1]]
        assert blocks == ["3", "3", "2", "2", "1", "1", "0", "0"]
        assert order[-1] == "embedding.weight"

    def test_switched_off_graphs_stay_whole(
        self, order: list[str], cuts: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(split_graph, "PIECE_BYTES", 4096)
        monkeypatch.setattr(switches, "SPLITS_GRAPHS", False)
        self.train(inductor(None, SplitPolicy(in_pieces=True)), order)
        assert cuts == []

    def test_parameters_side_by_side_count_as_their_own_bytes(
        self, order: list[str], cuts: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        net = Tied()
        flat = nn.utils.parameters_to_vector(net.parameters()).detach()
        nn.utils.vector_to_parameters(flat, net.parameters())
        assert net.head.weight.untyped_storage().nbytes() == flat.nbytes
        monkeypatch.setattr(split_graph, "PIECE_BYTES", 8192)
        self.train(inductor(None, SplitPolicy(in_pieces=True)), order, net)
        assert cuts == [3]

    def test_pieces_read_what_those_before_have_written(
        self, order: list[str], cuts: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Branches(Tied):
            def forward(self, x: Tensor) -> Tensor:
                h, found = self.embedding(x), []
                state = h.detach().sum() * 0
                for i, block in enumerate(self.blocks):
                    state.mul_(2).add_(i)
                    found.append(block[0](h) + state)
                return torch.stack(found)

        monkeypatch.setattr(split_graph, "PIECE_BYTES", 4096)
        net = Branches()
        net.head = nn.Identity()
        self.train(inductor(None, SplitPolicy(in_pieces=True)), order, net)
        assert cuts == [5]

    def test_a_buffer_that_one_piece_saves_and_another_writes(
        self, order: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Counting(Tied):
            def forward(self, x: Tensor) -> Tensor:
                h = self.embedding(x)
                for block in self.blocks:
                    self.num_calls.add_(1)
                    h = block(h) * self.num_calls.clone()
                return self.head(h)

        compiled: list[Any] = []
        backend = inductor(None, SplitPolicy(in_pieces=True))
        compile_part = backend._compile_part
        monkeypatch.setattr(split_graph, "PIECE_BYTES", 4096)
        monkeypatch.setattr(
            backend, "_compile_part", lambda *args, **kw: compiled.append(1) or compile_part(*args, **kw)
        )
        net, x = Counting(), torch.randint(50, (6, 7))
        torch._dynamo.reset()
        with caplog.at_level("INFO", "everygpu"):
            torch.compile(net, backend=backend)(x)
        assert "num_calls_ is written, and used in several pieces" in caplog.text
        assert len(compiled) == 2  # forward and backward, once

    def test_buffers_that_are_only_read(
        self, order: list[str], cuts: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Rotary(Tied):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("table", torch.rand(7, 1))

            def forward(self, x: Tensor) -> Tensor:
                h = self.embedding(x)
                for block in self.blocks:
                    h = h + block(h * self.table)
                return self.head(h)

        monkeypatch.setattr(split_graph, "PIECE_BYTES", 4096)
        with caplog.at_level("INFO", "everygpu"):
            self.train(inductor(None, SplitPolicy(in_pieces=True)), order, Rotary())
        assert cuts == [5]
        assert "aren't cut" not in caplog.text

    def test_a_layer_that_is_used_again_and_again(
        self, order: list[str], cuts: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Unrolled(Tied):
            def forward(self, x: Tensor) -> Tensor:
                h = self.embedding(x)
                for _ in range(2):
                    h = h + self.blocks[0](h)
                for block in self.blocks[1:]:
                    h = h + block(h)
                return self.head(h)

        monkeypatch.setattr(split_graph, "PIECE_BYTES", 4096)
        self.train(inductor(None, SplitPolicy(in_pieces=True)), order, Unrolled())
        assert cuts == [5]

    def test_small_graphs_stay_whole(self, order: list[str], cuts: list[int]) -> None:
        self.train(inductor(None, SplitPolicy(in_pieces=True)), order)
        assert not cuts

    def test_without_gradients_nothing_is_cut(self, cuts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(split_graph, "PIECE_BYTES", 4096)
        torch._dynamo.reset()
        net, x = Tied(), torch.randint(50, (6, 7))
        with torch.no_grad():
            torch.compile(net, backend=inductor(None, SplitPolicy(in_pieces=True)))(x)
        assert not cuts

    def test_a_graph_that_can_not_be_cut_stays_whole(
        self, order: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        from torch._dynamo.backends.distributed import SubmodCompiler

        compile_submod = SubmodCompiler.compile_submod
        calls: list[int] = []

        def fail_late(compiler: Any, *args: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                raise NotImplementedError("an operation of a higher order")
            return compile_submod(compiler, *args)

        monkeypatch.setattr(split_graph, "PIECE_BYTES", 4096)
        monkeypatch.setattr(SubmodCompiler, "compile_submod", fail_late)
        with caplog.at_level("INFO", "everygpu"):
            self.train(inductor(None, SplitPolicy(in_pieces=True)), order)
        assert "graphs aren't cut" in caplog.text
        assert len(calls) == 3

    def test_views_written_in_several_pieces_of_changing_shape(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Writing(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                kept = torch.zeros(x.shape[0], 16)
                view = kept[:, :8]
                for block in self.blocks:
                    found = block(x + kept)
                    view.copy_(found[:, :8])
                return kept, found

        monkeypatch.setattr(split_graph, "PIECE_BYTES", 512)
        torch._dynamo.reset()
        net = Writing()
        compiled = torch.compile(net, backend=inductor(None, SplitPolicy(in_pieces=True)), dynamic=True)
        with caplog.at_level("INFO", "everygpu"):
            for rows in (6, 8):
                x = torch.randn(rows, 16)
                torch.testing.assert_close(compiled(x), net(x))
        assert "graphs aren't cut" in caplog.text

    def test_checkpoints_within(self, order: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        from torch.utils.checkpoint import checkpoint

        class Checkpointed(Tied):
            def forward(self, x: Tensor) -> Tensor:
                h = self.embedding(x)
                for block in self.blocks:
                    h = h + checkpoint(block, h, use_reentrant=False)
                return self.head(h)

        monkeypatch.setattr(split_graph, "PIECE_BYTES", 4096)
        self.train(inductor(None, SplitPolicy(in_pieces=True)), order, Checkpointed())

    def test_shapes_that_change(
        self, cuts: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """torch finds numbers that it takes for tensors then, and begins anew."""

        class Normed(Tied):
            def __init__(self) -> None:
                super().__init__()
                self.norms = nn.ModuleList(nn.BatchNorm1d(7) for _ in self.blocks)

            def forward(self, x: Tensor) -> Tensor:
                h = self.embedding(x)
                for block, norm in zip(self.blocks, self.norms):
                    h = norm(h + block(h))
                return self.head(h)

        monkeypatch.setattr(split_graph, "PIECE_BYTES", 4096)
        torch._dynamo.reset()
        net = Normed()
        twin = copy.deepcopy(net)
        compiled = torch.compile(net, backend=inductor(None, SplitPolicy(in_pieces=True)), dynamic=True)
        with caplog.at_level("INFO", "everygpu"):
            for rows in (6, 9):
                x = torch.randint(50, (rows, 7))
                compiled(x).square().mean().backward()
                twin(x).square().mean().backward()
        torch.testing.assert_close(
            [p.grad for p in net.parameters()], [p.grad for p in twin.parameters()], rtol=1e-4, atol=1e-5
        )
        assert cuts
        assert "aren't cut" not in caplog.text
