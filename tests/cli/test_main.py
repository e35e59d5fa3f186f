"""What the program does around every command: exit codes, one-line errors, quick start."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import typer

from quengine.cli import main
from quengine.cli.command_table import COMMANDS
from quengine.errors import CannotRunError, EngineError
from quengine.foreign_flags import FOREIGN

RUN = "import sys; from quengine.cli.main import run; sys.exit(run(sys.argv[1:]))"


@pytest.fixture
def program(monkeypatch):
    """The real program with one more command, `try`, that does what the test says."""
    registered = list(main.app.registered_commands)
    monkeypatch.setattr(main.app, "registered_commands", registered)

    def program(action, *args):
        registered[:] = [command for command in registered if command.name != "try"]
        main.app.command("try")(lambda: action())
        return main.run([*args, "try"])

    return program


def raising(error):
    def action():
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "exit_code", "shown"),
    [
        (EngineError("no such file: x.gguf"), 1, "engine: error: no such file: x.gguf"),
        (CannotRunError("no CUDA device"), 2, "engine: error: no CUDA device"),
        (EngineError("two\nlines"), 1, "engine: error: two lines"),
        (
            MemoryError(),
            2,
            "engine: error: not enough memory; lower -c or --parallel, choose a smaller model or quant type, or end "
            "what else uses memory",
        ),
        (typer.BadParameter("must be even"), 1, "engine: error: invalid value: must be even"),
    ],
)
def test_an_error_for_the_user_is_one_line_with_its_exit_code(program, capsys, error, exit_code, shown):
    assert program(raising(error)) == exit_code
    assert capsys.readouterr().err.splitlines()[0] == shown


def test_an_engine_error_is_nothing_but_that_line(program, capsys):
    program(raising(EngineError("no such file")))
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "engine: error: no such file\n")


def test_a_bug_is_one_line_and_says_how_to_see_more(program, capsys):
    assert program(raising(KeyError("blk.0"))) == 3
    line, hint = capsys.readouterr().err.splitlines()
    assert line == "engine: error: internal: KeyError: 'blk.0'"
    assert "engine -v" in hint


def test_verbose_shows_the_traceback_of_a_bug_and_of_an_error(program, capsys):
    assert program(raising(KeyError("blk.0")), "-v") == 3
    assert "Traceback" in capsys.readouterr().err
    assert program(raising(EngineError("no such file")), "--verbose") == 1
    captured = capsys.readouterr().err
    assert "Traceback" in captured
    assert captured.endswith("engine: error: no such file\n")


def test_ctrl_c_is_130_without_a_word(program, capsys):
    assert program(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""


def test_an_exit_code_that_a_command_chose_is_kept(program):
    assert program(raising(typer.Exit(2))) == 2
    assert program(raising(SystemExit(1))) == 1
    assert program(lambda: None) == 0


def test_our_warnings_are_one_line_and_those_of_libraries_wait_for_verbose(program, capsys):
    class ModelWarning(UserWarning):
        __module__ = "quengine.models.config"

    def warn():
        warnings.warn("unknown tensor x", ModelWarning, stacklevel=1)
        warnings.warn("numpy is getting old", UserWarning, stacklevel=1)
        warnings.warn_explicit("so is torch", UserWarning, "/home/me/quengine/.venv/lib/torch/x.py", 1)
        warnings.warn_explicit("the file is old", UserWarning, main.__file__, 1)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        program(warn)
    assert capsys.readouterr().err.splitlines() == [
        "engine: warning: unknown tensor x",
        "engine: warning: the file is old",
    ]


@pytest.mark.parametrize(
    ("args", "says", "hint"),
    [
        (["--nope"], "no such option: --nope", "Try `engine --help`."),
        (["nope"], "no such command 'nope'", "Try `engine --help`."),
        (["pull"], "NAME...", "Try `engine pull --help`."),
        (["list", "--jsonn"], "no such option: --jsonn", "Try `engine list --help`."),
        (["doctor", "--threads", "zero"], "'-t' / '--threads'", "Try `engine doctor --help`."),
        (["doctor", "--threads", "0"], "'-t' / '--threads'", "Try `engine doctor --help`."),
    ],
)
def test_a_wrong_command_line_is_a_user_error_with_a_hint(capsys, args, says, hint):
    assert main.run(args) == 1
    line, second = capsys.readouterr().err.splitlines()
    assert line.startswith("engine: error: ")
    assert says in line
    assert second == hint


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            "generate -ngl 99 -fa on --jinja -ngl 1 -m x p",
            "-ngl (all layers are on the --device; cpu for none, "
            "--n-cpu-moe for experts); -fa (always on); --jinja (always on)",
        ),
        ("serve --max-model-len=4096 -m x", "--max-model-len (-c N)"),
        ("serve --mmproj-url y -fa on -m x", f"--mmproj-url ({FOREIGN['--mmproj-url']})"),
        ("serve -ngl=0 -m x", "-ngl (all layers are on the --device; cpu for none, --n-cpu-moe for experts)"),
        ("chat -hf user/repo", "-hf (-m hf:user/repo:QUANT or hf:user/repo/file.gguf)"),
        ("run x --format json p", "--format (--json-schema {} for any JSON)"),
        ("run x -v why", "-v (before the command: engine -v ...)"),
    ],
)
def test_flags_of_other_programs_are_answered_with_what_is_written_here(capsys, args, says):
    assert main.run(args.split()) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"engine: error: no such option: {says}"


@pytest.mark.parametrize(
    "flags",
    ["--jinja", "-fa on", "-fa", "--flash-attn=auto", "-ngl 99", "-ngl all", "--n-gpu-layers=-1", "-cb"],
)
def test_serve_passes_over_flags_that_ask_for_what_is_so_anyhow(capsys, flags):
    assert main.run(["serve", *flags.split(), "-m", "/nope"]) == 1
    note, error = capsys.readouterr().err.splitlines()
    name = flags.partition(" ")[0].partition("=")[0]
    assert note.startswith(f"engine: warning: without effect here: {name} (")
    assert "/nope: no such file" in error


HELPS = [[name] for name in COMMANDS] + [["kernels", "build"], ["kernels", "install"], []]


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("command", HELPS, ids=" ".join)
def test_help_shows_every_name_whole(capsys, monkeypatch, command, width):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main.run([*command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "\u2026" not in shown and max(map(len, shown.splitlines())) <= max(width, 120)
    if command == ["serve"]:
        for name in ("--sleep-idle-seconds", "--no-confine-commands", "--draft-max", "--max-inputs"):
            assert name in shown


@pytest.mark.parametrize(
    "args", ["generate --stop -ngl -m /nope p", "generate -m /nope -- -ngl", "bench -b 1 -m /nope"]
)
def test_a_value_a_prompt_and_a_flag_of_the_command_are_none_of_these(capsys, args):
    assert main.run(args.split()) == 1
    assert "/nope: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "rule"),
    [
        ("-n", "-2", "must be from 0 to 2147483647, or -1"),
        ("-s", "-7", "must be from 0 to 18446744073709551615, or -1"),
        ("-c", "-1", "must be at least 1, or 0"),
    ],
)
def test_the_number_that_stands_for_the_default_is_part_of_the_rule(flag, value, rule, capsys):
    assert main.run(["generate", "-m", "x", flag, value, "p"]) == 1
    assert capsys.readouterr().err == f"engine: error: {flag} {value}: {rule}\n"


def own_flags() -> set[str]:
    """The flags of all commands."""
    main.register_commands([])
    group = typer.main.get_command(main.app)
    return {
        flag
        for command in group.commands.values()
        for each in (command, *getattr(command, "commands", {}).values())
        for parameter in each.params
        for flag in (*parameter.opts, *parameter.secondary_opts)
    }


def test_what_is_written_instead_names_flags_that_there_are():
    named = {
        flag for text in FOREIGN.values() for flag in re.findall(r"(?<![^\s/])--?[a-z][a-z-]*(?![\w-])", text)
    }
    assert len(named) > 30
    assert named - own_flags() - {"-v", "--help", "--install-completion"} == set()


def peer_flags() -> dict[str, set[str]]:
    """The flags of each other program, by its name."""
    flags: dict[str, set[str]] = {}
    program = ""
    for line in Path(__file__).with_name("peer_flags.txt").read_text().splitlines():
        if line.startswith("["):
            program = line.strip("[]")
        elif not line.startswith("#"):
            flags.setdefault(program, set()).update(line.split())
    return {program: found for program, found in flags.items() if found}


@pytest.mark.parametrize("program", ["llama.cpp", "ollama", "vllm", "mlx-lm"])
def test_every_flag_of_another_program_is_taken_or_answered(program):
    known = own_flags() | FOREIGN.keys() | {"-h", "--help", "--version"}
    assert len(peer_flags()[program]) > 20
    assert peer_flags()[program] - known == set()


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench"])
def test_each_is_answered_on_the_command_line(command, capsys):
    own = own_flags()
    for flag in ("--num-ctx", "-mu", "--trust-remote-code", "-lv", "--rope-freq-base", "--mmproj-url"):
        assert flag not in own
        assert main.run([command, "-m", "x", flag, "1"]) == 1
        assert capsys.readouterr().err == f"engine: error: no such option: {flag} ({FOREIGN[flag]})\n"


def test_a_model_that_is_not_named_by_its_flag_gets_that_hint(capsys):
    assert main.run(["bench", "smollm2-135m"]) == 1
    assert capsys.readouterr().err.splitlines()[1] == "A model is named with -m. Try `engine bench --help`."


@pytest.mark.parametrize("command", [["merge"], ["kernels", "install"], ["generate"]], ids=" ".join)
def test_the_help_has_arguments_before_options(capsys, command):
    assert main.run([*command, "--help"]) == 0
    before, _, after = capsys.readouterr().out.partition("\nOptions:\n")
    arguments, name = before.partition("\nArguments:\n  ")[2], {"merge": "MODEL ", "kernels": "PACK "}
    assert arguments.startswith(name.get(command[0], "[PROMPT] ")) and "Arguments:" not in after


def test_the_help_of_a_command_without_arguments_has_no_heading_for_them(capsys):
    assert main.run(["ps", "--help"]) == 0
    assert "Arguments" not in capsys.readouterr().out


def test_the_help_wraps_its_paragraphs_itself(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main.run(["pull", "--help"]) == 0
    assert (
        "their digests are checked. A model's projector\n  (mmproj) comes with it" in capsys.readouterr().out
    )


def test_the_documents_have_every_exit_code():
    page = Path(__file__).parents[2] / "docs" / "command-line.md"
    codes = [int(code) for code in re.findall(r"^- (\d+): ", page.read_text(), re.MULTILINE)]
    named = [0, 1, main.CANNOT_RUN, main.INTERNAL_ERROR, main.INTERRUPTED, main.READER_GONE]
    assert codes == named


def test_no_arguments_show_the_help(capsys):
    assert main.run([]) == 0
    assert "Usage: engine" in capsys.readouterr().out


def test_version_is_that_of_the_package(capsys):
    from importlib.metadata import version

    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"engine {version('quengine')}"


def test_every_command_is_there_and_explains_itself_and_its_exit_codes(capsys):
    assert main.run(["--help"]) == 0
    text = capsys.readouterr().out
    for command in main.COMMANDS:
        assert f" {command} " in text
    assert "130 on Ctrl-C" in " ".join(text.split())
    for command in main.COMMANDS:
        assert main.run([command, "--help"]) == 0
        shown = capsys.readouterr().out
        assert (
            f"Usage: engine {command}" in shown and f"\n  engine {command}" in shown.partition("Examples")[2]
        )


def test_help_and_list_load_neither_torch_nor_numba_nor_the_hub_client():
    heavy = (
        "torch",
        "numba",
        "triton",
        "tokenizers",
        "httpx",
        "httpx2",
        "transformers",
        "jinja2",
        "gguf",
        "rich",
    )
    code = (
        "import sys; from quengine.cli.main import run; run(sys.argv[1:]);"
        f"print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)"
    )
    helps = [["--help"], ["generate", "--help"], ["pull", "--help"]]
    for args in (*helps, ["list", "--all"], ["list", "nope"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=240
        )
        assert done.stderr.splitlines()[-1] == "[]", args


def test_a_command_loads_its_own_file_and_an_unknown_one_all() -> None:
    code = (
        "import sys; from quengine.cli.main import run; run(sys.argv[1:]);"
        "print(*sorted(name for name in sys.modules if name.startswith('quengine.cli.commands.')), file=sys.stderr)"
    )
    every = set(main.COMMANDS)
    for args, names in ((["-v", "rm", "--help"], {"rm"}), (["nothing"], every)):
        done = subprocess.run(
            [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=240
        )
        loaded = done.stderr.splitlines()[-1].split()
        assert {name.rpartition(".")[2] for name in loaded} == names


@pytest.mark.parametrize("args", [["--help"], ["list", "--all"]])
def test_a_reader_that_goes_away_is_quiet(args):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", RUN, *args], stdout=write, stderr=subprocess.PIPE, timeout=240
    )
    os.close(write)
    assert done.stderr == b""
    assert done.returncode == main.READER_GONE


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("chat --model smollm2-135", ["smollm2-135m"]),
        ("run smollm2-135", ["smollm2-135m"]),
        ("serve --device c", ["cpu", "cuda"]),
        ("generate --cache-type ", ["f16", "q8_0", "q4_0"]),
        ("chat --reasoning-format d", ["deepseek"]),
    ],
)
def test_completion_offers_models_devices_and_choices(typed, offered, monkeypatch, capsys):
    """In this process, what the shells' scripts ask for: a value a line."""
    monkeypatch.setenv("_ENGINE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"engine {typed}")
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split(" "))))
    assert main.run([]) == 0
    lines = capsys.readouterr().out.split()
    assert [line for line in lines if not line.startswith("cuda:")] == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_offers_the_commands(shell):
    variables = {"bash": {"COMP_WORDS": "engine pu", "COMP_CWORD": "1"}}
    typed = variables.get(
        shell, {"_TYPER_COMPLETE_ARGS": "engine pu", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    )
    env = {**os.environ, "_ENGINE_COMPLETE": f"complete_{shell}", **typed}
    done = subprocess.run([sys.executable, "-c", RUN], env=env, capture_output=True, text=True, timeout=240)
    assert "pull" in done.stdout
