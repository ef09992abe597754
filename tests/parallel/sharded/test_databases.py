"""All operators and modules that torch has samples of: ``make test-slow``."""

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

import everygpu
from everygpu.errors import EveryGPUError
from tests.parallel.sharded.databases import Operator, compare, gradients, wrong_calls, wrong_errors

ROOT = Path(__file__).parents[3]
PARTS = 8
"""The databases in shares, as collecting tests mustn't import them."""

slow = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]


SAMPLE = """
add where clamp sum mean amax std softmax cumsum sort gather cat stack mm mv addmm bmm
nn.functional.linear nn.functional.mse_loss nn.functional.cross_entropy view expand squeeze transpose split select flip
resize_ linalg.matrix_rank
"""
"""One operator or more for each family of rules, and some that have none."""


def test_a_sample_of_the_operators(warm_python: None) -> None:
    command = [sys.executable, "-m", "tests.parallel.sharded.databases", *SAMPLE.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert (done.stdout, done.returncode) == (f"{len(SAMPLE.split())} operators\n", 0), done.stderr


def operators(part: int, most: int, **options: Any) -> Iterator[Operator]:
    from torch.testing._internal.common_methods_invocations import op_db

    yield from (Operator(entry, most, **options) for entry in op_db[part::PARTS])


@pytest.mark.parametrize("part", range(PARTS))
class TestOperators:
    pytestmark = slow

    def test_give_what_they_give_for_plain_tensors(self, part: int) -> None:
        assert [text for operator in operators(part, 6) for text in wrong_calls(operator)] == []

    def test_of_complex_numbers(self, part: int) -> None:
        found = operators(part, 2, dtypes=(torch.complex64,))
        assert [text for operator in found for text in wrong_calls(operator)] == []

    def test_raise_what_they_raise_for_plain_tensors(self, part: int) -> None:
        assert [text for operator in operators(part, 1) for text in wrong_errors(operator)] == []


def halves(call: Any) -> list[Any]:
    """Cut all tensors of a call in two along dimension 0, as torch.chunk does."""
    tensors = [t for t in tree_leaves(call) if isinstance(t, Tensor) and t.ndim]
    count = min(len(t.chunk(2)) for t in tensors)
    return [tree_map_only(Tensor, lambda t, i=i: t.chunk(2)[i] if t.ndim else t, call) for i in range(count)]


def joined(results: list[Any]) -> Any:
    columns = zip(*(tree_leaves(r) for r in results))
    found = [torch.cat(c) if isinstance(c[0], Tensor) and c[0].ndim else torch.stack(c) for c in columns]
    return tree_unflatten(found, tree_flatten(results[0])[1])


def run(module: nn.Module, calls: list[Any]) -> Any:
    """Return what calls of a module one after another give, joined, and the parameters' gradients."""
    torch.manual_seed(0)
    results = [module(*args, **kwargs) for args, kwargs in calls]
    result = results[0] if len(results) == 1 else joined(results)
    grads, error = gradients(result, list(module.parameters()))
    if error is not None:
        raise error
    return tree_map_only(Tensor, Tensor.detach, (result, grads))


def attempt_run(module: nn.Module, calls: list[Any]) -> Any:
    try:
        return run(module, calls)
    except Exception as error:
        return error


def wrong_samples(info: Any, training: bool, most: int) -> Iterator[str]:
    """Say which calls of a module give something else from two replicas, in which rows depend on each other or not."""
    given = {"device": "cpu", "dtype": torch.float64, "requires_grad": True, "training": training}
    samples = info.module_inputs_func(info, **given)
    for number, sample in list(enumerate(samples))[:: max(1, len(samples) // most)]:
        torch.manual_seed(0)
        made, given_to = sample.constructor_input, sample.forward_input
        module = info.module_cls(*made.args, **made.kwargs).to(torch.float64).train(training)
        call = (tuple(given_to.args), dict(given_to.kwargs))
        if any(isinstance(p, nn.UninitializedParameter) for p in module.parameters()):
            module(*call[0], **call[1])
        whole = attempt_run(copy.deepcopy(module), [call])
        if isinstance(whole, Exception) or not any(isinstance(t, Tensor) and t.ndim for t in tree_leaves(call)):
            continue
        parts = attempt_run(copy.deepcopy(module), halves(call))
        is_row_wise = not isinstance(parts, Exception) and compare(parts, whole, "rows") is None
        actual = attempt_run(everygpu.DataParallel(module, ["cpu"] * 2, engine="threads"), [call])
        found = different(actual, whole if is_row_wise else parts, is_refusal_right=not is_row_wise)
        if found:
            yield f"{info.name}, sample {number}, training {training}: {found}"


def different(actual: Any, expected: Any, *, is_refusal_right: bool) -> str | None:
    if isinstance(actual, Exception):
        is_right = isinstance(actual, EveryGPUError) if is_refusal_right else False
        return None if is_right or type(actual) is type(expected) else f"{actual!r} instead of {expected!r:.200}"
    return f"no {expected!r}" if isinstance(expected, Exception) else compare(actual, expected, "result or gradient")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("part", range(PARTS))
class TestModules:
    pytestmark = slow

    def test_give_on_two_replicas_what_they_give_on_one(self, part: int, training: bool) -> None:
        from torch.testing._internal.common_modules import module_db

        assert [text for info in module_db[part::PARTS] for text in wrong_samples(info, training, 6)] == []
