"""`python -m benchmarks.benchmark_materialize`: the same as `minillm bench materialize`, with its options."""

import sys

from minillm.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "materialize"]
    main()
