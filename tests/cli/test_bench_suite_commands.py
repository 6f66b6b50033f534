"""`bench static`, `offline`, `latency`, `report`, `history` and `all` as commands, on a tiny random model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minillm.bench import common, history
from minillm.bench.program import PROGRAMS, get_program
from minillm.cli import bench_suite

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
TINY = ["--model", "random:toy", "--device", "cpu"]


def check_png(path: Path) -> None:
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 10_000


def redrawn(cli, program: str, path: Path, printed: str) -> None:
    """`--from-csv` prints the same tables, draws the same plots and remembers nothing."""
    picture = path.with_suffix(".png")
    check_png(picture)
    picture.unlink()
    before = (path.parent / "history.csv").read_text()
    again = cli("bench", program, "--from-csv", str(path))
    assert again.code == 0 and again.out == printed, again.err
    check_png(picture)
    assert (path.parent / "history.csv").read_text() == before


def test_static_measures_each_batch_and_dtype_in_rounds(cli, tmp_path: Path) -> None:
    path = tmp_path / "static.csv"
    sizes = ["--batch", "1", "--batch", "3", "--prompt", "8", "--output-tokens", "5", "--repeats", "2"]
    done = cli("bench", "static", *TINY, "--dtype", "float32", "--dtype", "bfloat16", *sizes, "--output", str(path))
    assert done.code == 0, done.err
    rows = common.read_csv(path)
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        assert row["steps"] == "5"  # one prefill step, four decode steps: everything runs together
        rate = int(row["batch"]) * 5 / float(row["seconds"])
        assert float(row["output_tok_per_s"]) == pytest.approx(rate, rel=0.01)
    assert {row["same_tokens"] for row in rows if row["dtype"] == "float32"} == {"1.0"}
    redrawn(cli, "static", path, done.out)
    assert {entry.figure.name for entry in history.read(tmp_path / "history.csv")} == {
        f"{dtype}, batch {batch}" for dtype in ("float32", "bfloat16") for batch in (1, 3)
    }


def test_static_times_nothing_if_tokens_depend_on_the_batch(cli, tmp_path: Path, monkeypatch) -> None:
    from minillm.bench import static_batching

    monkeypatch.setattr(static_batching, "_agreement", lambda outputs: 0.5)
    path = tmp_path / "static.csv"
    done = cli("bench", "static", *TINY, "--dtype", "float32", "--batch", "1", "--output", str(path))
    assert done.code == 1 and "only 50% of requests give the same tokens" in done.errors[0] and not path.exists()


def test_offline_runs_the_workload_and_keeps_the_curve(cli, tmp_path: Path) -> None:
    path = tmp_path / "offline.csv"
    limits = ["--requests", "6", "--max-prompt", "20", "--max-output", "8", "--repeats", "2"]
    done = cli("bench", "offline", *TINY, *limits, "--output", str(path))
    assert done.code == 0, done.err
    rows = common.read_csv(path)
    assert [(row["requests"], row["completed"], row["output_tokens"]) for row in rows] == [("6", "6", "48")] * 2
    assert "prompt <= 20" in rows[0]["workload"]
    curve = common.read_csv(tmp_path / "offline_steps.csv")
    assert 1 < max(int(step["running"]) for step in curve) <= 6
    redrawn(cli, "offline", path, done.out)


def test_latency_puts_every_figure_beside_its_floor(cli, tmp_path: Path) -> None:
    path = tmp_path / "latency.csv"
    # 40 prompts of 60 tokens take five steps of 512: the first ones decode long before the last ones do.
    sizes = ["--batch", "1", "--batch", "40", "--prompt", "16", "--context", "60", "--output-tokens", "4"]
    done = cli("bench", "latency", *TINY, *sizes, "--repeats", "2", "--output", str(path))
    assert done.code == 0, done.err
    rows = common.read_csv(path)
    assert [(row["kind"], row["batch"], row["tokens"]) for row in rows] == [
        ("ttft", "1", "16"),
        ("decode", "1", "63"),
        ("decode", "40", "68"),
    ]
    assert int(rows[2]["samples"]) >= 3
    for row in rows:
        assert 0 < float(row["floor_ms"]) < float(row["median_ms"])
        ratio = float(row["median_ms"]) / float(row["floor_ms"])
        assert float(row["over_floor"]) == pytest.approx(ratio, rel=0.1)  # the floor is rounded to 0.1 us
    redrawn(cli, "latency", path, done.out)


@pytest.fixture
def results(cli, tmp_path: Path) -> Path:
    """A folder with two runs of two programs."""
    for _ in range(2):
        command = ["bench", "static", *TINY, "--dtype", "float32", "--batch", "1", "--batch", "2", "--repeats", "1"]
        assert cli(*command, "--output", str(tmp_path / "static.csv")).code == 0
        command = ["bench", "scheduler", "--running", "1", "--running", "2", "--steps", "20"]
        assert cli(*command, "--output", str(tmp_path / "scheduler.csv")).code == 0
    return tmp_path


def test_the_report_has_every_section_and_its_links_lead_somewhere(cli, results: Path) -> None:
    done = cli("bench", "report", "--results", str(results))
    assert done.code == 0, done.err
    text = (results / "report.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings == [
        "Tested environments",
        "Headline figures",
        "Static batching",
        "CPU cost of the scheduler",
        "History",
    ]
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", text):
        check_png(results / picture)
    assert {"static.png", "scheduler.png", "history.png"} == set(re.findall(r"!\[.*?\]\((.*?)\)", text))
    for anchor in re.findall(r"\]\(#(.*?)\)", text):
        assert anchor in {heading.lower().replace(" ", "-") for heading in headings}
    widths = [len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("|")]
    tables = [len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("| --- ")]
    assert set(widths) == set(tables)


def test_a_report_elsewhere_finds_its_pictures(cli, results: Path, tmp_path_factory) -> None:
    page = tmp_path_factory.mktemp("page") / "page.md"
    assert cli("bench", "report", "--results", str(results), "--output", str(page)).code == 0
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", page.read_text())
    assert pictures and all((page.parent / picture).is_file() for picture in pictures)


def test_a_report_of_nothing_says_so(cli, tmp_path: Path) -> None:
    done = cli("bench", "report", "--results", str(tmp_path))
    assert done.code == 0 and "no results" in done.out


def test_history_compares_and_can_fail(cli, results: Path) -> None:
    path = results / "history.csv"
    done = cli("bench", "history", "--results", str(results), "--program", "scheduler")
    assert done.code == 0 and "2 figures" in done.out and "static" not in done.out
    where = dict(
        zip(path.read_text().splitlines()[0].split(","), path.read_text().splitlines()[1].split(","), strict=False)
    )
    for value in (10.0, 5.0):
        history.append("own", "", [history.Figure("speed", value, "tok/s", "higher")], where, path=path)
    done = cli("bench", "history", "--results", str(results), "--program", "own", "--fail-on-regression")
    assert done.code == 1 and "1 worse than the noise allows: own: speed" in done.out
    assert cli("bench", "history", "--results", str(results), "--program", "own").code == 0


def test_all_runs_every_program_and_names_those_that_fail(cli, tmp_path: Path, monkeypatch) -> None:
    ran = []

    def run(name: str, results: Path, quick: bool) -> bool:
        ran.append((name, results, quick))
        return name != "swap"

    monkeypatch.setattr(bench_suite, "_run_program", run)
    done = cli("bench", "all", "--quick", "--results", str(tmp_path))
    assert done.code == 1 and "failed: swap" in done.out
    left_out = {*bench_suite.NOT_QUICK, *bench_suite.GPU_ONLY}
    assert [name for name, *_ in ran] == [name for name in PROGRAMS if name not in left_out]
    for name in left_out:
        assert re.search(rf"^{name}: skipped", done.err, re.MULTILINE)
    assert (tmp_path / "report.md").is_file()


def test_one_program_of_all_runs_in_its_folder_and_its_error_is_one_line(
    cli, tmp_path: Path, capsys, monkeypatch
) -> None:
    assert bench_suite._run_program("scheduler", tmp_path, quick=True)
    assert (tmp_path / "scheduler.csv").is_file() and (tmp_path / "scheduler.png").is_file()
    monkeypatch.setitem(bench_suite.QUICK, "static", ["--device", "tpu"])
    capsys.readouterr()
    assert not bench_suite._run_program("static", tmp_path, quick=True)
    assert "minillm: error: static: device='tpu'" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(set(bench_suite.QUICK) - {"scheduler", "static"}))
def test_the_quick_form_of_a_program_runs(tmp_path: Path, name: str) -> None:
    assert bench_suite._run_program(name, tmp_path, quick=True)
    program = get_program(name)
    rows = common.read_csv(tmp_path / program.csv)
    assert len(history.read(tmp_path / "history.csv")) == len(program.figures(rows)) > 0
    for picture in program.plots:
        check_png(tmp_path / picture if picture else (tmp_path / program.csv).with_suffix(".png"))


def test_a_csv_of_another_program_is_refused(cli, results: Path) -> None:
    done = cli("bench", "static", "--from-csv", str(results / "scheduler.csv"))
    assert done.code == 1 and "is not a result of `bench static`: there is no 'dtype'" in done.errors[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x89PNG\r\n\x1a\n\x00\xff", "is not a CSV file of results"),
        (b"", "has no rows"),
        (b"running,steps\n", "has no rows"),
        (b"a,b\n1\n", "row 1 does not have the columns of the first line"),
        (b"a,b\n1,2,3\n", "row 1 does not have the columns of the first line"),
        ("bad number", "is not a result of `bench scheduler`: could not convert string to float: 'fast'"),
        (None, "cannot be read: Is a directory"),
        ("absent", "cannot be read: No such file or directory"),
    ],
)
def test_a_file_that_is_no_result_is_one_line(cli, tmp_path: Path, content: bytes | str | None, message: str) -> None:
    path = tmp_path / "given.csv"
    if content is None:
        path.mkdir()
    elif content == "bad number":
        saved = common.read_csv(RESULTS / "scheduler.csv")
        common.write_csv(path, [{**row, "median_us": "fast"} for row in saved])
    elif isinstance(content, bytes):
        path.write_bytes(content)
    done = cli("bench", "scheduler", "--from-csv", str(path))
    assert done.code == 1 and len(done.errors) == 1 and message in done.errors[0], done.errors


@pytest.mark.parametrize("folder", ["/dev/null", "absent"])
def test_a_report_of_no_folder_is_one_line(cli, tmp_path: Path, folder: str) -> None:
    done = cli("bench", "report", "--results", str(tmp_path / folder))
    assert done.code == 2 and len(done.errors) == 1 and "is not a folder" in done.errors[0]


def test_a_label_gives_results_a_section_and_plots_of_their_own(cli, results: Path) -> None:
    own = "bench scheduler --running 1 --steps 20 --output " + str(results / "scheduler-other.csv")
    assert cli(*own.split()).code == 0
    assert {row["command"] for row in common.read_csv(results / "scheduler-other.csv")} == {f"minillm {own}"}
    assert cli("bench", "report", "--results", str(results)).code == 0
    text = (results / "report.md").read_text()
    section = text.split("## CPU cost of the scheduler: other\n", 1)[1].split("\n## ")[0]
    assert f"`minillm {own}`" in section and "](scheduler-other.png)" in section
    assert "](scheduler.png)" in text.split("## CPU cost of the scheduler\n", 1)[1].split("\n## ")[0]


def test_named_plots_carry_the_label_of_their_file(tmp_path: Path) -> None:
    modes = get_program("modes")
    rows = common.read_csv(RESULTS / "modes.csv")
    drawn = modes.draw(rows, tmp_path / "modes-h200.csv")
    assert [path.name for path in drawn] == ["compare_serving_modes_log-h200.png", "compare_continuous_only-h200.png"]
    assert modes.saved(RESULTS)[0] == RESULTS / "modes.csv"


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_every_program_is_described(name: str) -> None:
    program = get_program(name)
    assert program.title and len(program.about) > 80 and program.csv.endswith(".csv")
    assert "" in program.plots or program.plots
