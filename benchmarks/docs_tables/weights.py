"""Tables of mesh and weights: forming, loading, publishing, relays; and of the reading of payloads."""

from __future__ import annotations

from benchmarks.docs_tables.results import results, table


def mesh() -> str:
    found = results("mesh")
    rows: list[list[object]] = [
        [f"an epoch of {f['members']} members formed", f"{f['median']:.1f}", f"{f['max']:.1f}"]
        for f in found["form_ms"]
    ]
    rows += [
        [
            f"all-reduce of {r['MB']} MB, {r['members']} members",
            f"{r['median']:.1f}",
            f"{r['max']:.1f}",
        ]
        for r in found["reduce"]
        if r["MB"] == 32
    ]
    rows += [
        [
            f"one of three: {f['fault']} in the all-reduce, until the others' next sum",
            f"{f['summed_again']:.1f}",
            f"{f['summed_again_max']:.1f}",
        ]
        for f in found["fault_ms"]
    ]
    weights = [
        [f"{w['MB']} MB", f"{w['publish_ms']:.1f}", f"{w['transfer_ms']:.1f}"]
        for w in found["weights"]
        if w["receivers"] == 1
    ]
    first, last = found["leaks"][0], found["leaks"][-1]
    leak = (
        f"After {last['rebuilds']} rebuilds in one process: {last['threads'] - first['threads']} threads, "
        f"{last['descriptors'] - first['descriptors']} descriptors and {last['rss_MB'] - first['rss_MB']:.0f} MB more."
    )
    return "\n\n".join(
        [
            table(["", "median, ms", "maximum, ms"], rows),
            table(
                ["weights to one receiver", "taken from training, ms", "in the background, ms"],
                weights,
            ),
            leak,
        ]
    )


def model_load() -> str:
    rows = [
        [
            r["ranks"],
            {"whole": "the whole model on each rank", "slices": "slices"}[r["how"]],
            f"{r['shards_mib']:,.0f}",
            f"{r['peak_mib']:,.0f}",
            f"{r['peak_over_shards']:.2f}",
            f"{r['seconds']:.1f}",
        ]
        for r in results("model_load")["loads"]
    ]
    return table(["ranks", "reading", "shards, MiB", "peak, MiB", "peak / shards", "seconds"], rows)


def publishing_memory() -> str:
    ways = {
        "share": "a share on each rank",
        "share_deltas": "a share on each rank, and the one before for deltas",
        "whole": "all on rank 0",
    }
    rows = []
    for row in results("publishing_memory")["rows"]:
        most = max(row["by_rank"], key=lambda rank: rank["peak_mib"])
        beyond = (most["peak_mib"] - most["share_mib"]) / row["bucket_mib"]
        rows.append(
            [
                row["ranks"],
                ways[row["how"]],
                f"{most['slices_mib']:,.0f}",
                f"{most['share_mib']:,.0f}",
                f"{most['peak_mib']:,.0f}",
                f"{beyond:.1f}" if row["how"] == "share" else "",
                f"{row['seconds']:.1f}",
            ]
        )
    head = [
        "ranks",
        "kept",
        "slices of the rank with the highest peak, MiB",
        "kept of one version, MiB",
        "peak, MiB",
        "beyond its share, buckets",
        "seconds",
    ]
    size = sum(rank["share_mib"] for rank in row["by_rank"])
    return f"{table(head, rows)}\n\nThe model has {size:,.0f} MiB in bfloat16."


def reduction_overlap() -> str:
    rows = [
        [
            r["mbit"],
            f"{r['step_s']['backward']:.2f}",
            f"{r['exposed_s']['after']:.2f}",
            f"{max(0.0, r['exposed_s']['during']):.2f}",
            f"{r['hidden_share']:.0%}",
            f"{r['could_be_hidden']:.0%}",
        ]
        for r in results("reduction_overlap")["links"]
    ]
    head = [
        "link, Mbit/s",
        "row alone, s",
        "reduction after it, s",
        "during it, s",
        "hidden",
        "at most",
    ]
    return table(head, rows)


