"""Server process: which request has which slot.

A slot is one of the places for sequences that run at once, numbered as in llama-server. All slots share the paged
cache, so a slot owns no memory: its number stands for the latest sequence that ran there.
"""


class SlotTable:
    """Slots 0, 1, ... of the requests that run."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._used: dict[int, None] = {}  # the least recently taken first

    @property
    def holders(self) -> dict[int, int]:
        """The request of each slot that is taken."""
        return dict(self._holders)

    def take(self, request_id: int, wanted: int, count: int) -> int | None:
        """Takes a free one of `count` slots and returns its number; None if there is none. wanted: the only slot to
        take, modulo `count` as in llama-server; -1: one that was never taken, else the least recently taken one."""
        if wanted >= 0:
            free = [wanted % count] if wanted % count not in self._holders else []
        else:
            free = [slot for slot in range(count) if slot not in self._holders]
        order = {slot: place for place, slot in enumerate(self._used)}
        slot = min(free, key=lambda each: order.get(each, -1), default=None)
        if slot is not None:
            self._holders[slot] = request_id
            self._used.pop(slot, None)
            self._used[slot] = None
        return slot

    def release(self, request_id: int) -> None:
        """Free the slot of a request, if it has one."""
        self._holders = {slot: holder for slot, holder in self._holders.items() if holder != request_id}
