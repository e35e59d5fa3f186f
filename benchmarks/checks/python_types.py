"""What type checkers say of scripts that use quengine, after `pip install -e .` into a new virtual environment.

    python -m benchmarks.checks.python_types

Runs mypy, and basedpyright where it is installed, on a script with known faults, and mypy on examples/. Takes a minute;
pip fetches setuptools. Exits with 1 where an error is missing or another one is there.
"""

import re
import subprocess
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = """
from quengine import LLM, AsyncLLM, ConstraintSpec, SamplingParams

with LLM("m", ctx_size=2048, parallel=2) as llm:
    text: str = llm.generate("a", SamplingParams(max_tokens=3))[0].text
    logprob: float = llm.score("a", ["b"])[0].logprob
    names: list[str] = [call.name for call in llm.chat([{"role": "user", "content": "a"}]).tool_calls]
    value: float = llm.perplexity("a b").perplexity.value
    wrong: int = llm.decode([1])  # error
LLM("m", n_ctx=3)  # error
LLM("m", ctx_size="3")  # error
LLM("m", cache_type="f8")  # error
SamplingParams(temperature="hot")  # error
SamplingParams(logits_processors=(lambda ids, logits: logits,), constraint=ConstraintSpec.regex("a+"))
SamplingParams(logits_processors=(lambda ids: ids,))  # error


async def main() -> None:
    async with AsyncLLM("m", parallel=2) as many:
        pieces: list[str] = [piece async for piece in many.stream("a")]
        number: int = await many.chat([])  # error
"""


def wrong_lines(command: list[str], file: Path) -> set[int]:
    """The lines of a file in which a type checker finds errors."""
    found = subprocess.run(
        [*command, str(file)], capture_output=True, text=True, cwd=file.parent, check=False
    )
    print(found.stdout[-2000:], found.stderr[-500:], flush=True)
    return {int(line) for line in re.findall(rf"{file.name}:(\d+)(?::\d+)?(?:: | - )error", found.stdout)}


def main() -> int:
    with tempfile.TemporaryDirectory() as temporary:
        environment, file = Path(temporary) / "venv", Path(temporary) / "script.py"
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        python = str(environment / "bin" / "python")
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "-e", str(ROOT)], check=True)
        (packages,) = environment.glob("lib/*/site-packages")
        (packages / "zz_others.pth").write_text(sysconfig.get_paths()["purelib"])  # torch, mypy and the like
        file.write_text(SCRIPT)
        expected = {n for n, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith("# error")}
        checkers = {"mypy": [python, "-m", "mypy", "--strict"]}
        if find_spec("basedpyright") is not None:
            checkers["basedpyright"] = [
                sys.executable,
                "-m",
                "basedpyright",
                "--level",
                "error",
                "--pythonpath",
                python,
            ]
        wrong = 0
        for name, command in checkers.items():
            lines = wrong_lines(command, file)
            wrong += lines != expected
            print(f"{name}: errors in lines {sorted(lines)}, expected {sorted(expected)}")
        examples = subprocess.run(
            [python, "-m", "mypy", "--strict", str(ROOT / "examples")], check=False
        ).returncode
    return int(wrong > 0 or examples != 0)


if __name__ == "__main__":
    sys.exit(main())
