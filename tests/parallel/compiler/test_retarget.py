"""Generated code for one GPU, rewritten for another; and what is left alone."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everygpu.parallel.compiler.load_graph import retarget

GENERATED = (Path(__file__).parent / "generated_code.txt").read_text()
"""What torch 2.11 generated for cuda:1: one kernel of it, and its call."""


def test_every_mention_of_the_gpu_is_rewritten() -> None:
    code = retarget(GENERATED, 1, 3)
    assert code is not None
    for form in (
        "torch.cuda._DeviceGuard(3)",
        "torch.cuda.set_device(3)",
        "stream1 = get_raw_stream(3)",
        "DeviceProperties(type='cuda', index=3, multi_processor_count=132",
        "device='cuda:3'",
    ):
        assert form in code
    statements = [line for line in code.splitlines() if not line.startswith("#")]
    assert not any("cuda:1" in line or "index=1" in line or "(1)" in line for line in statements)


def test_nothing_else_is_touched() -> None:
    code = retarget(GENERATED, 1, 3)
    assert code is not None
    changed = [pair for pair in zip(GENERATED.splitlines(), code.splitlines(), strict=True) if pair[0] != pair[1]]
    assert len(changed) == 5
    compile(code, "generated", "exec")


@given(st.integers(0, 15), st.integers(0, 15))
def test_there_and_back(first: int, second: int) -> None:
    code = retarget(GENERATED, 1, first)
    assert code is not None
    there = retarget(code, first, second)
    assert there is not None
    assert retarget(there, second, 1) == GENERATED


@pytest.mark.parametrize(
    "line",
    [
        "buf0 = torch.ops.aten.full.default([2], 1, device=device(type='cuda', index=1))",
        "buf0 = rand_strided((2, ), (1, ), device='cuda:1')",
        'buf0 = rand_strided((2, ), (1, ), device="cuda:1")',
        "raw_stream1 = get_raw_stream(1)",
    ],
)
def test_other_known_forms(line: str) -> None:
    code = retarget(GENERATED + line, 1, 0)
    assert code is not None
    rewritten = line.replace("index=1", "index=0").replace("cuda:1", "cuda:0").replace("(1)", "(0)")
    assert code.splitlines()[-1] == rewritten != line


def test_code_of_another_generator() -> None:
    assert retarget("at::cuda::CUDAGuard device_guard(1);", 1, 0) is None


@pytest.mark.parametrize(
    "line",
    [
        "with torch.cuda._DeviceGuard(0):",
        "buf0 = empty((2, ), device='cuda:2')",
        "with torch.cuda.device(1):",
        "with torch.cuda._DeviceGuard(index):",
        "torch.cuda.set_device(device_index)",
        "stream = torch.cuda.current_stream()",
        "buf0 = torch.empty(2, device=torch.device('cuda', 1))",
        "buf0 = torch.empty(2, device=device(kind, 1))",
        "buf0 = empty_strided_p2p((2, ), (1, ), torch.float32, group)",
        "name = f'cuda:1{suffix}'.strip()",
        "kernel = async_compile.cutlass('kernel', source)",
        "kernel = async_compile.multi_kernel('kernel', [one, other])",
        "'device': DeviceProperties(index=1, type='cuda')",
        "stream1 = get_raw_stream(1 + 0)",
    ],
)
def test_unknown_forms_are_left_alone(line: str) -> None:
    assert retarget(GENERATED + line, 1, 0) is None


@pytest.mark.parametrize(
    "line",
    ["# with torch.cuda.device(1): as cuda:1", "    # cuda:1", "buf0 = torch.ops.aten.full(2, 1, device(type='cpu'))"],
)
def test_comments_and_the_cpu_do_no_harm(line: str) -> None:
    assert retarget(GENERATED + line, 1, 1) == GENERATED + line
