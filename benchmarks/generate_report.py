"""`python benchmarks/generate_report.py`: the same as `minillm bench report`, with its options."""

import sys

from minillm.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "report"]
    main()
