"""Names of tensors in a Hugging Face folder, by their GGUF names, as the layers or the architecture declare them.

Experts are stored one by one, as in released folders, or all of a layer in one tensor, as `transformers` holds them:
[E, 2F, H] with the gate's rows before those of up, and [E, H, F].
"""

from collections.abc import Collection

from quengine.models.architectures import DECLARED
from quengine.models.config import ModelConfig
from quengine.models.tensor_table import joined_specs, tensor_specs

PREFIXES = (
    ("model.", ""),
    ("language_model.model.", "language_model."),
    ("model.language_model.", ""),
    ("model.text_model.", ""),
    ("transformer.", ""),
    ("bert.", ""),
    ("roberta.", ""),
    ("backbone.", ""),
    ("", ""),
)
"""(body, head) of names: a text model; the text part of a model with vision as it was released, and as newer releases
of transformers save it; SmolVLM; OpenELM; BERT and RoBERTa with a head; Nemotron-H; a model without an output matrix,
which makes embeddings."""


class HFNames:
    """Names in a folder that holds the tensors `held` of a model of this configuration.

    prefix: one of PREFIXES; None: the one under which the folder has the last norm. output: name of the output matrix,
    which may exist even if it is tied to the embedding.
    """

    def __init__(
        self, config: ModelConfig, held: Collection[str], prefix: tuple[str, str] | None = None
    ) -> None:
        declared = DECLARED[config.architecture]
        self._modules, self._layers, self._held = declared.hf_modules, declared.hf_layers, held
        self._specs = {**tensor_specs(config), **joined_specs(config)}
        norm = self._usual_or_own(f"{config.output_norm}.weight")
        found = (prefix for prefix in PREFIXES if norm.format(body=prefix[0], head=prefix[1]) in held)
        # If no prefix fits, errors name the missing tensor as in a text model.
        self.body, self.head = prefix or next(found, PREFIXES[0])
        self.output = f"{self.head}lm_head.weight"

    def __call__(self, name: str) -> str:
        """The name of the tensor that GGUF calls `name`: the one that the architecture declares, or the usual one if
        only that is in the folder, as `transformers` 5 saves Mixtral under either."""
        if not name.startswith("blk."):
            return self._usual_or_own(name).format(body=self.body, head=self.head)
        _, layer, tensor = name.split(".", 2)
        return self._in_layer(layer, self._own(tensor), self._specs[name].hf)

    def of_expert(self, name: str, expert: int) -> str:
        """The name of one expert's matrix; GGUF calls that of all experts `name`."""
        _, layer, tensor = name.split(".", 2)
        own = self._own(tensor.replace("_exps.", ".{expert}."))
        return self._in_layer(layer, own, self._specs[name].hf_each).format(expert=expert)

    def of_stack(self, name: str, number: int) -> str:
        """The name of one matrix of a tensor outside of layers that GGUF files hold together as `name`."""
        return self._specs[name].hf_each.format(body=self.body, head=self.head, expert=number)

    def _own(self, tensor: str) -> str:
        """The name that the architecture declares for a tensor, with .weight or .bias; "": none."""
        whole, (module, _, kind) = self._modules.get(tensor, ""), tensor.rpartition(".")
        return f"{self._modules[module]}.{kind}" if not whole and module in self._modules else whole

    def _usual_or_own(self, name: str) -> str:
        """The name of a tensor outside of layers, with {body} or {head} filled in."""
        own = self._own(name)
        return f"{{body}}{own}" if own else self._specs[name].hf

    def _in_layer(self, layer: str, *candidates: str) -> str:
        found = [f"{self.body}{self._layers}{layer}.{candidate}" for candidate in candidates if candidate]
        return next((candidate for candidate in found if candidate in self._held), "".join(found[:1]))
