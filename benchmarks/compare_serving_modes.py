"""`python benchmarks/compare_serving_modes.py`: the same as `minillm bench modes`, with its options."""

import sys

from minillm.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "modes"]
    main()
