"""The options of a server that is deployed on a Ray cluster."""

from dataclasses import dataclass
from typing import Annotated

from quengine.errors import EngineError
from quengine.options import Flag, Range, check_ranges

_PANEL = "On a Ray cluster"


@dataclass(frozen=True)
class RayOptions:
    """Where replicas of the server run, and how many; each flag says what it is.

    `max_replicas` of None is `min_replicas`, at least 1: their number is fixed then.

    Raises:
        EngineError: a number is out of range, or the most is below the fewest.
    """

    deploy: Annotated[
        bool,
        Flag(
            "--ray",
            "Deploy as a Ray Serve application, on the cluster of --ray-address or RAY_ADDRESS, else one that is "
            "started here.",
            _PANEL,
        ),
    ] = False
    address: Annotated[
        str | None,
        Flag("--ray-address", "A running cluster: auto, HOST:PORT or ray://HOST:PORT.", _PANEL, "ADDRESS"),
    ] = None
    min_replicas: Annotated[
        int, Range(0), Flag("--ray-min-replicas", "Fewest replicas; 0: none while idle.", _PANEL, "N")
    ] = 1
    max_replicas: Annotated[
        int | None,
        Range(1),
        Flag("--ray-max-replicas", "Most replicas, as requests ask. (default: the fewest)", _PANEL, "N"),
    ] = None

    def __post_init__(self) -> None:
        check_ranges(self, "ray {name} {value}")
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise EngineError(
                f"--ray-max-replicas {self.max_replicas}: must be at least --ray-min-replicas {self.min_replicas}"
            )

    @property
    def used(self) -> bool:
        return self.deploy or self.address is not None

    @property
    def most(self) -> int:
        return self.max_replicas or max(1, self.min_replicas)
