"""Steps of released models' sizes are launched without data, as when kernels are compiled ahead."""

from tests.fork_server import without_interpreter

CHECK = """
import sys
from math import prod
import torch
from quengine.block_pool import CachePool
from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cuda.aot.meta_backend import META, backend_for
from quengine.kernels.cuda.aot.aot_compile import record
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kv_cache import KVCache
from quengine.models.decoder import Decoder
from quengine.models.synthetic.presets import PRESETS
from quengine.models.synthetic.synthetic import tensor_type
from quengine.models.tensor_table import required_tensors
from quengine.step_plan import SequenceRows, forward_batch

def tensor(spec, name, shape):
    fmt = FORMATS[tensor_type(spec, name, shape)]
    data = torch.empty(prod(shape[:-1]), fmt.row_bytes(shape[-1]), dtype=torch.uint8, device=META)
    return QuantTensor(name, fmt, shape, data)

def launched(spec, arch):
    config = spec.config()
    with backend_for(arch) as backend:
        tensors = {name: tensor(spec, name, shape) for name, shape in required_tensors(config).items()}
        decoder = Decoder(config, tensors, backend, 512, 256)
        pools = [CachePool(16, is_state=group.is_state) for group in config.cache_groups]
        cache = KVCache.allocate(config, 512, META, "f16", pools)
        tables = [[1] if group.is_state else [1] * 16 for group in config.cache_groups]
        steps = [("prefill", [SequenceRows([0] * 130, 0, tables)])]
        steps += [("decode", [SequenceRows([0], 130, tables)] * rows) for rows in (1, 16)]
        for phase, rows in steps:
            yield record(lambda: decoder.forward(forward_batch(phase, rows, META), cache.layers))

with torch.no_grad():
    for preset, spec in PRESETS.items():
        if preset.endswith("tiny") or spec.config().encoder is not None:
            continue
        try:
            assert all(launched(spec.of_layers(min(8, spec.block_count), preset), int(sys.argv[1])))
        except Exception as error:
            print(preset, repr(error))
            raise
"""


def test_steps_of_released_sizes_are_launched_without_data() -> None:
    """In a process of its own: the interpreter's launches are not recorded."""
    without_interpreter(CHECK, 90)
