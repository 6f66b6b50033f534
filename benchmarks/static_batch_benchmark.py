"""`python -m benchmarks.static_batch_benchmark`: the same as `minillm bench static`, with its options."""

import sys

from minillm.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "static"]
    main()
