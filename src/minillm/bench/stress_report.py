"""The stress study as tables, plots and a page of Markdown, all from the saved rounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from minillm.bench import common, drawing
from minillm.bench import stress_analysis as analysis
from minillm.bench.attribution import Interval
from minillm.bench.history import Figure
from minillm.bench.program import Cells, Program, Rows, command, provenance
from minillm.bench.step_cost import TERMS
from minillm.bench.stress import BASE, LARGE, SMALL, Setting

POOLS_SHOWN = 10
ORDERS_SHOWN = 8


def victims_table(rows: Rows) -> Cells:
    """Every victim policy, both ways of preempting, against fifo."""
    columns = [
        "preemption, victim",
        "tok/s [95 %]",
        "x fifo [95 %]",
        "tok/s as timed",
        "steps",
        "mean batch",
        "attention calls",
        "preemptions",
        "recomputed tokens",
        "swapped, KiB",
        "TTFT small, ms",
    ]
    lines = []
    for setting, mine in _victim_rows(rows).items():
        fifo = _victim_rows(rows)[Setting(BASE.admission, "fifo", setting.preemption, setting.cap)]
        preemptions = analysis.median(mine, "preemptions_swap") + analysis.median(mine, "preemptions_recompute")
        lines.append(
            [
                f"{setting.preemption}, {setting.victim}",
                analysis.throughput(mine).text(),
                "" if setting.victim == "fifo" else analysis.ratio(mine, fifo).text(".3f"),
                f"{analysis.median(mine, 'timed_tok_per_s'):.1f}",
                f"{analysis.median(mine, 'steps'):.0f}",
                f"{analysis.median(mine, 'mean_batch'):.2f}",
                f"{analysis.median(mine, 'attention_calls'):.0f}",
                f"{preemptions:.1f}",
                f"{analysis.median(mine, 'recomputed_tokens'):.0f}",
                f"{analysis.median(mine, 'swapped_bytes') / 1024:.0f}",
                f"{1e3 * analysis.median(mine, 'ttft_small_p50'):.1f}",
            ]
        )
    return columns, lines


def _victim_rows(rows: Rows) -> dict[Setting, Any]:
    """Settings that differ from the base in victim and preemption only, and have a fifo to be compared with."""
    settings = analysis.by_setting(rows)
    base = analysis.base_setting(rows)
    return {
        setting: mine
        for setting, mine in settings.items()
        if (setting.admission, setting.cap) == (base.admission, base.cap)
        and Setting(base.admission, "fifo", setting.preemption, base.cap) in settings
    }


def attribution_tables(rows: Rows) -> dict[str, Cells]:
    """Shares, interactions and every combination; nothing if the combinations are not there."""
    found = analysis.attribute(rows)
    if found is None:
        return {}
    shares = [
        [
            f"{name}: {getattr(found.base, name)} -> {getattr(found.switched, name)}",
            share.text("+.1f"),
            found.as_factor[name].text(".3f"),
            "yes" if share.excludes_zero else "no",
        ]
        for name, share in found.shares.items()
    ]
    shares.append(["all together", found.total.text("+.1f"), found.total_factor.text(".3f"), _sure(found.total)])
    pairs = [[f"{a} and {b}", value.text("+.1f"), _sure(value)] for (a, b), value in found.pairs.items()]
    cells = [
        [", ".join(name for name in found.factors if name in which) or "none", speed.text()]
        for which, speed in found.speeds.items()
    ]
    return {
        "Attribution: Shapley values": (
            ["switched factor", "tok/s [95 %]", "as a factor [95 %]", "beyond the noise"],
            shares,
        ),
        "Attribution: interactions": (["pair", "tok/s beyond each alone [95 %]", "beyond the noise"], pairs),
        "Attribution: all combinations": (["switched", "tok/s [95 %]"], cells),
    }


def _sure(value: Interval) -> str:
    return "yes" if value.excludes_zero else "no"


def cost_table(rows: Rows) -> Cells:
    """The regression, and where the seconds of the first and the last of its settings went."""
    fitted = analysis.fit_cost(rows)
    settings = _compared(rows)
    columns = ["term", "ms each", *(f"{setting.name}, ms" for setting in settings)]
    parts = [analysis.time_parts(fitted.cost, mine) for mine in settings.values()]
    lines = [
        [
            term.replace("_", " "),
            f"{1e3 * fitted.cost.seconds[term]:.4f}",
            *(f"{1e3 * part[term]:.1f}" for part in parts),
        ]
        for term in TERMS
    ]
    lines.append(["sum", "", *(f"{1e3 * sum(part.values()):.1f}" for part in parts)])
    measured = [f"{1e3 * analysis.median(mine, 'seconds'):.1f}" for mine in settings.values()]
    lines.append(["measured, median", "", *measured])
    return columns, lines


def _compared(rows: Rows) -> dict[Setting, Any]:
    """fifo and cost_based, both ways of preempting."""
    return {s: mine for s, mine in _victim_rows(rows).items() if s.victim in ("fifo", "cost_based")}


def pool_table(rows: Rows) -> Cells:
    """cost_based over fifo by pool size, at the fitted costs in virtual time."""
    cost = analysis.fit_cost(rows).cost
    large, small = int(rows[0]["large"]), int(rows[0]["small"])
    least = -(-sum(LARGE) // 16)
    pools = sorted({least + (least * (large - 1)) * i // (POOLS_SHOWN - 1) for i in range(POOLS_SHOWN)} | {16})
    lines = []
    for how in ("recompute", "swap"):
        points = analysis.sweep_pools(
            cost, large=large, small=small, preemption=how, policies=("cost_based",), pools=pools, orders=ORDERS_SHOWN
        )
        lines += [[how, str(p.num_blocks), f"{p.median:.3f}", f"{p.ahead} / {p.behind} of {p.orders}"] for p in points]
    return ["preemption", "blocks", "cost_based over fifo, median", "orders ahead / behind"], lines


def never_fits_table(rows: Rows) -> Cells:
    """The set-up in which the large request does not fit, and pools in which it does."""
    lines = [
        [
            str(one.pool_blocks),
            str(one.max_steps),
            f"{one.least:.2f} / {one.median:.2f} / {one.greatest:.1f}",
            f"{one.seven:.0%}",
            f"{one.stalled:.0%}",
            f"{one.cut_off:.0%}",
        ]
        for one in analysis.reconstruction(analysis.fit_cost(rows).cost)
    ]
    columns = ["blocks", "step limit", "cost_based over fifo: least / median / greatest", "7 times or more, either way"]
    return [*columns, "runs that stalled", "runs cut off"], lines


def tables(rows: Rows) -> dict[str, Cells]:
    """All tables of the study."""
    made = {f"Victim policies\n{provenance(rows, rows[0]['model'], rows[0]['dtype'])}": victims_table(rows)}
    made |= attribution_tables(rows)
    made["Where the time went, by the step-cost regression"] = cost_table(rows)
    made["By size of the pool, in virtual time at the fitted costs"] = pool_table(rows)
    made["A loop without a rule for what never fits, in virtual time"] = never_fits_table(rows)
    return made


def verdicts(rows: Rows) -> list[common.Verdict]:
    """The regression's accuracy, and a policy ahead of fifo where everything fits."""
    fitted = analysis.fit_cost(rows)
    found = [
        common.Verdict(
            "the regression predicts every setting's median time within 10 % from the other settings",
            f"worst {fitted.worst_setting:.1%}",
            fitted.settings_within == 1.0,
        ),
        common.Verdict(
            "and so every single run",
            f"{fitted.runs_within:.1%} of {len(rows)} runs; half of them within {fitted.median_error:.1%}, "
            f"the worst off by {fitted.worst_run:.1%}",
            fitted.runs_within == 1.0,
        ),
    ]
    compared = _compared(rows)
    gains = {
        setting.name: analysis.ratio(mine, compared[replace(setting, victim="fifo")])
        for setting, mine in compared.items()
        if setting.victim == "cost_based"
    }
    if gains:
        found.append(
            common.Verdict(
                "cost_based is ahead of fifo in a pool in which everything fits, beyond the noise, in some setting",
                "; ".join(f"{name}: {gain.text('.3f')} times fifo" for name, gain in gains.items()),
                any(gain.low > 1 for gain in gains.values()),
            )
        )
    return found


