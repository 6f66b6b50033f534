"""`python benchmarks/sla_priority_workload.py`: the same as `minillm bench sla`, with its options."""

import sys

from minillm.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "sla"]
    main()
