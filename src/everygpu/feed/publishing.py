"""A Feeder's figures, for ``everygpu top``."""

import os
from collections.abc import Callable, Sequence

import torch

from everygpu.devices import Figures, Publisher
from everygpu.feed.waiting import FeedReport
from everygpu.ranks.membership import find_membership


class Board:
    """Where a Feeder publishes how its steps go.

    Args:
        devices: Of the replicas.
        make_publisher: Called at the first step, as ``Publisher`` is.
    """

    def __init__(self, devices: Sequence[torch.device], make_publisher: Callable[..., Publisher] = Publisher) -> None:
        self._devices = list(devices)
        self._make_publisher = make_publisher
        self._publisher: Publisher | None = None

    def show(self, num_steps: int, recent: Callable[[], FeedReport]) -> None:
        """Publish, if it is time to.

        Args:
            num_steps: Since the Feeder was made.
            recent: Averages the last steps; called only when they are needed.
        """
        if self._publisher is None:
            self._publisher = self._make_publisher(meets_at=_meeting_place())
        if not self._publisher.is_due:
            return
        report = recent()
        figures = Figures(
            devices=tuple(map(_name, self._devices)),
            num_steps=num_steps,
            steps_per_s=1 / report.step_s if report.step_s else None,
            data_wait_pct=report.wait_pct,
        )
        self._publisher.publish(figures)

    def close(self) -> None:
        """Withdraw the figures."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None


def _meeting_place() -> str | None:
    """Name where the ranks of this run have met; None for a process alone."""
    if find_membership() is None or "MASTER_PORT" not in os.environ:
        return None
    return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ['MASTER_PORT']}"


def _name(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
