"""The CUDA backend with adapters on the meta device: it launches what a model with adapters launches."""

from quengine.kernels.cuda.aot.meta_backend import MetaBackend
from quengine.kernels.cuda.lora.backend import AdaptedCuda


class AdaptedMeta(AdaptedCuda, MetaBackend):
    """See MetaBackend. Adapters have no data either."""
