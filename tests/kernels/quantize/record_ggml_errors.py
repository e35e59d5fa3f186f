"""Records ggml's errors in codebook types, whose tables it takes a minute to make: python -m ... > ggml_errors.json."""

import json

from tests.kernels.quantize.test_quantize import BOOKS, book_cases, row_errors
from tests.llama_cpp_quantize import ggml_quantize

if __name__ == "__main__":
    found = {
        f"{name} {key}": row_errors(name, ggml_quantize(name, rows, importance), rows, importance)
        for name in BOOKS
        for key, rows, importance in book_cases(name)
    }
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(errors)}" for key, errors in found.items())
    print(f"{{\n{lines}\n}}")
