"""Ranks read the rows of the loader's batches, each its own: together what one process reads, in its order."""

import random
import re
from itertools import chain

import pytest
import torch

import everygpu
from tests.feed import rank_loaders as loaders
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
CASES = [(name, how) for name, hows in loaders.HOWS.items() for how in hows]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(warm_server, folder):
    """What three ranks read."""
    with warm_server.serving():
        return run_ranks(loaders.everything, size=3, folder=folder)


@pytest.fixture(autouse=True)
def keep_random_state():
    states = random.getstate(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    torch.set_rng_state(states[1])


def joined(passes):
    """The batches of the whole run, from those of each rank."""
    counts = [[len(p) for p in of_rank] for of_rank in passes]
    assert counts == [counts[0]] * len(counts), "ranks get as many batches"
    return [[list(chain(*rows)) for rows in zip(*of_ranks)] for of_ranks in zip(*passes)]


@pytest.mark.parametrize(("name", "how"), CASES)
def test_ranks_together_read_what_one_process_reads(ranks, name, how):
    found = [of_rank["passes"][name, how] for of_rank in ranks]
    alone = loaders.two_passes(name, how)
    assert joined([f["passes"] for f in found]) == alone["passes"]
    for step, batches in enumerate(zip(*(f["passes"][0] for f in found))):
        sizes = [len(rows) for rows in batches]
        assert sizes == sorted(sizes, reverse=True), step
        assert max(sizes) - min(sizes) <= 1, step
    if alone["num_read"] is not None:
        num_empty = [sum(not rows for p in f["passes"] for rows in p) for f in found]
        assert sum(f["num_read"] for f in found) - sum(num_empty) == alone["num_read"], "each reads its own rows"


def test_own_parts_go_on_on_as_many_ranks_and_are_refused_on_others(ranks, warm_server, folder):
    states, read, said = zip(*(of_rank["split"] for of_rank in ranks))
    for rank, rows in enumerate(read):
        assert list(chain(*rows)) == list(range(20 + rank))
        assert f"batches={10 + (rank + 1) // 2} then, and {11 + (rank + 1) // 2} now" in said[rank]
    with warm_server.serving():
        found = run_ranks(loaders.split_and_resumed, states[0], size=2, folder=folder)
    assert [("num_parts=3 then, and 2 now" in text) for text in found] == [True, True]


def check_any_ranks(seed, folder):
    """Stop anywhere, and go on with other ranks and workers: the batches of a run that isn't stopped, row by row."""
    rng = random.Random(seed)
    whole, _ = loaders.read_some(seed, "whole", None, None)
    read, state = [], None
    for run in range(20):
        stop = rng.randrange(1, 6) if run < 2 else None
        size = rng.choice((1, 2, 4))
        if size == 1:
            found = [loaders.read_some(seed, run, state, stop)]
        else:
            found = run_ranks(loaders.read_some, seed, run, state, stop, size=size, folder=folder / str(run))
        batches = [of_rank for of_rank, _ in found]
        read += [(steps[0][0], list(chain(*(rows for _, rows in steps)))) for steps in zip(*batches)]
        state = found[0][1]
        if state is None:
            break
    assert read == whole


@pytest.mark.parametrize("seed", [6, 7, 8, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100, 140))])
def test_any_loader_goes_on_with_other_ranks_and_workers(seed, warm_server, tmp_path):
    with warm_server.serving():
        check_any_ranks(seed, tmp_path)


@pytest.mark.parametrize("how", ["thread", "no thread"])
def test_loaders_that_are_split_already_end_unevenly(ranks, how):
    passes = [of_rank["sharded"][how] for of_rank in ranks]
    assert [len(p[0]) for p in passes] == [6, 6, 6]
    for rank, (first, second) in enumerate(passes):
        assert first == second
        assert list(chain(*first)) == list(loaders.part(rank, 3))
    assert passes[1][0] == [[]] * 6, "of the others' structure"


def test_a_pass_that_all_ranks_left_is_followed_by_a_whole_one(ranks):
    assert [of_rank["left"] for of_rank in ranks] == [of_rank["sharded"]["thread"][0] for of_rank in ranks]


def test_one_rank_may_measure_workers(ranks):
    assert [of_rank["tuned"] for of_rank in ranks] == [False, False, True]


def test_a_distributed_sampler_has_split_already(ranks):
    passes = [of_rank["sharded"]["sampler"][0] for of_rank in ranks]
    assert sorted(chain(*chain(*passes))) == list(range(24))
    assert passes[1] == [[1, 4, 7, 10], [13, 16, 19, 22]]


def test_workers_read_each_number_once_and_draw_their_own_numbers(ranks):
    passes = [of_rank["workers"] for of_rank in ranks]
    whole = joined([[[rows for rows, _ in p] for p in of_rank] for of_rank in passes])
    alone = loaders.with_workers()
    assert whole == [[rows for rows, _ in p] for p in alone]
    drawn = [draw for of_rank in passes for p in of_rank for _, draw in p]
    assert len(set(drawn)) == len(drawn), "persistent workers go on, and those of other ranks have other seeds"
    assert [draw for _, draw in passes[0][0]] == [draw for _, draw in alone[0]]


def test_one_seed_makes_the_same_parameters_and_other_masks_on_each_rank(ranks):
    weights, masks = zip(*(of_rank["dropout"] for of_rank in ranks))
    assert weights == (weights[0],) * 3
    rows = [tuple(row) for of_rank in masks for row in of_rank]
    assert len(set(rows)) == 9
    assert loaders.dropout() == (weights[0], masks[0])


def test_ranks_with_different_orders_are_an_error_on_all(ranks):
    for of_rank in ranks:
        messages = of_rank["different"][0]
        assert len(messages) == 2
        assert all(
            re.search("ranks must draw the same order.*iterate the loader on all ranks", message)
            for message in messages
        )


def test_streams_that_differ_are_named_once(ranks):
    said = [of_rank["different"][1] for of_rank in ranks]
    assert [len(messages) for messages in said] == [1, 0, 0]
    assert "the first batch of an epoch is not the same on all ranks" in said[0][0]


def test_each_rank_goes_on_from_rank_0s_own_state_and_is_told_so(ranks):
    read, said = zip(*(of_rank["own state"] for of_rank in ranks))
    assert read == ([[3]], [[13]], [[23]])
    assert [len(messages) for messages in said] == [1, 0, 0]
    assert "continues from the state that rank 0's loader had" in said[0][0]


def test_streams_that_should_match_and_end_unevenly_are_an_error_on_all(ranks):
    for of_rank in ranks:
        for message in of_rank["uneven"]:
            assert "ended after 3 and another that has more" in message
            assert "sharded=True" in message


def test_a_meter_has_what_all_ranks_have_seen(ranks):
    # Rank 1 has two rows of 1, rank 2 has two and three of 2, and each one of a half.
    total = ((1 * 2 + 2 * 5 + 3 * 0.5) / 10, 10)
    for rank, (before, totals, after) in enumerate(of_rank["meters"] for of_rank in ranks):
        assert totals == [total, total], "once or twice"
        assert before == after, "a rank's own stays"
        assert before[1] == (1, 3, 6)[rank]


def test_a_meter_of_one_process_is_all(environ_alone):
    meter = everygpu.Meter()
    assert meter.sync().num_rows == 0
    meter.update(torch.tensor([1.0, 3.0]), 4)
    total = meter.sync()
    assert (total.avg, total.num_rows) == (2.0, 4)
    total.update(7.0)
    assert (meter.avg, meter.num_rows) == (2.0, 4)


@pytest.fixture
def environ_alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