def figures(rows: Rows) -> list[Figure]:
    """Throughput by victim policy; the spread is that of the 95 % interval."""
    found = []
    for setting, mine in _victim_rows(rows).items():
        speed = analysis.throughput(mine)
        name = f"{setting.preemption}, {setting.victim}"
        found.append(Figure(name, speed.value, "tok/s", "higher", speed.high - speed.low))
    return found


def settings_text(rows: Rows) -> str:
    """What the figures depend on."""
    row = rows[0]
    return f"{row['model']} {row['dtype']}, {row['large']} large + {row['small']} small, {row['num_blocks']} blocks"


def draw(rows: Rows, path: Path) -> None:
    """Throughput by policy, the attribution, and the active batch of fifo and cost_based over time."""
    plt = drawing.pyplot()
    figure, (rates, shares, batches) = plt.subplots(1, 3, figsize=(17, 4.6))
    labels = []
    for place, (setting, mine) in enumerate(_victim_rows(rows).items()):
        speed = analysis.throughput(mine)
        colour = drawing.PALETTE[0 if setting.preemption == "swap" else 1]
        error = [[speed.value - speed.low], [speed.high - speed.value]]
        rates.barh(place, speed.value, color=colour, xerr=error, capsize=3)
        labels.append(f"{setting.victim}, {setting.preemption}")
    rates.set_yticks(range(len(labels)), labels, fontsize=8)
    rates.invert_yaxis()
    rates.set_xlabel("output tokens/s, median and 95 % interval")
    drawing.grid(rates, "victim policies", legend=False)
    found = analysis.attribute(rows)
    for place, share in enumerate(found.shares.values() if found else ()):
        error = [[share.value - share.low], [share.high - share.value]]
        shares.bar(place, share.value, color=drawing.PALETTE[2], yerr=error, capsize=4)
    if found:
        names = [f"{name}\n{getattr(found.switched, name)}" for name in found.factors]
        shares.set_xticks(range(len(names)), names, fontsize=8)
        shares.axhline(0, color="black", linewidth=0.8)
    drawing.grid(shares, "what each switched factor gave (Shapley)", "output tokens/s", legend=False)
    for place, (setting, mine) in enumerate(_compared(rows).items()):
        curve = [int(active) for active in mine[0]["active"].split(";")]
        seconds = float(mine[0]["seconds"])
        times = [(point + 0.5) / len(curve) * seconds for point in range(len(curve))]
        label = f"{setting.victim}, {setting.preemption}"
        batches.step(times, curve, where="mid", color=drawing.PALETTE[place], label=label)
    batches.set_xlabel("seconds")
    drawing.grid(batches, "active batch over time, first round", "requests in the step")
    figure.tight_layout()
    drawing.save(figure, path)


