"""A plugin of pytest that lets llama-server's tests run with models of another text, and writes down how each went.

What asserts the text or the token counts of their models (stories260K and others) takes any text and any count.
"""

import json
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

_OF_A_CONSTRAINT = ('"42"', "[ -3000 ]", '"foooooo"', "(\\{|John)+", "a{5,5}")
"""What is matched with text that a grammar or a schema decides."""
_COUNTS = ("n_prompt", "n_tokens")
_results: dict[str, list[str]] = {}


class AnyCount(int):
    """Equal to every number above 0."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and other > 0

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    sys.modules.setdefault("wget", types.ModuleType("wget"))
    import utils

    matched = utils.match_regex
    utils.match_regex = lambda regex, text: (
        matched(regex, text) if regex in _OF_A_CONSTRAINT else isinstance(text, str)
    )
    utils.download_file = _local_name
    utils.ServerPreset.load_all = staticmethod(lambda: None)


def _local_name(url: str, output_file_path: str | None = None) -> str:
    """In place of a download: the shim has models of its own for what is asked for."""
    return output_file_path or url


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        for name in _COUNTS:
            if isinstance(params.get(name), int):
                params[name] = AnyCount()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Anything but a pass wins over it, so that an error of the set-up is none."""
    name = re.sub(r"^.*?unit/", "", report.nodeid)
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        _results[name] = [report.outcome, crash.message.splitlines()[0][:200] if crash else ""]
        Path(os.environ["SUITE_RESULTS"]).write_text(json.dumps(_results, indent=0))
