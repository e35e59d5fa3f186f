"""llama.cpp's source files that tests compare with: vocabularies, chat templates and the converter.

`make test` unpacks them from the source distribution of llama-cpp-python into the virtual environment; a run of pytest
in another environment names the unpacked `vendor/llama.cpp` in LLAMA_CPP_SOURCE.
"""

import os
import sys
from functools import cache
from pathlib import Path


@cache
def llama_cpp_source() -> Path:
    """The folder with `models/`, `conversion/`, `gguf-py/` and `convert_hf_to_gguf.py`.

    Raises:
        FileNotFoundError: it is not there; `make test` brings it.
    """
    folder = Path(os.environ.get("LLAMA_CPP_SOURCE", Path(sys.prefix) / "llama_cpp"))
    if not (folder / "convert_hf_to_gguf.py").is_file():
        raise FileNotFoundError(
            f"llama.cpp's source files are not in {folder}: run the tests with `make test`, or set LLAMA_CPP_SOURCE"
        )
    return folder
