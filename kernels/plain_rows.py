"""Operations of backends whose hidden rows are one tensor [T, K] and which support states of every size."""

from torch import Tensor

from quengine.kernels.gated_delta import GatedDeltaSpec
from quengine.kernels.layer_norm import Norm
from quengine.kernels.mamba2 import Mamba2Spec


class PlainRows:
    """See kernels.backend.Backend."""

    def columns(self, x: Tensor, first: int, last: int) -> Tensor:
        return x[:, first:last]

    def kept(self, x: Tensor) -> Tensor:
        return x

    def gather_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return x.index_select(0, rows)

    def add_to_rows(self, x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
        return x.index_add(0, rows, values.to(x.dtype))

    def flat_hidden(self, x: Tensor) -> Tensor:
        return x.flatten()

    def hidden_of(self, flat: Tensor, rows: int, _norm: Norm | None) -> Tensor:
        return flat.view(rows, -1)

    def check_gated_delta(self, spec: GatedDeltaSpec) -> None:
        """Heads of every size are supported."""

    def check_mamba2(self, spec: Mamba2Spec) -> None:
        """Heads of every size are supported."""
