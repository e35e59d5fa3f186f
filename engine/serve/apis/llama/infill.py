"""POST /infill, llama-server's."""

from collections.abc import Sequence

from quengine.serve.apis.llama.native import NativeForm, native_form
from quengine.serve.apis.llama.requests import ExtraFile, InfillRequest
from quengine.serve.models.model_host import ModelHost
from quengine.serve.processes.shared_model import ServedModel
from quengine.serve.routes.gaps import gap_marks, gap_parts

_SNIPPET = "\n\n--- snippet ---\n\n"
"""Before each file in models without FIM_SEP."""


async def infill(host: ModelHost, body: InfillRequest) -> NativeForm:
    """Fill the gap in a text."""
    marks = gap_marks(host.model, 501)
    extra = _extra_parts(host.model, body.input_extra) if body.input_extra else []
    prompt = gap_parts(marks, extra, body.input_prefix + body.prompt, body.input_suffix)
    return await native_form(host, body, [prompt], parse_special=False)


def _extra_parts(model: ServedModel, files: Sequence[ExtraFile]) -> list[str | int]:
    repository, separator = model.fim_id("fim_rep"), model.fim_id("fim_sep")
    parts: list[str | int] = [] if repository is None else [repository, "myproject\n"]
    for file in files:
        parts += [_SNIPPET] if separator is None else [separator, f"{file.filename}\n"]
        parts.append(file.text)
    return parts if separator is None else [*parts, separator, "filename\n"]
