"""The report of `engine show`, for people and as JSON: what a model's header says, and where the model fits."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quengine.config import DEFAULT_CHUNK
from quengine.errors import CannotRunError
from quengine.kernels.kv.cache_types import CACHE_TYPES
from quengine.memory import CacheNeeds, DeviceMemory, choose_context, gib, workspace_bytes
from quengine.models.architectures import attentions_of, layers_of
from quengine.models.blocks.encoder import BidirectionalAttention
from quengine.models.config import ModelConfig
from quengine.models.gguf.errors import shown
from quengine.models.hub.projectors import find_projector
from quengine.models.model_summary import ModelSummary
from quengine.models.parameter_counts import count_text
from quengine.models.tensor_table import draft_note
from quengine.platform.machine import available_memory, cuda_devices


def devices_of(summary: ModelSummary) -> list[dict[str, Any]]:
    """Per device here: free bytes, bytes needed at the model's own context, the context that fits."""
    config = summary.config
    if config is None or not summary.tensors:
        return []
    named = [("cpu", available_memory())]
    # Importing torch takes a second, so its devices are listed only where there is a driver.
    if Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists():
        named += [(f"cuda:{device.index}", device.free_memory) for device in cuda_devices()]
    found = []
    for name, free in named:
        kind, problem = name.partition(":")[0], None
        needs = CacheNeeds(config, DEFAULT_CHUNK[kind])
        workspace = workspace_bytes(kind, config, summary.weight_bytes, DEFAULT_CHUNK[kind], 1)
        try:
            context = choose_context(needs, None, DeviceMemory(name, free, summary.weight_bytes, workspace))
        except CannotRunError as error:
            context, problem = 0, str(error)
        found.append(
            {
                "device": name,
                "free_bytes": free,
                "weight_bytes": summary.weight_bytes,
                "kv_cache_bytes": needs.cache_bytes(config.context_length),
                "state_bytes": needs.state_bytes,
                "context_that_fits": context,
                "problem": problem,
            }
        )
    return found


def lines_of(summary: ModelSummary, devices: list[dict[str, Any]], tensors: bool) -> list[str]:
    files = f", {len(summary.files)} files" if len(summary.files) > 1 else ""
    lines = [
        f"file          {summary.path}",
        f"format        {summary.file_format}, {gib(summary.nbytes)}{files}",
        f"name          {shown(summary.name) if summary.name else '(none)'}",
        f"architecture  {shown(summary.architecture)}",
    ]
    projector = find_projector(summary.path)
    if projector is not None:
        lines.append(f"images        {projector.name}")
    if summary.problem:
        lines.append(f"cannot run    {summary.problem}")
    if summary.tensors:
        bits = 8 * sum(row.nbytes for row in summary.computed) / max(1, summary.parameters)
        lines.append(f"parameters    {count_text(summary.parameters)}, {bits:.2f} bits a weight")
    if summary.config is not None:
        lines += _config_lines(summary.config)
        lines += _expert_lines(summary)
        lines += [f"note          {note}" for note in draft_note(summary.config, summary.drafts)]
    lines += [f"not with      {limit}" for limit in summary.limits()]
    lines += _device_lines(summary, devices)
    lines += _tokenizer_lines(summary)
    for name, text in summary.templates.items():
        lines.append(f"template      {shown(name)}, {len(text)} characters")
    if not summary.templates:
        lines.append("template      none")
    if summary.tensors:
        lines += ["", *_group_table(summary)]
    if tensors:
        lines += ["", *_tensor_table(summary)]
    return lines


