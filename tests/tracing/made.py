"""Events as torch's profiler exports them, with times in microseconds."""

TRAINING = 77
"""The thread that trains."""


def event(category, name, begin, end, thread=TRAINING, **args):
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin, "tid": thread, "args": args}


def step(number, begin, end):
    return event("user_annotation", f"ProfilerStep#{number}", begin, end)


def kernel(begin, end, *, device=0, name="gemm", launched=None):
    """Make a kernel, or two events: it, and the call that launched it at a time and lasted 2 us."""
    made = event(
        "kernel", name, begin, end, thread=7, device=device, stream=7, correlation=(device + 1) * 10**6 + begin
    )
    return [made] if launched is None else [made, launch(made, launched)]


def launch(made, at, name="cudaLaunchKernel", lasting=2):
    return event("cuda_runtime", name, at, at + lasting, correlation=made["args"]["correlation"])


def copy(kind, begin, end, device=0):
    return event("gpu_memcpy", f"Memcpy {kind}", begin, end, thread=7, device=device, stream=8)


def wait(begin, end, thread=TRAINING):
    name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    return event("user_annotation", name, begin, end, thread)
