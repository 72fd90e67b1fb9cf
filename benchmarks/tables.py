"""Markdown tables of RESULTS.md from what the kit's bench.py, prefill.py and small.py write, and
bench_layer.py.

python -m benchmarks.tables decode.json|prefill.json|small.json|layer.json [...]
"""

import json
import sys

CEILING = 4.34e12  # bytes/s of a plain read (../shared/PEERS.md)


def row(cells):
    return "| " + " | ".join(str(c) for c in cells) + " |"


def decode_table(rows):
    """A row a workload: the time its bytes need, us and GB/s of each of ours, us of each peer."""
    peers = list(dict.fromkeys(r["peer"] for r in rows))
    ours = [p for p in peers if p.startswith("ours")]
    others = [p for p in peers if not p.startswith("ours")]
    head = [
        "workload",
        "KV MB",
        "us at 4.34 TB/s",
        *ours,
        "GB/s",
        "% of ceiling",
        *others,
        "best peer / ours",
    ]
    lines = [row(head), row("---" for _ in head)]
    for workload in dict.fromkeys(r["wl"] for r in rows):
        us = {r["peer"]: r["us"] for r in rows if r["wl"] == workload and "us" in r}
        kv = next(r["kv_bytes"] for r in rows if r["wl"] == workload)
        # In the default mode on layout vllm.
        best = us.get("ours_pa")
        peer = min((us[p] for p in others if p in us), default=None)
        rate = kv / best * 1e6 if best else 0
        lines.append(
            row(
                [
                    workload,
                    f"{kv / 1e6:.0f}",
                    f"{kv / CEILING * 1e6:.1f}",
                    *(f"{us[p]:.1f}" if p in us else "-" for p in ours),
                    f"{rate / 1e9:.0f}",
                    f"{100 * rate / CEILING:.0f}",
                    *(f"{us[p]:.1f}" if p in us else "-" for p in others),
                    f"{peer / best:.2f}" if best and peer else "-",
                ]
            )
        )
    return lines


def verify_table(rows):
    """A row a workload with few query tokens: us of ours and of the peers, GB/s of ours."""
    peers = list(dict.fromkeys(r["peer"] for r in rows))
    lines = [row(["workload", "KV MB", *peers, "GB/s", "best peer / ours"])]
    lines.append(row("---" for _ in range(len(peers) + 4)))
    for workload in dict.fromkeys(r["wl"] for r in rows):
        us = {r["peer"]: r["us"] for r in rows if r["wl"] == workload and r.get("ok")}
        kv = next(r["kv_bytes"] for r in rows if r["wl"] == workload)
        peer = min(us[p] for p in us if not p.startswith("ours"))
        times = [f"{us[p]:.1f}" if p in us else "-" for p in peers]
        mine = us["ours_pa"]
        lines.append(
            row(
                [
                    workload,
                    f"{kv / 1e6:.0f}",
                    *times,
                    f"{kv / mine / 1e3:.0f}",
                    f"{peer / mine:.2f}",
                ]
            )
        )
    return lines


def small_table(rows):
    """A row an op and number of tokens: ours, its GB/s, and the fastest of each library."""
    lines = [
        row(["T", "op", "bytes MB", "ours us", "GB/s", "vLLM us", "FlashInfer us"]),
        row(["---"] * 7),
    ]

    def of(tokens, op, *peers):
        found = [r["us"] for r in rows if r["T"] == tokens and r["op"] == op and r["peer"] in peers]
        return f"{found[0]:.2f}" if found else "-"

    for r in rows:
        if not r["peer"].startswith("ours"):
            continue
        vllm = {"ours_nhd": "vllm_flash_nhd", "ours_x_random": "vllm_legacy"}.get(r["peer"], "vllm")
        flashinfer = "flashinfer" if r["peer"] in ("ours", "ours_nhd") else "none"
        name = r["op"] + r["peer"].removeprefix("ours").replace("_", " ")
        cells = [r["T"], name, f"{r['bytes'] / 1e6:.2f}", f"{r['us']:.2f}", f"{r['gbps']:.0f}"]
        lines.append(row([*cells, of(r["T"], r["op"], vllm), of(r["T"], r["op"], flashinfer)]))
    return lines


def layer_table(rows):
    """A row a batch: us a layer of each candidate, GB/s of the best of ours, best peer over it."""
    names = list(dict.fromkeys(r["candidate"] for r in rows))
    lines = [
        row(["batch", "MB", "us at 4.34 TB/s", *names, "GB/s", "% of ceiling", "best peer / ours"])
    ]
    lines.append(row("---" for _ in range(len(names) + 6)))
    for batch in dict.fromkeys(r["batch"] for r in rows):
        right = [r for r in rows if r["batch"] == batch and r.get("right")]
        us = {r["candidate"]: r["us"] for r in right}
        size = next(r["bytes"] for r in rows if r["batch"] == batch)
        best = min((us[n] for n in us if n.startswith("ours")), default=None)
        peer = min((us[n] for n in us if not n.startswith("ours")), default=None)
        lines.append(
            row(
                [
                    batch,
                    f"{size / 1e6:.1f}",
                    f"{size / CEILING * 1e6:.1f}",
                    *(f"{us[n]:.2f}" if n in us else "-" for n in names),
                    f"{size / best * 1e-3:.0f}" if best else "-",
                    f"{size / best * 1e8 / CEILING:.0f}" if best else "-",
                    f"{peer / best:.2f}" if best and peer else "-",
                ]
            )
        )
    return lines


def table_for(first):
    """What a file holds shows in the keys of its first record."""
    if "candidate" in first:
        return layer_table
    return verify_table if "maxq" in first else decode_table if "wl" in first else small_table


if __name__ == "__main__":
    for path in sys.argv[1:]:
        with open(path) as file:
            records = json.load(file)
        print("\n".join(table_for(records[0])(records)))
