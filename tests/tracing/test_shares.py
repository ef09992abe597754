"""What hand-made traces are summed up to: each device's shares, and the advice about the largest loss."""

import pytest

from everygpu.tracing.advice import advise_gpus, advise_host
from everygpu.tracing.events import ENDING, WAITING, parse_trace
from everygpu.tracing.shares import HostShares, device_shares, host_shares
from tests.tracing.made import copy, event, kernel, launch, step, wait


def parse(*events, num_steps=1, until=1000):
    flat = [e for made in events for e in (made if isinstance(made, list) else [made])]
    return parse_trace([step(1, 0, until), *flat], num_steps)


def shares(*events, **options):
    """Sum up, leave out what is 0, and see that all adds up."""
    found = []
    for s in device_shares(parse(*events, **options)):
        values = {name: getattr(s, name) for name in s.__slots__ if name != "device"}
        assert sum(values.values()) - s.exchange_hidden == pytest.approx(100)
        found.append({name: round(value, 6) for name, value in values.items() if value})
    return found


def test_a_gpu_that_computes_all_the_time():
    assert shares(kernel(0, 500), kernel(500, 1000)) == [{"computing": 100}]


def test_kernels_beside_each_other_count_once():
    assert shares(kernel(0, 800), kernel(200, 600), kernel(700, 1000)) == [{"computing": 100}]


def test_copies_within_a_device_are_computing():
    assert shares(kernel(0, 500), copy("DtoD (Device -> Device)", 500, 1000)) == [{"computing": 100}]


@pytest.mark.parametrize(
    ("name", "is_exchange"),
    [("ncclDevKernel_AllReduce_Sum_f32_RING_LL", True), ("_adam", True), ("_adam_0d1d", True), ("_addmm", False)],
)
def test_exchange_is_exposed_where_nothing_is_computed(name, is_exchange):
    """400 us of it, of which 100 lie beside a kernel; a second device makes everygpu's own kernels exchange."""
    first, second = shares(kernel(0, 600), kernel(500, 900, name=name), kernel(900, 1000), kernel(0, 1000, device=1))
    assert first == ({"computing": 70, "exchange": 30, "exchange_hidden": 10} if is_exchange else {"computing": 100})
    assert second == {"computing": 100}


def test_one_gpu_exchanges_nothing_by_its_own_update():
    assert shares(kernel(0, 600), kernel(600, 1000, name="_adam")) == [{"computing": 100}]


def test_copies_between_devices_and_from_the_host():
    found = shares(
        kernel(0, 500), copy("PtoP (Device -> Device)", 400, 700), copy("HtoD (Pinned -> Device)", 600, 1000)
    )
    assert found == [{"computing": 50, "exchange": 20, "exchange_hidden": 10, "host_copies": 30}]


def test_a_late_launch_is_waited_for():
    assert shares(kernel(0, 400), kernel(600, 1000, launched=590)) == [{"computing": 80, "launching": 20}]


def test_work_that_is_queued_waits_for_something_else():
    assert shares(kernel(0, 400), kernel(600, 1000, launched=300)) == [{"computing": 80, "waiting": 20}]


def test_the_gpu_itself_takes_some_time_between_kernels():
    graph = [*kernel(0, 500), *kernel(504, 900, launched=-10), *kernel(906, 1000, launched=-10)]
    assert shares(graph) == [{"computing": 99, "between": 0.4, "waiting": 0.6}]


def test_both_in_one_gap():
    """Launched by 450, and begun at 600."""
    found = shares(kernel(0, 400), kernel(600, 1000, launched=448))
    assert found == [{"computing": 80, "launching": 5, "waiting": 15}]


def test_data_is_waited_for_where_the_gpu_is_idle():
    """250 us of waiting, of which the GPU computes 100."""
    found = shares(kernel(0, 400), wait(300, 550), kernel(600, 1000, launched=590))
    assert found == [{"computing": 80, "data": 15, "launching": 5}]


def test_a_feeder_is_waited_for_and_what_its_thread_loads_is_not():
    found = shares(
        kernel(0, 400),
        event("user_annotation", WAITING, 400, 450),
        wait(400, 600, thread=5),
        kernel(600, 1000, launched=590),
    )
    assert found == [{"computing": 80, "data": 5, "launching": 15}]


def test_a_gpu_that_has_ended_waits_for_the_others():
    assert shares(kernel(0, 500), kernel(0, 900, device=1)) == [
        {"computing": 50, "waiting": 40, "launching": 10},
        {"computing": 90, "launching": 10},
    ]


