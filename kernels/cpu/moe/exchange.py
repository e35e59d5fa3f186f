"""The host's side of an exchange of rows with another device (kernels/moe/exchange.py), as two kernels of a list.

One waits for the rows of a layer, the other says that their sums are written. A list of kernels can thus follow the
steps of a device: its threads read the rows where the device writes them, and no Python runs between two layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from quengine.kernels.cpu.runtime.arguments import Arguments
from quengine.kernels.cpu.runtime.kernel_table import await_rows_kernel, sums_ready_kernel
from quengine.kernels.cpu.runtime.threads import Launch
from quengine.kernels.moe.exchange import Exchange


@dataclass
class ExchangeArguments(Arguments):
    """Addresses of the counts of an exchange, int64 each."""

    sent: int
    taken: int
    summed: int
    stopped: int


def await_rows_launch(exchange: Exchange) -> Launch:
    """Waits until the device has sent the next rows, or the exchange is stopped. One task."""
    return Launch(await_rows_kernel(), _arguments(exchange), 1, keep=(exchange,))


def sums_ready_launch(exchange: Exchange) -> Launch:
    """Tells the device that the sums of the rows taken last are written. One task."""
    return Launch(sums_ready_kernel(), _arguments(exchange), 1, keep=(exchange,))


def _arguments(exchange: Exchange) -> ExchangeArguments:
    counts = (exchange.sent, exchange.taken, exchange.summed, exchange.stopped)
    return ExchangeArguments(*(count.data_ptr() for count in counts))