def weights() -> str:
    found = results("weights")
    rows = []
    for count in sorted({row["receivers"] for row in found["rows"]}):
        of = {row["wire"]: row for row in found["rows"] if row["receivers"] == count}
        rows.append([count, *(f"{of[wire]['transfer_ms']:.0f}" for wire in of)])
    deltas = next(row for row in found["rows"] if row["wire"] == "deltas")
    head = ["receivers", "float32, ms", "bfloat16, ms", "deltas, ms"]
    return (
        f"{table(head, rows)}\n\n{found['elements'] / 1e6:.0f} million weights. Bytes of the deltas: "
        f"{deltas['share_of_bf16']:.1%} of those of bfloat16, {deltas['worst_share_of_bf16']:.1%} in the worst step."
    )


def weight_relays() -> str:
    found = results("weight_relays")
    rows = []
    for trainers, fanout in dict.fromkeys((r["trainers"], r["fanout"]) for r in found["rows"]):
        own = [r for r in found["rows"] if (r["trainers"], r["fanout"]) == (trainers, fanout)]
        alone = next(r["seconds"] for r in own if r["receivers"] == 1)
        last = max(own, key=lambda r: r["receivers"])
        rows.append(
            [
                trainers,
                fanout or "no relays",
                *(f"{r['seconds']:.2f}" for r in own),
                f"{last['seconds'] / alone:.2f}",
                f"{last['most_of_a_trainer']:.2f}",
                f"{last['trainer_copies']:.2f}",
            ]
        )
    counts = sorted({r["receivers"] for r in found["rows"]})
    head = ["replicas", "fanout", *(f"{n} receiver{'s' if n > 1 else ''}, s" for n in counts)]
    head += [f"{counts[-1]} / 1", f"copies from a replica at {counts[-1]}", "from all"]
    return (
        f"{table(head, rows)}\n\nEach process sends {found['egress_mb_s']:g} MB/s; a version has {found['mib']} MiB in "
        "bfloat16, sent whole. Copies: what the limit has counted, in versions."
    )


def weight_relays_hosts() -> str:
    found = results("weight_relays_hosts")
    of = {(row["fanout"], row["deltas"], row["receivers"]): row for row in found["rows"]}
    ways = list(dict.fromkeys((row["fanout"], row["deltas"]) for row in found["rows"]))
    head = ["receivers"]
    for fanout, deltas in ways:
        relays = f"fanout {fanout}" if fanout else "no relays"
        head.append(f"{relays}, {'deltas' if deltas else 'whole'}: s; copies")
    rows = []
    for count in sorted({row["receivers"] for row in found["rows"]}):
        cells = [of[*way, count] for way in ways]
        rows.append([count, *(f"{c['seconds']:.1f}; {c['trainer_copies']:.2f}" for c in cells)])
    return (
        f"{table(head, rows)}\n\nHosts send and receive {found['mbit'] / 8:g} MB/s; a version has {found['mib']} MiB in "
        "bfloat16. Copies: what the trainer's network device sent, in versions."
    )


def payload_fetch() -> str:
    found = results("payload_fetch")
    names = {"raw": "plain GETs", "fetch": "as a replica reads", "checked": "with digests"}
    rows = [
        [
            names[way],
            ", ".join(f"{s:.1f}" for s in found["seconds"][way]),
            f"{found['median_s'][way]:.1f}",
            f"{found['median_s'][way] / found['median_s']['raw']:.2f}",
        ]
        for way in names
    ]
    return (
        f"{table(['way', 'rounds, s', 'median, s', 'of plain GETs'], rows)}\n\n{found['replicas']} replicas × "
        f"{found['groups']} groups of {found['payload'].replace('x', ' × ')} tokens, {found['gigabytes']:.1f} GB, on 2 cores "
        f"that the Redis server shares. The controller's largest resident size was {found['controller_peak_mb']:.0f} MB."
    )
