"""What tensors of a Hugging Face folder are called, by their GGUF names.

Experts are stored one by one, as released folders have them, or all of a layer in one tensor, as `transformers` holds
them: [E, 2F, H] with the gate's rows before those of up, and [E, H, F].
"""

from collections.abc import Collection, Mapping

from quengine.models.architectures.architecture import Architecture

TOP_MODULES: Mapping[str, str] = {
    "token_embd": "{body}embed_tokens",
    "output_norm": "{body}norm",
    "token_embd_norm": "{body}embedding_norm",
    "output": "{head}lm_head",
}
"""GGUF tensor (without .weight or .bias) -> module."""

LAYER_MODULES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate.{expert}": "mlp.experts.{expert}.gate_proj",
    "ffn_up.{expert}": "mlp.experts.{expert}.up_proj",
    "ffn_down.{expert}": "mlp.experts.{expert}.down_proj",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
"""The same of a layer, below {body}layers.{i}, or the whole name there of a tensor with .weight; architectures declare
others. Tensors of one expert have a number."""

PREFIXES = (
    ("model.", ""),
    ("language_model.model.", "language_model."),
    ("model.language_model.", ""),
    ("", ""),
)
"""(body, head) of names: a text model; the text part of a model with vision as it was released, and as newer releases
of transformers save it; a model without an output matrix, which makes embeddings."""


class HFNames:
    """Names in a folder that holds the tensors `held`, of a model of the architecture `declared`."""

    def __init__(self, declared: Architecture, held: Collection[str]) -> None:
        self.body, self.head = prefix(held)
        self._declared, self._held = declared.hf_modules, held

    def __call__(self, name: str) -> str:
        """The name of the tensor that GGUF calls `name`.

        That which the architecture declares, or where a folder lacks it and has that of most architectures, the latter:
        `transformers` 5 saves Mixtral under either.
        """
        if not name.startswith("blk."):
            tensor, kind = name.split(".")
            return f"{TOP_MODULES[tensor].format(body=self.body, head=self.head)}.{kind}"
        _, layer, tensor, *rest = name.split(".")
        if not rest:
            return f"{self.body}layers.{layer}.{self._declared[tensor]}"
        *expert, kind = rest
        key = f"{tensor}.{{expert}}" if expert else tensor
        found = [
            self._in_layer(modules, layer, key, kind, *expert)
            for modules in (self._declared, LAYER_MODULES)
            if key in modules or f"{key}.{kind}" in modules
        ]
        return next((candidate for candidate in found if candidate in self._held), found[0])

    def _in_layer(self, modules: Mapping[str, str], layer: str, key: str, kind: str, expert: str = "") -> str:
        whole = modules.get(f"{key}.{kind}")
        name = f"{modules[key]}.{kind}" if whole is None else whole
        return f"{self.body}layers.{layer}.{name.format(expert=expert)}"


def prefix(held: Collection[str]) -> tuple[str, str]:
    """Which of PREFIXES the names `held` have; where none, the missing tensor is named as a text model's."""
    modules = [TOP_MODULES[name] for name in ("output_norm", "token_embd_norm")]
    names = ((found, [f"{module.format(body=found[0])}.weight" for module in modules]) for found in PREFIXES)
    return next((found for found, norms in names if any(name in held for name in norms)), PREFIXES[0])
