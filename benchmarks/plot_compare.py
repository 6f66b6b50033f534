"""`python benchmarks/plot_compare.py [CSV]`: tables and plots of a saved `bench modes`.

Draws `compare_serving_modes_log.png` and `compare_continuous_only.png` beside the CSV file.
"""

import sys

from minillm.cli import main

if __name__ == "__main__":
    csv = sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results/modes.csv"
    sys.argv[1:] = ["bench", "modes", "--from-csv", csv]
    main()
