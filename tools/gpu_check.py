#!/usr/bin/env python3
"""Build the CUDA kernels, check them, and time them, in one call on a machine with a GPU.

    python tools/gpu_check.py                         # build all kernels, 480 random and the long cases
    python tools/gpu_check.py --time                  # and then all kernel benchmarks, CSV files under --results
    python tools/gpu_check.py --only 137              # one case of that list again
    compute-sanitizer --tool memcheck python tools/gpu_check.py --sanitizer
    compute-sanitizer --tool racecheck python tools/gpu_check.py --sanitizer

The exit code is 1 if anything failed. One CSV line per case; the last line printed sums up.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=480, help="random cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this case of the list alone")
    parser.add_argument("--no-long", action="store_true", help="leave out 131,072 tokens and the 2^31-element pools")
    parser.add_argument("--sanitizer", action="store_true", help="the small set for compute-sanitizer, nothing else")
    parser.add_argument("--no-build", action="store_true", help="compile only what a case needs, when it does")
    parser.add_argument("--time", action="store_true", help="run the kernel benchmarks afterwards")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results", help="folder of the CSV files")
    parser.add_argument("--device", default="cuda", help="cuda; cpu checks the sweep itself with torch's own results")
    return parser.parse_args()


def build_kernels(arch: str) -> None:
    """Compile every registered kernel, one process per core."""
    from minillm.attention.cuda_build import build, registered_specs

    specs = registered_specs(arch)
    start = time.perf_counter()
    # Forked children compile and touch no device, so the parent's CUDA context does not matter to them.
    with ProcessPoolExecutor(os.cpu_count(), get_context("fork")) as pool:
        kernels = list(pool.map(build, specs, [arch] * len(specs)))
    spills = [f"{kernel.symbol} ({kernel.spill_bytes} bytes)" for kernel in kernels if kernel.spill_bytes]
    seconds = time.perf_counter() - start
    print(f"{len(specs)} kernels for {arch} in {seconds:.1f} s; spills: {', '.join(spills) or 'none'}", flush=True)


def check(arguments: argparse.Namespace) -> int:
    """Run the cases; the number of failures."""
    import torch

    from minillm.bench import common
    from minillm.bench.kernel_cases import draw_cases, long_cases, sanitizer_cases
    from minillm.bench.kernel_sweep import CUDAKernels, TorchKernels, run_case, summary_cells
    from minillm.bench.timing import device_name

    device = torch.device(arguments.device)
    kernels = CUDAKernels() if device.type == "cuda" else TorchKernels()
    cases = sanitizer_cases(arguments.seed) if arguments.sanitizer else draw_cases(arguments.cases, arguments.seed)
    if not arguments.sanitizer and not arguments.no_long:
        cases += long_cases(arguments.seed)
    numbered = list(enumerate(cases)) if arguments.only is None else [(arguments.only, cases[arguments.only])]
    rows, start = [], time.perf_counter()
    where = common.environment(device_name(device), ("torch",))
    for number, case in numbered:
        result = run_case(case, kernels, device, no_block=arguments.sanitizer)
        rows.append({**result.columns(number), **where})
        if result.failure:
            print(f"FAILED {number}: {case}\n    {result.path}: {result.failure}", flush=True)
        if result.failure.startswith(("AcceleratorError", "KernelLaunchError: CUDA_ERROR_ILLEGAL")):
            print("the CUDA context is gone; the remaining cases were not run")
            break
    failed = sum(row["status"] != "ok" for row in rows) + len(numbered) - len(rows)
    if not arguments.sanitizer and arguments.only is None:
        common.write_csv(arguments.results / "kernel_check.csv", rows)
    columns, cells = summary_cells([{key: str(value) for key, value in row.items()} for row in rows])
    print(common.markdown_table(columns, cells))
    seconds = time.perf_counter() - start
    print(f"{len(numbered)} cases, {failed} failed, seed {arguments.seed}, {seconds:.1f} s, {where['device']}")
    return failed


def run_benchmarks(results: Path) -> int:
    """All kernel benchmarks, each as the command that the pages name; the number of those that failed."""
    from minillm.cli import app

    commands = [
        ["materialize", "--output", str(results / "materialize.csv")],
        ["paged-attention", "--output", str(results / "paged_attention.csv")],
        ["paged-attention", "--peers", "decode", "--output", str(results / "decode_peers.csv")],
        ["paged-attention", "--peers", "prefill", "--output", str(results / "prefill_peers.csv")],
        ["swap", "--output", str(results / "swap.csv")],
    ]
    failed = 0
    for command in commands:
        print(f"\nminillm bench {' '.join(command)}", flush=True)
        failed += app.run(["bench", *command]) != 0
    return failed


def main() -> int:
    """Build, check, time; the exit code."""
    arguments = parse_arguments()
    sys.path.insert(0, str(ROOT / "src"))
    if arguments.sanitizer:
        # The checkers see single allocations only if torch makes them one by one.
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    import torch

    if arguments.device == "cuda":
        if not torch.cuda.is_available():
            print("gpu_check: torch sees no CUDA device here", file=sys.stderr)
            return 2
        if not arguments.no_build and not arguments.sanitizer:
            from minillm.attention.cuda_build import arch_of

            build_kernels(arch_of(torch.cuda.get_device_capability()))
    failed = check(arguments)
    if arguments.time and not failed:
        failed += run_benchmarks(arguments.results)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
