"""Where experts in host memory are, and their uses: what a server shows of them, without torch."""

from typing import NamedTuple


class ExpertCounts(NamedTuple):
    """Numbers of experts: those of layers in host memory that the device holds, and those in host memory alone; how
    often rows used each of these two kinds, as of the last look; how many have taken another's place."""

    on_device: int = 0
    in_host: int = 0
    device_uses: int = 0
    host_uses: int = 0
    replaced: int = 0

    @property
    def hits(self) -> float:
        """The share of uses whose experts the device held; 0 without uses."""
        return self.device_uses / max(1, self.device_uses + self.host_uses)
