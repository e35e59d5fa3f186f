"""The `engine` program: the commands, the global flags, and what every kind of failure looks like.

Exit code 2 is also for too little memory, a full disk and a model's file that is truncated while it is in use. A
process that a signal ends before it can handle it has 128 plus the signal's number in a shell.
"""

import contextlib
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from quengine.cli import interrupts, process
from quengine.cli.command_table import COMMANDS, ExampleCommand, PanelGroup
from quengine.cli.progress import clear_before
from quengine.errors import EngineError, visible
from quengine.platform import collector, log_lines
from quengine.platform.out_of_memory import out_of_memory

CANNOT_RUN = 2
INTERNAL_ERROR = 3
INTERRUPTED = 130
READER_GONE = 141

EXIT_CODES = (
    "Exit codes: 0 success; 1 user error, or parity outside its budgets; 2 cannot run on this machine, or a kernel "
    f"fails its test; {INTERNAL_ERROR} a bug in the engine; {INTERRUPTED} on Ctrl-C, 143 on "
    f"SIGTERM; {READER_GONE} when the reader of the output goes away."
)

# The click that typer carries is its own in newer releases and the separate package in older ones; both
# derive BadParameter from UsageError from ClickException.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
ClickException: type[Exception] = typer.BadParameter.__mro__[2]

logger = logging.getLogger("quengine")

app = typer.Typer(
    name="engine",
    cls=PanelGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog=EXIT_CODES,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from quengine import __version__

        typer.echo(f"engine {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Log what is done; show tracebacks.")
    ] = False,
) -> None:
    """Run quantized GGUF language models as they are stored."""
    del version
    log_lines.set_up(verbose)
    for handler in logger.handlers:
        handler.addFilter(clear_before)
    warnings.showwarning = _show_warning


def register_commands(args: list[str]) -> None:
    """Give `app` the command that `args` name, whose file alone is imported then, or else all of them."""
    named = next((arg for arg in args if not arg.startswith("-")), None)
    present = {command.name for command in app.registered_commands}
    present |= {group.name for group in app.registered_groups}
    for name in [named] if named in COMMANDS else COMMANDS:
        if name not in present:
            entry = COMMANDS[name]
            file = import_module(f"quengine.cli.commands.{name}")
            made = getattr(file, entry.function)
            if isinstance(made, typer.Typer):
                app.add_typer(made, name=name, rich_help_panel=entry.panel)
                continue
            app.command(
                name,
                cls=getattr(file, "Command", ExampleCommand),
                help=_unwrapped(made),
                rich_help_panel=entry.panel,
            )(made)


def _unwrapped(command: Callable[..., None]) -> str:
    """A command's docstring with a line for each paragraph, which the help wraps itself."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(each.split()) for each in paragraphs)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Our own warnings are for the user; those of the libraries underneath only with -v."""
    del file, line
    ours = _is_ours(filename) or category.__module__.startswith("quengine")
    text = str(message) if ours else f"{filename}:{lineno}: {category.__name__}: {message}"
    logger.log(logging.WARNING if ours else logging.DEBUG, "%s", text)


def _is_ours(filename: str) -> bool:
    """Whether a file is one of the package's, and not of a library in an environment below a folder of its name."""
    rooms = (
        sys.modules.get(name) for name in ("quengine", "quengine.cli", "quengine.kernels", "quengine.models")
    )
    folders = [folder for room in rooms if room is not None for folder in room.__path__]
    return any(Path(filename).is_relative_to(folder) for folder in folders)


def _print_error(message: str, hint: str = "") -> None:
    line = " ".join(visible(message).split())
    label = "engine: error:"
    if sys.stderr.isatty() and "NO_COLOR" not in os.environ:
        label = f"\x1b[31m{label}\x1b[0m"
    with contextlib.suppress(OSError):  # standard error is closed: the exit code remains
        print(f"{label} {line}", file=sys.stderr)
        if hint:
            print(hint, file=sys.stderr)


def _usage_hint(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "engine"
    params: list[Any] = [] if context is None else context.command.params
    param, names = getattr(error, "param", None), ""
    if param is not None and param.name == "model":
        names = "`engine list --all` shows names of models. "
    elif "extra argument" in str(error) and any("-m" in each.opts for each in params):
        names = "A model is named with -m. "
    elif context is not None and context.command.name == "launch" and hasattr(error, "option_name"):
        names = "The agent's own options go after --. "
    elif (
        param is not None
        and param.name == "type"
        and context is not None
        and context.command.name == "quantize"
    ):
        names = "Write `engine quantize IN -o OUT --type MIX`. "
    return f"{names}Try `{command} --help`."


def _report(error: BaseException) -> int:
    """Says on standard error what went wrong, and returns the exit code for it."""
    verbose = logger.isEnabledFor(logging.DEBUG)
    if verbose and not isinstance(error, ClickException):
        import traceback

        traceback.print_exception(error)
    if isinstance(error, EngineError):
        _print_error(str(error))
        return error.exit_code
    if isinstance(error, UsageError):
        message: str = error.format_message()  # type: ignore[attr-defined]
        _print_error(message[:1].lower() + message[1:], _usage_hint(error))
        return EngineError.exit_code
    if isinstance(error, ClickException):
        _print_error(error.format_message())  # type: ignore[attr-defined]
        return EngineError.exit_code
    if (problem := out_of_memory(error)) is not None:
        _print_error(str(problem))
        return problem.exit_code
    if isinstance(error, OSError) and error.errno is not None:
        _print_error(_os_problem(error))
        return CANNOT_RUN
    name = type(error).__name__
    text = f"{name}: {error}" if str(error) else name
    _print_error(f"internal: {text}", "" if verbose else "Run with `engine -v ...` for the traceback.")
    return INTERNAL_ERROR


def _os_problem(error: OSError) -> str:
    """What the system refused, and of which file."""
    unwritten = process.output_error()
    if unwritten is not None:
        return f"cannot write to standard output: {unwritten.strerror}"
    if error.filename is None:
        return f"cannot read or write: {error.strerror}"
    name = str(error.filename)
    return f"{name if len(name) <= 200 else name[:200] + '...'}: {error.strerror}"


def run(args: list[str]) -> int:
    """Runs one command line (without the program's name) and returns the exit code."""
    logger.setLevel(logging.WARNING)
    try:
        if args[:1] == ["help"]:
            args = [*args[1:2], "--help"]
        register_commands(args)
        outcome = typer.main.get_command(app).main(args or ["--help"], "engine", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        process.drop(sys.stdout.fileno())
        return READER_GONE
    except SystemExit as stop:
        # typer itself turns a closed pipe into an exit.
        if isinstance(stop.__context__, BrokenPipeError):
            process.drop(sys.stdout.fileno())
            return READER_GONE
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except Exception as error:
        # After a signal the error is its consequence: a library has swallowed the interrupt, and fails for it.
        return interrupts.exit_code() or _report(error)
    return outcome if isinstance(outcome, int) else 0


def main() -> int:
    """The `engine` program, in a process of its own; `quengine.cli.__main__` starts it."""
    interrupts.install()
    collector.starting()
    process.open_streams()
    try:
        process.prepare(sys.argv[1:])
        code = run(sys.argv[1:])
        return interrupts.exit_code() or code  # also where a library swallowed the interrupt
    except KeyboardInterrupt:
        return INTERRUPTED
    except EngineError as error:
        return _report(error)
    finally:
        collector.ending()
        process.flush_streams()
        interrupts.finish()


if __name__ == "__main__":
    sys.exit(main())
