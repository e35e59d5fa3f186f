"""`python -m quengine.kernels.cuda.aot`: see aot.py."""

import sys

from quengine.kernels.cuda.aot.aot import main

if __name__ == "__main__":
    sys.exit(main())
