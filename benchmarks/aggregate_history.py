"""`python benchmarks/aggregate_history.py`: the same as `minillm bench history`, with its options."""

import sys

from minillm.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "history"]
    main()