def _config_lines(config: ModelConfig) -> list[str]:
    scaling = config.rope_scaling
    scaled = "" if scaling.kind == "none" else f", scaling {scaling.kind}"
    if scaling.kind in ("linear", "yarn"):
        scaled += f" x{scaling.factor:g} over {scaling.original_context_length}"
    base = config.rope_freq_base_swa
    local = "" if base is None else f"; base {base:g} in layers with a window"
    found = dict.fromkeys(trait for block in layers_of(config) for trait in block.traits)
    traits = [*found, *(["tied output"] if config.tied_output else [])]
    attentions = _attentions(config)
    windowed = sum(attention.window is not None for attention in attentions)
    heads, kv_heads, dims = (
        _range(getattr(attention, name) for attention in attentions)
        for name in ("heads", "kv_heads", "head_dim")
    )
    lengths = _range(config.sizes(layer).feed_forward_length for layer in range(config.block_count))
    window = f", sliding window {config.sliding_window}" if windowed else ""
    if 0 < windowed < config.block_count:
        window += f" in {windowed} of {config.block_count} layers"
    return [
        f"context       {config.context_length} tokens{window}",
        f"layers        {config.block_count} of width {config.embedding_length}, "
        f"feed-forward {lengths}{_mixers(config)}",
        f"attention     {heads} heads of {dims}, {kv_heads} key/value heads",
        f"rope          {config.rope_dim} of {config.head_dim} elements in {config.block.attention.rope_layout}, "
        f"base {config.rope_freq_base:g}{scaled}{local}"
        if config.encoder is None or config.encoder.rotates
        else f"positions     learned, {config.context_length}",
        *_encoder_lines(config),
        f"vocabulary    {config.vocab_size}" + (f"; {', '.join(traits)}" if traits else ""),
    ]


def _attentions(config: ModelConfig) -> Sequence[Any]:
    """The declared attentions of a decoder or an encoder, with their heads."""
    if config.encoder is None:
        return attentions_of(config)
    mixers = [block.mixer for block in layers_of(config)]
    return [mixer.causal if isinstance(mixer, BidirectionalAttention) else mixer for mixer in mixers]


def _encoder_lines(config: ModelConfig) -> list[str]:
    """What an encoder makes of a text's rows, or a decoder that ranks of a pair's."""
    if config.ranker is not None:
        return [f"rankings      a trained head of {config.ranker.classes} outputs, of the last position"]
    sizes = config.encoder
    if sizes is None:
        return []
    made = [f"pooling {config.pooling or 'mean'}"]
    made += [f"{rows} of {columns} by a matrix" for columns, rows in sizes.projections]
    made += [f"a trained head of {sizes.classes} outputs"] if sizes.classes else []
    made += [f"adapters for {', '.join(task.name for task in sizes.tasks)}"] if sizes.tasks else []
    return [f"embeddings    {', '.join(made)}"]


def _range(values: Iterable[int]) -> str:
    """What layers have of something: 12, or 12 to 20."""
    found = sorted(set(values))
    return f"{found[0]} to {found[-1]}" if len(found) > 1 else "".join(map(str, found))


def _mixers(config: ModelConfig) -> str:
    """The kinds of mixers and their numbers, where there are several."""
    counts = Counter(
        block.mixer.kind if block.mixer else "a feed-forward alone" for block in layers_of(config)
    )
    return "" if len(counts) == 1 else "; " + ", ".join(f"{n} with {kind}" for kind, n in counts.items())


def _expert_lines(summary: ModelSummary) -> list[str]:
    """Of a mixture of experts, with what a token is computed by and reads."""
    config, counts = summary.config, summary.counts
    if config is None or config.experts is None:
        return []
    experts, router = config.experts, config.experts.router
    shared = (
        f", and a shared one of {experts.shared_feed_forward_length}"
        if experts.shared_feed_forward_length
        else ""
    )
    without = len(experts.dense_layers)
    dense = f"; {without} layer{'s' * (without > 1)} without" if without else ""
    active = f"active        {count_text(counts.active_parameters)} parameters a token, {gib(counts.active_bytes)} read"
    return [
        f"experts       {experts.count} of {experts.feed_forward_length} a layer, {router.used} a token{shared}{dense}",
        *([active] if summary.tensors else []),
    ]


