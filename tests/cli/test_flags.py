"""Flags made from the fields of dataclasses: what a command line turns into."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from quengine.cli import main
from quengine.cli.command_table import PanelCommand
from quengine.cli.flags import takes_options
from quengine.options import Flag, Only


@dataclass(frozen=True)
class Inner:
    top: Annotated[float, Flag("--top", "Keep the top.")] = 0.5
    low: Annotated[int, Flag("--low", "Drop the low.")] = 3


@dataclass(frozen=True)
class Group:
    count: Annotated[int | None, Flag("-n --count --n-count", "How many; -1: all.", none=-1)] = None
    names: Annotated[tuple[str, ...], Flag("--name", "Repeatable.")] = ("default",)
    files: Annotated[tuple[Path, ...], Flag("--file", "Repeatable.", metavar="FILE")] = ()
    sizes: Annotated[
        tuple[int, ...], Flag("--size", "Repeatable.", read=lambda texts: tuple(map(int, texts)))
    ] = (1,)
    kind: Annotated[Literal["f16", "q8_0"], Flag("--kind", "A kind.", "How it runs")] = "f16"
    mapped: Annotated[bool, Flag("--map/--no-map", "Map it.")] = True
    hidden: int = 7
    inner: Annotated[Inner, Only("top")] = field(default_factory=Inner)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `engine try` with flags; the exit code and what the command was called with."""
    calls: list[tuple[Any, ...]] = []

    @takes_options
    def command(
        model: Annotated[str, Flag("-m --model", "A model.")], group: Group, place: str = "here"
    ) -> None:
        """Try it."""
        calls.append((model, group, place))

    monkeypatch.setattr(main.app, "registered_commands", [])
    main.app.command("try", cls=PanelCommand)(command)

    def run(*flags: str) -> tuple[int, tuple[Any, ...] | None]:
        return main.run(["try", *flags]), calls.pop() if calls else None

    return run


def test_without_flags_every_field_has_its_default(run: Any) -> None:
    assert run("-m", "x") == (0, ("x", Group(), "here"))


@pytest.mark.parametrize(
    ("flags", "group"),
    [
        (["-n", "4"], Group(count=4)),
        (["--n-count", "-1"], Group(count=None)),
        (["--name", "a", "--name", "b"], Group(names=("a", "b"))),
        (["--file", "a b"], Group(files=(Path("a b"),))),
        (["--size", "2", "--size", "3"], Group(sizes=(2, 3))),
        (["--kind", "q8_0", "--no-map"], Group(kind="q8_0", mapped=False)),
        (["--top", "0.25"], Group(inner=Inner(top=0.25))),
    ],
)
def test_a_flag_sets_its_field(run: Any, flags: list[str], group: Group) -> None:
    assert run("--model", "x", *flags) == (0, ("x", group, "here"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kind", "q4"], "--kind 'q4': must be f16 or q8_0"),
        (["--low", "1"], "No such option: --low"),
        (["--hidden", "1"], "No such option: --hidden"),
        (["-n", "many"], "'many' is not a valid int"),
    ],
)
def test_a_wrong_flag_is_one_line(
    run: Any, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("-m", "x", *flags) == (1, None)
    assert message.lower() in capsys.readouterr().err.lower()


def test_help_shows_spelling_default_and_panel(
    run: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert run("--help") == (0, None)
    shown = " ".join(capsys.readouterr().out.split())
    for part in (
        "-n, --count, --n-count",
        "How many; -1: all. [default: -1]",
        "How it runs",
        "FILE",
        "--no-map",
    ):
        assert part in shown
    assert "--low" not in shown and "hidden" not in shown


def test_a_missing_model_is_a_usage_error(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == (1, None)
    assert "--model" in capsys.readouterr().err
