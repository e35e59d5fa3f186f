"""Tables shared by layers: rotary tables and causal masks, made once for all layers of a kind."""

from typing import Any

import torch
from torch import Tensor

from quengine.kernels.attention import causal_mask_band
from quengine.kernels.backend import AttentionSpec
from quengine.kernels.moe.host_experts import HostExperts
from quengine.kernels.rope import rope_table
from quengine.models.config import ModelConfig


class LayerTables:
    """Tables shared by layers, see the module docstring.

    Args:
        config: the model's shape.
        device: device of the tables.
        ctx_size: number of positions of the rotary tables.
        chunk_size: maximum number of rows of the causal mask.
        host: computes the experts of the first `host.layers` layers; None: the backend computes all.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        ctx_size: int,
        chunk_size: int,
        host: HostExperts | None = None,
    ) -> None:
        self.config = config
        self._device, self._ctx_size, self._chunk_size = device, ctx_size, chunk_size
        self._host = host
        self._groups = {layer: n for n, group in enumerate(config.cache_groups) for layer in group.layers}
        self._masks: dict[int, dict[str, Any]] = {}
        self._rotations: dict[tuple[bool, bool], dict[str, Any]] = {}
        self._query_scale = _query_scale(config, ctx_size, device)

    def cache_group(self, layer: int) -> int:
        """The index of a layer's cache group (ModelConfig.cache_groups), whose block tables it uses."""
        return self._groups[layer]

    def host_experts(self, layer: int) -> HostExperts | None:
        """What computes a layer's experts on the host; None if the backend computes them."""
        return self._host if self._host is not None and layer < self._host.layers else None

    def attention(self, layer: int, heads: int, kv_heads: int, head_dim: int) -> AttentionSpec:
        """The attention of a layer: its shape and the shared tables, without tensors of its own."""
        config, group = self.config, self.cache_group(layer)
        window = config.cache_groups[group].window
        if group not in self._masks:
            rows = min(self._chunk_size, self._ctx_size)
            mask = causal_mask_band(rows, self._ctx_size, window, self._device)
            self._masks[group] = {"window": window, "mask_band": mask}
        return AttentionSpec(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
            rope_layout=config.block.rope_layout,
            query_scale=self._query_scale,
            eps=config.rms_eps,
            cache_group=group,
            **self._masks[group],
            **self._rotation(window is not None, layer not in config.unrotated_layers),
        )

    def _rotation(self, windowed: bool, rotates: bool) -> dict[str, Any]:
        """Cosines and sines of layers with or without a window; of angle 0, which changes no bit, without rotation."""
        if (windowed, rotates) not in self._rotations:
            spec = self.config.rope(self._ctx_size, windowed)
            if rotates:
                cos, sin = rope_table(spec, self._ctx_size, self._device)
            else:
                cos = torch.ones(self._ctx_size, spec.dim // 2, device=self._device)
                sin = torch.zeros_like(cos)
            self._rotations[windowed, rotates] = {"cos": cos, "sin": sin}
        return self._rotations[windowed, rotates]


def _query_scale(config: ModelConfig, ctx_size: int, device: torch.device) -> Tensor | None:
    """The factor of the query at each position, fp32 [ctx_size] (Ministral 3), or None."""
    if not config.attention_temperature_scale:
        return None
    steps = torch.arange(ctx_size, dtype=torch.float64) // config.attention_temperature_length
    return (1.0 + config.attention_temperature_scale * torch.log1p(steps)).to(device, torch.float32)