def story(rows: Rows) -> list[str]:
    """The attribution in words, each sentence from the figures."""
    said = []
    settings = _victim_rows(rows)
    for how in ("recompute", "swap"):
        fifo = settings.get(Setting(BASE.admission, "fifo", how, BASE.cap))
        cost = settings.get(Setting(BASE.admission, "cost_based", how, BASE.cap))
        if fifo is None or cost is None:
            continue
        gain = analysis.ratio(cost, fifo)
        noise = "beyond the noise" if gain.low > 1 or gain.high < 1 else "within the noise"
        said.append(
            f"With {how}, cost_based makes {gain.text('.3f')} times the tokens per second of fifo ({noise}): "
            f"{analysis.median(cost, 'steps'):.0f} steps against {analysis.median(fifo, 'steps'):.0f}, at a mean batch "
            f"of {analysis.median(cost, 'mean_batch'):.2f} against {analysis.median(fifo, 'mean_batch'):.2f}, with "
            f"{analysis.median(cost, 'recomputed_tokens'):.0f} against "
            f"{analysis.median(fifo, 'recomputed_tokens'):.0f} recomputed tokens and "
            f"{analysis.median(cost, 'swapped_blocks'):.0f} against {analysis.median(fifo, 'swapped_blocks'):.0f} "
            f"swapped blocks."
        )
        said.append(_where_time_went(rows, how, fifo, cost))
    found = analysis.attribute(rows)
    if found is not None:
        ordered = sorted(found.shares.items(), key=lambda pair: -abs(pair[1].value))
        said.append(
            f"Switching {', '.join(found.factors)} from {found.base.name} to {found.switched.name} changes "
            f"{found.total.text('+.1f')} tokens/s in all ({found.total_factor.text('.3f')} times). By Shapley value: "
            + "; ".join(
                f"{name} {share.text('+.1f')}" + ("" if share.excludes_zero else " (not beyond the noise)")
                for name, share in ordered
            )
            + "."
        )
        sure = [f"{a} and {b} {value.text('+.1f')}" for (a, b), value in found.pairs.items() if value.excludes_zero]
        said.append(f"Interactions beyond the noise: {'; '.join(sure) if sure else 'none'}.")
    return said