def _device_lines(summary: ModelSummary, devices: list[dict[str, Any]]) -> list[str]:
    config = summary.config
    if config is None or not summary.tensors:
        return []
    needs = CacheNeeds(config, DEFAULT_CHUNK["cpu"])
    cache = needs.cache_bytes(config.context_length)
    smaller = ""
    if smallest := [t for t in CACHE_TYPES if t != "f16" and needs.can_store(t)]:
        sizes = (f"{gib(needs.cache_bytes(1024, t))} with --cache-type {t}" for t in smallest)
        smaller = f" ({', '.join(sizes)})"
    lines = [
        f"memory        weights {gib(summary.weight_bytes)} + KV cache {gib(cache)} (fp16, "
        f"{config.context_length} tokens) = {gib(summary.weight_bytes + cache)}; "
        f"{gib(needs.cache_bytes(1024))} of cache for a context of 1024 tokens{smaller}"
    ]
    if needs.state_bytes:
        lines.append(
            f"state         {gib(needs.state_bytes)} a sequence of --parallel, whatever its length, and for each "
            "copy (--state-checkpoints; on a GPU also in host memory, --host-checkpoints)"
        )
    for device in devices:
        context = device["context_that_fits"]
        fits = (
            "the whole context fits" if context == config.context_length else f"a context of {context} fits"
        )
        verdict = "does not fit" if device["problem"] else fits
        lines.append(f"  {device['device']:<11} {gib(device['free_bytes'])} free: {verdict}")
    return lines


def _tokenizer_lines(summary: ModelSummary) -> list[str]:
    tokenizer = summary.tokenizer
    if summary.path.is_dir():
        held = (summary.path / "tokenizer.json").is_file()
        return [
            "tokenizer     tokenizer.json" if held else "tokenizer     none: the folder has no tokenizer.json"
        ]
    if tokenizer is None:
        return ["tokenizer     none in this file"]
    pre = f" ({shown(tokenizer.pre)})" if tokenizer.pre else ""
    merges = f", {tokenizer.merges} merges" if tokenizer.merges else ""
    lines = [f"tokenizer     {shown(tokenizer.model)}{pre}, {tokenizer.tokens} tokens{merges}"]
    if tokenizer.problem:
        lines.append(f"  damaged     {tokenizer.problem}")
    if tokenizer.special:
        lines.append(
            "  special     " + ", ".join(f"{k} {i} {t!r}" for k, (i, t) in tokenizer.special.items())
        )
    return lines


def _group_table(summary: ModelSummary) -> list[str]:
    groups = summary.groups()
    wide = max(len(shown(group.name)) for group in groups)
    lines = [f"{'TENSORS':{wide}}  {'TYPE':8} {'COUNT':>5} {'WEIGHTS':>9} {'SIZE':>12}"]
    for group in groups:
        name, weights, size = shown(group.name), count_text(group.parameters), gib(group.nbytes)
        lines.append(f"{name:{wide}}  {group.type:8} {group.count:5} {weights:>9} {size:>12}")
    return lines


def _tensor_table(summary: ModelSummary) -> list[str]:
    wide = max((len(shown(row.name)) for row in summary.tensors), default=6)
    lines = [f"{'TENSOR':{wide}}  {'TYPE':8} {'BYTES':>12}  SHAPE (rows first)"]
    for row in summary.tensors:
        lines.append(
            f"{shown(row.name):{wide}}  {row.type:8} {row.nbytes:12}  {' x '.join(map(str, row.shape))}"
        )
    return lines


def as_object(summary: ModelSummary, devices: list[dict[str, Any]], tensors: bool) -> dict[str, Any]:
    tokenizer = summary.tokenizer
    result: dict[str, Any] = {
        "path": str(summary.path),
        "files": [str(path) for path in summary.files],
        "format": summary.file_format,
        "name": summary.name,
        "architecture": summary.architecture,
        "problem": summary.problem,
        "limits": summary.limits(),
        "file_bytes": summary.nbytes,
        "projector": (found := find_projector(summary.path)) and str(found),
        "parameters": summary.parameters,
        "active_parameters": summary.counts.active_parameters,
        "active_bytes": summary.counts.active_bytes,
        "config": None if summary.config is None else asdict(summary.config),
        "weight_bytes": summary.weight_bytes,
        "devices": devices,
        "tensor_groups": [asdict(group) for group in summary.groups()],
        "tokenizer": None if tokenizer is None else {**asdict(tokenizer), "special": dict(tokenizer.special)},
        "templates": dict(summary.templates),
    }
    if tensors:
        result["tensors"] = [asdict(row) for row in summary.tensors]
    return result
