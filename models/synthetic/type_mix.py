"""The type of each tensor of a synthetic model, after llama.cpp's quantizer (`llama-quant.cpp`)."""

from quengine.models.blocks.block import Shape
from quengine.models.synthetic.presets import MXFP4_MOE, Q4_K_M, SyntheticModel

_FLOAT = (".bias", "ffn_gate_inp.weight", "shortconv.conv.weight", "ssm_conv1d.weight")


def tensor_type(spec: SyntheticModel, name: str, shape: Shape) -> str:
    """Vectors, biases, routers and convolutions are F32, other matrices `spec.quant` or what the mix of that name says.

    Q4_K_M: Q4_K, but Q6_K for the output matrix, and for attn_v and every kind of ffn_down in the first and last eighth
    of the layers and every third between; Q5_K for attn_qkv. A model of exactly 8 experts has Q8_0 for attn_k and
    attn_v, Q5_K for attn_output. MXFP4_MOE: MXFP4 for the experts, Q8_0 for all else.
    """
    if len(shape) == 1 or name.endswith(_FLOAT):
        return "F32"
    if spec.quant == MXFP4_MOE:
        return "MXFP4" if len(shape) == 3 else "Q8_0"
    return spec.quant if spec.quant != Q4_K_M else _of_q4_k_m(spec, name)


def _of_q4_k_m(spec: SyntheticModel, name: str) -> str:
    if name == "output.weight" or (name == "token_embd.weight" and spec.tied_output):
        return "Q6_K"
    experts = spec.config().experts
    if experts is not None and experts.count == 8:
        if name.endswith(("attn_k.weight", "attn_v.weight")):
            return "Q8_0"
        if name.endswith("attn_output.weight"):
            return "Q5_K"
    if name.endswith("attn_qkv.weight"):
        return "Q5_K"
    if name.endswith("attn_v.weight") or ".ffn_down" in name:
        layer, count = int(name.split(".")[1]), spec.block_count
        eighth = count // 8
        if layer < eighth or layer >= 7 * count // 8 or (layer - eighth) % 3 == 2:
            return "Q6_K"
    return "Q4_K"
