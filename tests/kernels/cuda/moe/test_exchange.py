"""Rows that go to the host and sums that come back: values, counts, and sums that do not come."""

import pytest
import torch

from quengine.kernels.cuda.moe.exchange import add_sums, send_rows
from quengine.kernels.moe.exchange import Exchange
from quengine.kernels.moe.held_experts import HeldExperts, places_of
from quengine.kernels.moe.router import Routing
from tests.kernels.cuda.moe.routings import chosen

EXPERTS, USED = 6, 3


def exchange_of(rows: int, width: int, device: torch.device) -> Exchange:
    return Exchange.allocate(rows, width, USED, device)


def routing_of(rows: int, device: torch.device) -> Routing:
    weights = torch.rand(rows, USED, generator=torch.Generator().manual_seed(1)).to(device)
    return Routing(chosen(rows, USED, EXPERTS).to(device), weights)


@pytest.mark.parametrize(("rows", "width"), [(1, 32), (5, 96), (4, 2080)])
def test_the_host_gets_rows_and_the_experts_that_are_its_own(
    rows: int, width: int, device: torch.device
) -> None:
    exchange, routing = exchange_of(8, width, device), routing_of(rows, device)
    x = torch.randn(rows, width, device=device)
    uses = torch.zeros(EXPERTS, dtype=torch.int32, device=device)
    held = HeldExperts(places_of([4, 1], EXPERTS).to(device), uses, 2)
    positions = torch.arange(rows, dtype=torch.int32, device=device)
    places = send_rows(x, routing, positions, held, exchange)
    assert places is not None and torch.equal(places, held.places[routing.experts.long()])
    experts = routing.experts.cpu()
    expected = experts.where((experts != 4) & (experts != 1), -1)
    assert torch.equal(exchange.rows[:rows], x.cpu()) and torch.equal(exchange.experts[:rows], expected)
    assert torch.equal(exchange.weights[:rows], routing.weights.cpu())
    counted = experts[1:].flatten().long()
    assert torch.equal(uses.cpu(), torch.bincount(counted, minlength=EXPERTS).int()), "position 0 is padding"
    assert exchange.sent.item() == 1 and exchange.launches.tolist() == [1, 0]
    assert send_rows(x, routing, positions, None, exchange) is None
    assert torch.equal(exchange.experts[:rows], experts) and exchange.sent.item() == 2


def test_sums_are_added_once_they_are_there(device: torch.device) -> None:
    exchange, x = exchange_of(4, 96, device), torch.randn(3, 96, device=device)
    send_rows(x, routing_of(3, device), torch.ones(3, dtype=torch.int32, device=device), None, exchange)
    exchange.sums.copy_(torch.randn(4, 96))
    exchange.summed.fill_(1)
    residual = torch.randn(3, 96, device=device)
    expected = residual + exchange.sums[:3].to(device)
    assert torch.equal(add_sums(residual, exchange, polls=4), expected)


def test_rows_whose_sums_do_not_come_are_no_numbers(device: torch.device) -> None:
    exchange, x = exchange_of(4, 96, device), torch.randn(2, 96, device=device)
    send_rows(x, routing_of(2, device), torch.ones(2, dtype=torch.int32, device=device), None, exchange)
    assert add_sums(torch.zeros(2, 96, device=device), exchange, polls=4).isnan().all()
    assert exchange.given_up.item() == 1


def test_one_wait_in_vain_is_the_last(device: torch.device) -> None:
    """Layers that follow would each wait as long, while the process of the host is stopped."""
    exchange, x = exchange_of(4, 96, device), torch.randn(2, 96, device=device)
    send_rows(x, routing_of(2, device), torch.ones(2, dtype=torch.int32, device=device), None, exchange)
    exchange.given_up.fill_(1)
    assert add_sums(torch.zeros(2, 96, device=device), exchange, polls=1 << 30).isnan().all()
    exchange.summed.fill_(1)
    assert add_sums(torch.ones(2, 96, device=device), exchange, polls=1 << 30).eq(1).all()


def test_more_rows_than_there_is_room_for_are_refused(device: torch.device) -> None:
    exchange, x = exchange_of(2, 96, device), torch.randn(3, 96, device=device)
    with pytest.raises(
        ValueError, match=r"3 rows of 96 with 3 experts each; the exchange has room for \[2, 96\]"
    ):
        send_rows(x, routing_of(3, device), torch.ones(3, dtype=torch.int32, device=device), None, exchange)
