"""The test of copies itself, on the CPU with transfers that corrupt, and on GPUs."""

import json

import pytest
import torch

from everygpu.devices import peer_test
from everygpu.devices.peer_test import copy, find_wrong, main, make_pattern

CPUS = [torch.device("cpu")] * 3


def test_pattern_has_every_byte_and_names_its_place():
    pattern = make_pattern()
    assert pattern.unique().numel() == 256
    blocks = pattern[: 2**16 // 512 * 512].view(-1, 512)
    assert not any(blocks[i].equal(blocks[i + 1]) for i in range(len(blocks) - 1))
    assert all(pattern.view(dtype).isnan().any() for dtype in (torch.bfloat16, torch.float32))


def spoil_element(target, source):
    copy(target, source)
    target.view(torch.uint8).view(-1)[-1] ^= 1


def forget(target, source):
    pass


def spoil_kernel(target, source):
    if source.is_contiguous():
        copy(target, source)


def spoil_large(target, source):
    copy(target, source)
    if target.numel() * target.element_size() > 2**20:
        target.view(torch.uint8).view(-1)[2**20] += 1


@pytest.mark.parametrize(
    ("transfer", "words"),
    [
        (spoil_element, "4104 bytes by the copy engine"),
        (forget, "4104 bytes by the copy engine"),
        (spoil_kernel, "4104 bytes by a kernel"),
        (spoil_large, "2097152 bytes by the copy engine"),
    ],
)
def test_every_fault_is_found(transfer, words):
    assert find_wrong(make_pattern(), make_pattern(), 2, transfer) == words


def test_bytes_of_another_device_are_noticed():
    pattern = make_pattern()

    def from_device_0(target, source):
        theirs = pattern[: source.numel() * source.element_size()].view(source.dtype)
        copy(target, theirs if source.is_contiguous() else theirs.view(source.t().shape).t())

    assert find_wrong(pattern, pattern, 0, from_device_0) is None
    assert find_wrong(pattern, pattern, 3, from_device_0) is not None


def states(capsys, *arguments, **options):
    main(arguments, **options)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def pairs_of(said):
    return [pair[:2] for pair in said[-1]["pairs"]]


def test_every_ordered_pair_is_announced_and_reported(capsys):
    said = states(capsys, "3", devices=CPUS)
    pairs = [[0, 1], [0, 2], [1, 0], [1, 2], [2, 0], [2, 1]]
    assert [state["now"] for state in said] == [*pairs, None]
    assert said[-1] == {"ready": [0, 1, 2], "now": None, "pairs": [[*pair, None] for pair in pairs]}


def test_device_without_room_is_left_out(capsys, monkeypatch):
    plain = peer_test.make_pattern
    calls = []

    def make():
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("full")
        return plain()

    monkeypatch.setattr(peer_test, "make_pattern", make)
    said = states(capsys, "3", devices=CPUS)
    assert said[0]["ready"] == [0, 2]
    assert pairs_of(said) == [[0, 2], [2, 0]]


def test_device_that_is_wrong_with_itself_is_left_out(capsys, monkeypatch):
    monkeypatch.setattr(peer_test, "find_wrong", lambda *arguments: "4104 bytes by a kernel")
    (said,) = states(capsys, "2", devices=CPUS[:2])
    assert said["ready"] == said["pairs"] == []


def test_pair_without_room_is_not_reported(capsys):
    def refuse(target, source):
        raise torch.OutOfMemoryError("full")

    assert pairs_of(states(capsys, "2", devices=CPUS[:2], transfer=refuse)) == []


@pytest.mark.gpu
@pytest.mark.cards(2)
def test_real_gpus(capsys):
    assert states(capsys, "2")[-1]["pairs"] == [[0, 1, None], [1, 0, None]]
