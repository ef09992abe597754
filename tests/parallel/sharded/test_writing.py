"""A batch of shards can't be told from the joined tensor when it is written, reshaped in place or differentiated."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everygpu.errors import GatherError
from tests.parallel.batches import lay_out, numbers
from tests.parallel.sharded.uses import C, Use, labels, ones

# Each takes a tensor of shape (rows, 5) that is not a leaf, and returns it where it is written.


def written_through_a_view(x: Tensor) -> Any:
    x[:, 1].mul_(2)
    return x, x * 2


def written_through_a_view_of_a_view(x: Tensor) -> Any:
    x.t()[2:][1].mul_(3)
    return x, x.sum(1)


def written_through_a_reshaped_view(x: Tensor) -> Any:
    flat = x.view(-1)
    x.mul_(2)
    flat[3] = 7
    return x, flat


def written_before_views_are_read(x: Tensor) -> Any:
    one, other = x[:, 0], x.t()
    x.add_(1)
    one.zero_()
    return one, other, x


def detached_and_zeroed(x: Tensor) -> Any:
    y = x * 2
    x.detach().zero_()
    return x + y


def data_written(x: Tensor) -> Any:
    x.data.add_(1)
    x.data[0] = 5
    return x, x * 2


def written_as_an_array(x: Tensor) -> Any:
    y = x.sum()
    x.detach().numpy()[0] = 4
    return x * 2, y


def written_without_gradients(x: Tensor) -> Any:
    with torch.no_grad():
        x.add_(1)
        x[0] = 3
        row = x[-1]
        row.zero_()
    return x * 2


def written_in_inference_mode(x: Tensor) -> Any:
    with torch.inference_mode():
        y = x.clone()
        row = y[0]
        y.mul_(2)
        row.zero_()
        return y.clone(), y[0].clone()


def joined_first_and_used_later(x: Tensor) -> Any:
    with torch.no_grad():
        str(x)
        total = x.sum().item()
        x.tolist()
    with torch.inference_mode():
        x.sum()
        str(x)
        x[0] + 1
    return x.softmax(1), (x * total).sum(0), x[0]


def gradients_switched_on_within(x: Tensor) -> Any:
    with torch.no_grad():
        y = x * 2
        with torch.enable_grad():
            z = x * y
    return y, z, z.sum()


def updated_in_place(x: Tensor) -> Any:
    y = x * 1
    y *= 2
    y += x
    y -= ones(C)
    y /= 3
    y.clamp_(-1, 1).relu_()
    y **= 2
    return y, F.relu(y * 1, inplace=True), y.sum()


def assigned(x: Tensor) -> Any:
    y = x * 1
    y[:, 0] = 0
    y[1:2] = 1
    y[y > 0.5] = 7
    y[:, 1:3].copy_(ones(2))
    y.masked_fill_(y > 6, 2)
    return y


def copied_into(x: Tensor) -> Any:
    plain = torch.empty(x.shape, dtype=torch.float64)
    plain.copy_(x)
    batch = x * 0
    batch.copy_(torch.arange(5.0))
    return plain, batch


def given_as_out(x: Tensor) -> Any:
    batch, plain = x.detach().clone(), torch.empty(x.shape, dtype=torch.float64)
    torch.add(batch, 1, out=batch)
    torch.mul(batch, 2, out=plain)
    return batch, plain, batch * 1


def overwritten_after_it_was_saved(x: Tensor) -> Any:
    y = x.exp()
    z = y * 2
    y.add_(1)
    return torch.autograd.grad(y.sum() + z.sum(), x)


WRITING = [
    written_through_a_view,
    written_through_a_view_of_a_view,
    written_through_a_reshaped_view,
    written_before_views_are_read,
    detached_and_zeroed,
    data_written,
    written_as_an_array,
    written_without_gradients,
    written_in_inference_mode,
    joined_first_and_used_later,
    gradients_switched_on_within,
    updated_in_place,
    assigned,
    copied_into,
    given_as_out,
    overwritten_after_it_was_saved,
]

# Gradients.


def hooked_after_use(x: Tensor) -> Any:
    y = (x * 2).sum(1)
    x.register_hook(lambda grad: grad * 3)
    return y


def retained_after_use(x: Tensor) -> Any:
    y = x * 2
    x.retain_grad()
    (y**2).sum().backward(retain_graph=True)
    return x.grad, y


def hooked_at_its_node(x: Tensor) -> Any:
    seen: list[Tensor] = []
    x.register_hook(lambda grad: seen.append(grad.clone()))
    x.softmax(1).pow(2).sum().backward(retain_graph=True)
    return seen, x


def gradient_to_the_batch(x: Tensor) -> Any:
    y = (x * x).sum() + F.cross_entropy(x, labels(x)) + x[0].sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)
    return first, second


def gradient_among_uses(x: Tensor) -> Any:
    a, b = x * 1, x * 1
    return torch.autograd.grad((a * 2 + b * 3).sum(), [b, a, x], retain_graph=True)


def a_new_leaf(x: Tensor) -> Any:
    leaf = x.detach().requires_grad_()
    (leaf**3).sum().backward()
    first = leaf.grad.clone()
    (leaf[0] * 2).sum().backward()
    return first, leaf.grad, leaf


def an_optimized_leaf(x: Tensor) -> Any:
    leaf = x.detach()
    leaf.requires_grad = True
    optimizer = torch.optim.Adam([leaf], 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        leaf.pow(2).sum().backward()
        nn.utils.clip_grad_norm_([leaf], 0.1)
        optimizer.step()
    return leaf


def a_parameter(x: Tensor) -> Any:
    parameter = nn.Parameter(x.detach())
    (parameter**2).sum().backward()
    return parameter.grad, isinstance(parameter, nn.Parameter)


def backward_with_a_gradient(x: Tensor) -> Any:
    leaf = x.detach().requires_grad_()
    (leaf * 2).backward(gradient=torch.arange(float(x.numel())).view_as(x).double())
    return leaf.grad


def of_a_leaf_in_place(x: Tensor) -> Any:
    return x.detach().requires_grad_().add_(1)


GRADIENTS = [
    hooked_after_use,
    retained_after_use,
    hooked_at_its_node,
    gradient_to_the_batch,
    gradient_among_uses,
    a_new_leaf,
    an_optimized_leaf,
    a_parameter,
    backward_with_a_gradient,
    of_a_leaf_in_place,
]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized", "ignore:.*lazily", "ignore:.*jit")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("use", [*WRITING, *GRADIENTS])
class TestUse(Use):
    pass


RESHAPING: list[Callable[[Tensor], Any]] = [
    lambda x: x.t_(),
    lambda x: x.unsqueeze_(1),
    lambda x: x[:, 1:].transpose_(0, 1),
    lambda x: x.as_strided_((2,), (2,), 1),
    lambda x: x.resize_(1, 2),
    lambda x: x.resize_as_(ones(3)),
    lambda x: x.set_(ones(3)),
    lambda x: torch.add(ones(3, 1), 1, out=x),
    lambda x: setattr(x, "data", ones(3)),
]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("change", RESHAPING)
def test_another_shape_in_place_is_an_error(change: Callable[[Tensor], Any]) -> None:
    with pytest.raises(GatherError, match=r"everygpu\.parallel\.gather\(out\)"):
        change(lay_out(numbers(5, C), [3, 2]))
