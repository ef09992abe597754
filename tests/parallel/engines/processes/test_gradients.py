"""What a helper sends while its backward goes on, without a helper."""

import pytest
import torch

from everygpu.parallel.buckets.plan import plan_bucket
from everygpu.parallel.engines.processes.gradients import GradientSender
from everygpu.parallel.engines.processes.messages import Buckets
from everygpu.parallel.engines.processes.module_receiver import Binding
from everygpu.parallel.engines.processes.packing import CannotTravelError
from everygpu.parallel.engines.processes.shared_tensors import Exporter, Importer

HERE = torch.device("cpu")


class Backwards:
    """Parameters in two buckets, and the order in which their gradients come and buckets are sent."""

    def __init__(self, mapped=(), stay=False):
        complete = []
        self.params = [torch.randn(3, requires_grad=True) for _ in range(4)]
        self.events, self.places = [], set()
        self.gives_back = True
        for i, p in enumerate(self.params):
            p.register_post_accumulate_grad_hook(complete.append)
            p.register_post_accumulate_grad_hook(lambda _, i=i: self.events.append(i))
        plan = plan_bucket(self.params[:2], range(2), 1, unit=1)
        buckets = Buckets([] if mapped else [([0, 1], plan), ([2, 3], plan)], stay=stay)
        grads = {i: torch.zeros(3) for i in mapped}
        self.binding = Binding(tensors=dict(enumerate(self.params)), grads=grads, buckets=buckets)
        self.exporter = Exporter(HERE)
        self.sender = GradientSender(HERE, self.exporter, complete, self.say)

    def say(self, make):
        done = make(1)
        self.events.append(("bucket", done.bucket, done.present))
        self.sent = Importer(HERE).open(done.flat).tolist()
        self.places.add(done.flat.storage)
        if self.gives_back:
            self.exporter.take_back([done.flat.ticket])

    def run(self, order):
        """Run a backward in which parameters get their gradients in an order."""
        self.events.clear()
        with self.sender.collecting(1, self.binding):
            for i in order:
                self.params[i].sum().backward()
        return self.events


def test_a_bucket_is_sent_as_soon_as_it_is_complete():
    backwards = Backwards()
    backwards.run([0, 1, 2, 3])
    for order in ([3, 2, 1, 0], [0, 1, 2, 3], [2, 0, 3, 1]):
        events = backwards.run(order)
        for bucket, members in enumerate(([0, 1], [2, 3])):
            last = max(map(order.index, members))
            assert events.index(("bucket", bucket, [True, True])) == events.index(order[last]) + 1
    assert all(p.grad is None for p in backwards.params)


def test_buckets_stay_where_they_are():
    backwards, lent = Backwards(stay=True), Backwards()
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        for b in (backwards, lent):
            b.run(order)
            assert b.sent == [1.0] * 6
    assert len(backwards.places) == 2
    assert backwards.run([0, 2, 3])[-1] == ("bucket", 0, [True, False])
    assert backwards.sent == [1.0] * 3 + [0.0] * 3
    backwards.gives_back = False
    for num_places in (2, 4):  # memory that hasn't been read isn't written again
        backwards.run([0, 1, 2, 3])
        assert len(backwards.places) == num_places
    backwards.exporter.take_back(list(range(100)))
    with backwards.sender.collecting(2, Binding(tensors={}, grads={}, buckets=Buckets([], stay=False))):
        pass  # of another module: the memory is given back, as the fixture sees by open files


def test_a_gradient_that_comes_in_parts_is_sent_when_backward_is_over():
    backwards = Backwards()
    for _ in range(2):
        assert backwards.run([0, 1, 0, 1, 1]) == [0, 1, 0, 1, 1, ("bucket", 0, [True, True])]
        assert backwards.sent == [2] * 3 + [3] * 3


def test_a_part_that_comes_too_late_is_an_error():
    backwards = Backwards()
    backwards.run([0, 1])
    with pytest.raises(RuntimeError, match="another part"):
        backwards.run([0, 1, 0])
    assert backwards.run([0, 1, 0])[:3] == [0, 1, 0]


def test_what_has_no_gradient_is_told_at_the_end():
    backwards = Backwards()
    backwards.run([0, 1, 2, 3])
    assert backwards.run([1, 3, 2]) == [1, 3, 2, ("bucket", 1, [True, True]), ("bucket", 0, [False, True])]


def test_gradients_are_added_to_the_main_process_s_memory():
    backwards = Backwards(mapped=(0, 2))
    for _ in range(2):
        backwards.run([2, 1])
    assert backwards.sender.touched == [2]
    assert [backwards.binding.grads[i].tolist() for i in (0, 2)] == [[0] * 3, [2] * 3]


def test_a_backward_within_forward_is_refused():
    backwards = Backwards()
    with pytest.raises(CannotTravelError, match="backward of its own"), backwards.sender.refused(backwards.binding):
        backwards.params[0].sum().backward()
    assert backwards.params[0].grad is None
    with backwards.sender.refused(backwards.binding):
        torch.autograd.grad(backwards.params[0].sum(), backwards.params[0])