def _where_time_went(rows: Rows, how: str, fifo: Rows, cost: Rows) -> str:
    fitted = analysis.fit_cost(rows).cost
    before, after = analysis.time_parts(fitted, fifo), analysis.time_parts(fitted, cost)
    changes = {term: 1e3 * (after[term] - before[term]) for term in TERMS}
    biggest = sorted(changes.items(), key=lambda pair: -abs(pair[1]))[:3]
    listed = ", ".join(f"{change:+.0f} ms for {term.replace('_', ' ')}" for term, change in biggest)
    return f"By the regression the run changes by {sum(changes.values()):+.0f} ms with {how}: {listed}."


REASONS = """\
**Why 7 times can be read off the original set-up.** A pool of 8 blocks of 16 holds 128 tokens; a request of 64 + 80
reaches 143. It cannot end there, whoever is preempted. A loop that does not refuse it beforehand comes to one of two
ends. Either the request is recomputed: with 129 tokens it needs 9 blocks to be admitted, is passed over for ever, and
the loop *stalls* early, having counted the tokens so far over a short time: thousands of tokens per second. Or it sits
in the swap pool: each step copies it back, finds no ninth block and copies it out again, and the run goes on to
whatever limit it has, at a rate as low as that limit is long. Which of the two comes is decided by whom the policy
happens to swap while the swap pool has room. The last table shows it: with 8 blocks the ratio of the two policies
takes any value, 7 and 1/7 included, and grows with the step limit; from 9 blocks on, with the same code and policies,
it stays far below that. Such a ratio measures the limit, not the policies. (Costs as fitted above, loop as described in
`bench/never_fits.py`; its details are assumptions, since the original's were not published.) This package refuses the
request when it is submitted, with both sizes named, or ends it with `length` if `max_tokens` was not given."""


def probe_text(rows: Rows) -> str:
    """How the machine's speed was taken out, with how much it changed."""
    if not rows[0].get("probe_seconds"):
        return ""
    probe = common.Summary.of(analysis.column(rows, "probe_seconds"))
    return (
        f"A probe, one small run that is always the same, took {probe.text('.3f')} s (mean within a run: median, "
        f"range). Where it takes 1 % longer, runs take {analysis.response(rows):.2f} % longer. Times and rates are at "
        'the median speed of the machine by that; "as timed" is without.'
    )


def markdown(rows: Rows, picture: str) -> str:
    """The study as a page that can be read on its own."""
    probe = probe_text(rows)
    rows = analysis.steadied(rows)
    row = rows[0]
    rounds = len({one["round"] for one in rows})
    parts = [
        "# Memory pressure: fifo against cost_based",
        f"{row['large']} requests of {LARGE[0]} + {LARGE[1]} tokens and {row['small']} of {SMALL[0]} + {SMALL[1]} "
        f"share {row['num_blocks']} blocks of 16 tokens; at most six are active and two swapped out. Each fits alone. "
        f"{rounds} rounds after a warm-up, each a random order of the same requests that every setting runs; medians, "
        "with 95 % bootstrap intervals over whole rounds.",
        f"{provenance(rows, row['model'], row['dtype'])}\n\n```\n{command(rows, 'stress')}\n```",
        *([probe] if probe else []),
        f"![throughput, attribution, active batch]({picture})",
        *story(rows),
    ]
    for title, cells in tables(rows).items():
        parts += [f"## {title.splitlines()[0]}", common.markdown_table(*cells)]
    parts += [f"- {'met' if v.met else 'NOT MET'}: {v.requirement}: {v.found}" for v in verdicts(rows)]
    parts.append(REASONS)
    return "\n\n".join(parts) + "\n"


PROGRAM = Program(
    name="stress",
    title="Memory pressure",
    about=(
        "Large (64 + 80 tokens) and small (8 + 10) requests in a pool that holds any of them, but not all: victim "
        "policies, and the difference between two set-ups attributed to admission order, victim choice, swap or "
        "recompute, and the batch size cap. Rates are at the median speed of the machine, by a probe within every run "
        "(as timed: without that). The page in words is stress.md."
    ),
    tables=lambda rows: tables(analysis.steadied(rows)),
    plots={"": lambda rows, path: draw(analysis.steadied(rows), path)},
    figures=lambda rows: figures(analysis.steadied(rows)),
    settings=settings_text,
    verdicts=lambda rows: verdicts(analysis.steadied(rows)),
)
