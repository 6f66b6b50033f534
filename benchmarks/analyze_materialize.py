"""`python -m benchmarks.analyze_materialize [CSV]`: tables, cost per token and plot of a saved `bench materialize`."""

import sys

from minillm.cli import main

if __name__ == "__main__":
    csv = sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results/materialize.csv"
    sys.argv[1:] = ["bench", "materialize", "--from-csv", csv]
    main()