def test_only_whole_steps_count_and_work_is_cut_at_their_ends():
    events = [step(2, 1000, 2000), step(3, 2000, 2100), *kernel(500, 1500), *kernel(1900, 2500)]
    trace = parse(*events, num_steps=2)
    assert (trace.num_steps, trace.window) == (2, (0, 2000))
    (found,) = device_shares(trace)
    assert found.computing == 55


def test_what_the_trace_itself_waits_for_is_no_sync():
    def sync(begin):
        return event("cuda_runtime", "cudaStreamSynchronize", begin, begin + 5)

    trace = parse(sync(-50), sync(100), sync(200), event("user_annotation", ENDING, 890, 999), sync(900))
    assert trace.num_syncs == 2


def test_what_is_no_event_is_left_out():
    strange = [{"ph": "M", "name": "process_name"}, {"ph": "f", "name": "ac2g", "ts": 3}, {"ph": "X", "name": "a"}]
    assert parse_trace(strange, 3).num_steps == 0
    assert device_shares(parse(*strange, kernel(0, 1000)))[0].computing == 100


def operator(begin, end):
    return event("cpu_op", "aten::mm", begin, end)


def test_on_the_cpu_operators_that_make_a_batch_are_waiting():
    trace = parse(operator(0, 300), operator(100, 200), wait(200, 500), operator(600, 800), num_steps=1)
    assert device_shares(trace) == []
    assert host_shares(trace) == HostShares(operators=40, data=30, python=30)


class TestAdvice:
    def advise(self, *events, by_train_step=False):
        trace = parse(*events)
        return advise_gpus(device_shares(trace), trace, by_train_step=by_train_step)

    def test_nothing_to_gain(self):
        assert "compute nearly all the time" in self.advise(kernel(0, 960))

    @pytest.mark.parametrize(
        ("events", "words"),
        [
            ([kernel(0, 800, name="nccl"), kernel(800, 1000)], "exchange between GPUs, 80%. Send less often"),
            ([copy("HtoD", 0, 500), kernel(500, 1000)], "copies from and to the host, 50%. Copy ahead"),
            ([wait(0, 500), kernel(500, 1000, launched=490)], "waiting for data, 50%. Load ahead"),
            ([kernel(0, 500), kernel(700, 1000, launched=100)], "other GPUs or streams, 20%. Work is queued"),
            ([kernel(n, n + 4, launched=-10) for n in range(0, 1000, 5)], "between kernels, 20%. Kernels are so short"),
            ([kernel(500, 1000, launched=490)], "waiting for launches, 50%. The CPU doesn't launch fast enough"),
        ],
    )
    def test_the_largest_loss_is_named(self, events, words):
        assert words in self.advise(*events)

    def test_a_feeder_that_is_there_is_not_advised(self):
        late = kernel(500, 1000, launched=490)
        assert "everygpu.Feeder has batches" in self.advise(wait(0, 500), *late)
        assert "Feeder" not in self.advise(event("user_annotation", WAITING, 0, 500), *late)

    def test_the_mean_over_gpus_counts(self):
        """One waits 60% for launches and 0% for others, the other 0% and 80%."""
        one = [kernel(600, 1000, launched=590)]
        other = [kernel(0, 100, device=1), kernel(900, 1000, device=1, launched=50)]
        assert "waiting for other GPUs or streams, 40%" in self.advise(*one, *other)

    def test_what_is_launched_decides_what_to_do(self):
        late = kernel(500, 1000)
        by_call, by_graph = launch(late[0], 490), launch(late[0], 490, name="cudaGraphLaunch")
        assert "TrainStep launches a step as one CUDA graph" in self.advise(late, by_call)
        assert "its log line says why" in self.advise(late, by_call, by_train_step=True)
        assert "though CUDA graphs are launched" in self.advise(late, by_graph, by_train_step=True)

    def test_waiting_for_gpus_at_every_step_is_named(self):
        syncs = [event("cuda_runtime", "cudaStreamSynchronize", moment, moment + 5) for moment in (10, 20, 30)]
        assert "waits for a GPU 3 times a step" in self.advise(*syncs, kernel(500, 1000, launched=490))

    @pytest.mark.parametrize(
        ("shares", "words"),
        [
            ((30, 40, 30), "waiting for data, 40%"),
            ((60, 10, 30), "Python between"),
            ((97, 1, 2), "nearly all the time"),
        ],
    )
    def test_on_the_cpu(self, shares, words):
        operators, data, python = shares
        found = advise_host(HostShares(operators=operators, data=data, python=python), parse())
        assert words in found
