"""`python -m benchmarks.benchmark_paged_attention`: the same as `minillm bench paged-attention`, with its options."""

import sys

from minillm.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "paged-attention"]
    main()
