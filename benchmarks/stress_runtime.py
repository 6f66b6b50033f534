"""`python benchmarks/stress_runtime.py`: the same as `minillm bench stress`, with its options."""

import sys

from minillm.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "stress"]
    main()
