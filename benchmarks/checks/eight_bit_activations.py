"""What rounding the activations of every projection to 8 bits does to a model: the error of `--fast-batch`, if it were.

    python -m benchmarks.checks.eight_bit_activations [-m smollm2-135m] [--tokens 512] [--chunks 3] [--json FILE]
    python -m benchmarks.checks.eight_bit_activations --synthetic mistral-7b-2l --tokens 128 --chunks 1

The model is computed by the definition in float64, once as it is and once with each form of rounding, of all inputs of
matrices, the output's included; nothing else is rounded. Forms have one scale for a row of activations, or for each
group of 128 or 32. "2 x int8" is the sum of two such integers, the second of what the first leaves. Texts are licences
and documentation that come with Python and its packages; a synthetic model gets random tokens.

Printed for each form: the NMSE of a row of a product on the same input (median, p99 over rows and matrices), of a
position's logits (median, p99), KL(exact || rounded) in nats, and the perplexity.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quengine.diagnostics.harness import nmse_rows, percentile
from quengine.kernels.reference import ReferenceBackend, ReferenceWeight
from quengine.llm import LLM
from quengine.models.synthetic.synthetic import write_synthetic

LIMIT = 1e-5
"""Median NMSE of logits that a faster form may have."""


def int8(groups: Tensor) -> Tensor:
    """The last dimension in integers of one scale, values again."""
    scale = groups.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, torch.round(groups / scale) * scale, 0.0)


def e4m3(groups: Tensor) -> Tensor:
    """The last dimension in e4m3, scaled so that its largest value is e4m3's."""
    scale = groups.abs().amax(-1, keepdim=True) / 448
    rounded = (groups / scale).float().to(torch.float8_e4m3fn).to(groups.dtype)
    return torch.where(scale > 0, rounded * scale, 0.0)


def twice(groups: Tensor) -> Tensor:
    first = int8(groups)
    return first + int8(groups - first)


def fp16(row: Tensor) -> Tensor:
    """What prompts and batches on a GPU round to: fp16 by row, with a power of two in front."""
    scale = torch.exp2(torch.floor(torch.log2(row.abs().amax(-1, keepdim=True))) - 14)
    return (row / scale).half().to(row.dtype) * scale


Form = Callable[[Tensor], Tensor]
FORMS: dict[str, tuple[Form, int]] = {
    "fp16, row": (fp16, 0),
    "int8, row": (int8, 0),
    "int8, 128": (int8, 128),
    "int8, 32": (int8, 32),
    "e4m3, row": (e4m3, 0),
    "e4m3, 128": (e4m3, 128),
    "e4m3, 32": (e4m3, 32),
    "2 x int8, row": (twice, 0),
    "2 x int8, 32": (twice, 32),
}
"""Each with the columns of a group; 0: all of a row."""


@contextmanager
def rounding(
    backend: ReferenceBackend, form: Form, group: int, errors: list[Tensor] | None
) -> Iterator[None]:
    """Inputs of matrices are rounded. errors: takes the NMSE of each row of each product on its own input."""
    exact = backend._matmul

    def rounded(x: Tensor, weight: ReferenceWeight) -> Tensor:
        width = group if group and x.shape[1] % group == 0 else x.shape[1]
        y = exact(form(x.unflatten(1, (-1, width))).flatten(1), weight)
        if errors is not None:
            plain = exact(x, weight)
            errors.append(nmse_rows(plain, y, plain))
        return y

    backend._matmul = rounded  # type: ignore[method-assign]
    try:
        yield
    finally:
        del backend._matmul


def texts() -> Iterator[str]:
    """Licences and documentation."""
    topics = __import__("pydoc_data.topics", fromlist=["topics"]).topics
    yield topics["exprlists"] + topics["with"] + topics["assignment"]
    yield str(metadata.distribution("numpy").read_text("METADATA"))
    yield topics["string-methods"]
    yield str(metadata.distribution("torch").read_text("METADATA"))[4000:]


def prompts(llm: LLM, given: argparse.Namespace) -> Iterator[list[int]]:
    for number, text in enumerate(texts()):
        if number == given.chunks:
            return
        if given.synthetic:
            draw = random.Random(number)
            yield [draw.randrange(llm.model_config.vocab_size) for _ in range(given.tokens)]
        else:
            yield llm.encode(text)[: given.tokens]


def differences(exact: Tensor, rounded: Tensor, ids: list[int]) -> dict[str, Tensor]:
    """Of each position."""
    a, b = torch.log_softmax(exact.double(), 1), torch.log_softmax(rounded.double(), 1)
    following = torch.tensor(ids[1:])[:, None]
    return {
        "nmse": nmse_rows(exact, rounded, exact),
        "kl": (a.exp() * (a - b)).sum(1).clamp(min=0),
        "nll": -b[:-1].gather(1, following).flatten(),
        "exact_nll": -a[:-1].gather(1, following).flatten(),
        "top1": (a.argmax(1) == b.argmax(1)).double(),
    }


def measured(llm: LLM, given: argparse.Namespace) -> dict[str, dict[str, float]]:
    backend = llm.loaded.decoder.backend
    assert isinstance(backend, ReferenceBackend)
    parts: dict[str, dict[str, list[Tensor]]] = {name: {} for name in FORMS}
    for number, ids in enumerate(prompts(llm, given)):
        exact = llm.logits(ids)
        for name, (form, group) in FORMS.items():
            errors = list[Tensor]() if number == 0 else None
            with rounding(backend, form, group, errors):
                found = differences(exact, llm.logits(ids), ids)
            for key, values in found.items():
                parts[name].setdefault(key, []).append(values)
            if errors is not None:
                parts[name]["product"] = errors
        print(f"text {number + 1}: {len(ids)} tokens", file=sys.stderr, flush=True)
    return {name: row({key: torch.cat(values) for key, values in of.items()}) for name, of in parts.items()}


def row(of: dict[str, Tensor]) -> dict[str, float]:
    return {
        "product": percentile(of["product"], 50),
        "product p99": percentile(of["product"], 99),
        "logits": percentile(of["nmse"], 50),
        "logits p99": percentile(of["nmse"], 99),
        "KL": float(of["kl"].mean()),
        "KL p99": percentile(of["kl"], 99),
        "KL max": float(of["kl"].max()),
        "top-1": float(of["top1"].mean()),
        "perplexity": float(of["nll"].mean().exp()),
        "exact": float(of["exact_nll"].mean().exp()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--synthetic", help="a synthetic model instead")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    options: dict[str, Any] = {"device": "cpu", "backend": "reference", "ctx_size": given.tokens + 1}
    with tempfile.TemporaryDirectory() as folder:
        model = given.model
        if given.synthetic:
            model = Path(folder) / "model.gguf"
            write_synthetic(model, given.synthetic)
        with LLM(model, **options) as llm:
            found = measured(llm, given)
    columns = list(next(iter(found.values())))
    print(f"{'form':14}", *(f"{column:>11}" for column in columns), " within 1e-5")
    for name, of in found.items():
        within = "yes" if of["logits"] <= LIMIT else "no"
        print(f"{name:14}", *(f"{of[column]:11.3g}" for column in columns), f" {within}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
