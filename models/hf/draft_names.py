"""Names of the tensors of the layer that drafts tokens in a Hugging Face folder (models/draft_layer.py)."""

from collections.abc import Collection

from quengine.models.architectures import ARCHITECTURES
from quengine.models.config import ModelConfig
from quengine.models.draft_layer import EH_PROJ, ENORM, HNORM, layer_config
from quengine.models.hf.hf_names import HFNames
from quengine.models.tensor_table import joined_specs, tensor_specs


class DraftLayerNames(HFNames):
    """Names of the draft layer's tensors in a folder that holds the tensors `held`."""

    def __init__(self, target: ModelConfig, held: Collection[str]) -> None:
        super().__init__(target, held)
        own, names = layer_config(target), ARCHITECTURES[target.architecture].draft_names
        assert names is not None
        self._specs = {**tensor_specs(own), **joined_specs(own)}
        self._number = target.block_count
        self._layer = self._whole(names.layer)
        of = {EH_PROJ: names.eh_proj, ENORM: names.enorm, HNORM: names.hnorm, "output_norm": names.head_norm}
        self._beside = {f"{ours}.weight": f"{self._whole(theirs)}.weight" for ours, theirs in of.items()}

    def __call__(self, name: str) -> str:
        return self._beside.get(name) or super().__call__(name)

    def _whole(self, name: str) -> str:
        """A declared name, with `model.` in front if the folder has it so."""
        found = name.format(body=self.body, number=self._number)
        under = any(each.startswith(f"model.{found}") for each in self._held)
        return f"model.{found}" if under else found

    def _in_layer(self, _layer: str, *candidates: str) -> str:
        found = [f"{self._layer}{candidate}" for candidate in candidates if candidate]
        return next((candidate for candidate in found if candidate in self._held), found[0])
