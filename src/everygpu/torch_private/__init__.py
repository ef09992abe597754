"""All of private torch that this package uses, in one place: nothing else in it names any.

Each name wraps one of torch's and says why there is no public way. tests/test_torch_private.py says what each must
do. All were tried with the versions of torch in ``TRIED``.
"""

from collections.abc import Mapping
from types import MappingProxyType

TRIED = ("2.11", "2.15")
"""The oldest and the newest version of torch that the whole test suite has run with."""

ATTRIBUTES: Mapping[str, str] = MappingProxyType(
    {
        "Tensor": "_backward_hooks _base _is_param _is_zerotensor _post_accumulate_grad_hooks _version",
        "UntypedStorage": "_cdata",
        "nn.Module": "_apply _buffers _compiled_call_impl _modules _parameters _replicate_for_data_parallel",
        "state dicts": "_metadata",
        "Optimizer": "_optimizer_step_post_hooks _optimizer_step_pre_hooks",
        "operators": "_schema",
        "torch.compile's contexts and backends": "_dynamic _torchdynamo_orig_backend",
        "Python's copyreg": "_slotnames",
        "DataLoader": "_iterator",
        "DataLoader's iterators": "_persistent_workers _shutdown_workers _try_get_data _worker_pids_set _workers",
    }
)
"""Private attributes of torch's objects, which are read where the object is; torch has no public way to read them."""


def is_tried(version: str) -> bool:
    """Whether a torch is as old as the newest in ``TRIED``, or older.

    What depends on a compiler's internals is switched off for a newer one, until the tests have run with it.

    Args:
        version: As ``torch.__version__``.
    """
    major, minor = version.split(".")[:2]
    newest = tuple(map(int, TRIED[1].split(".")))
    return (int(major), int(minor)) <= newest
