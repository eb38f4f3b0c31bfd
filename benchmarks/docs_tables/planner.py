"""Tables of the planner beside published runs."""

from __future__ import annotations

from benchmarks.docs_tables.results import results, table


def planner_errors() -> str:
    found = results("planner")
    rows = []
    for row in found["rows"]:
        if row["error"] is None:
            predicted = f"{row['low']:.2f} to {row['high']:.2f}"
            verdict = "inside" if row["inside"] else "**outside**"
        else:
            predicted, verdict = f"{row['low']:.2f}", f"{row['error']:+.0%}"
        if not row["sign_right"]:
            verdict += ", **wrong sign**" if row["error"] is not None else ", sign open"
        rows.append(
            [row["kind"], row["system"], row["row"], f"{row['published']:.2f}", predicted, verdict]
        )
    bar = found["bar"]
    head = ["evidence", "system", "asynchronous row", "published", "predicted", "error"]
    return (
        f"{table(head, rows)}\n\nOf the {bar['rows']} rows whose systems have their parts measured at two or more sizes, the "
        f"median error is {bar['median_error']:.1%} and the largest {bar['worst_error']:.0%}."
    )


def planner_parts() -> str:
    parts = results("planner")["parts"]
    head = list(parts[0])
    rows = [[row["row"], *(f"{row[name]:.2f}" for name in head[1:])] for row in parts]
    return table(head, rows)


def planner_fits() -> str:
    rows = []
    for system, fit in results("planner")["fitted"].items():
        variants = fit["variants"]
        for n, row in enumerate(fit["measured"]):
            said = [variant["synchronous_s"][n] for variant in variants]
            published = row["step_s"]
            if published is None:
                continue
            rows.append(
                [
                    system,
                    row["gpus"],
                    f"{variants[0]['token_ms']:.1f}",
                    f"{published:,.0f}",
                    f"{said[0]:,.0f}",
                    f"{said[0] / published - 1:+.0%}",
                ]
            )
    head = ["system", "GPUs", "ms a token", "synchronous step, s", "fitted, s", "error"]
    return table(head, rows)


def planner_assumed() -> str:
    rows = {(row["system"], row["source"], row["assumed"]) for row in results("planner")["rows"]}
    return table(["system", "source", "assumed, because it is not published"], sorted(rows))
