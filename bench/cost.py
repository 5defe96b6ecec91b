"""Writes docs/cost.md from the results of the scaling bench.

    python bench/cost.py                     from bench/results/
    python bench/cost.py folder page.md      from and to elsewhere

The first part repeats what was measured and fitted. The second is arithmetic on stated assumptions.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import fit
import results
from targets import size_text, time_text

PAGE = results.FOLDER.parent.parent / "docs" / "cost.md"
HOSTS = (1, 2, 8, 64, 512, 4096)
GRADIENTS = (4 * 10**6, 4 * 10**8, 28 * 10**9)  # bytes: a million, a hundred million, seven thousand million parameters
BUCKET = 25 << 20
# name -> (seconds a message, bytes a second per host and direction, seconds of an all-reduce's start)
NETWORKS = {
    "Gloo, 10 Gbit/s Ethernet, TCP": (50e-6, 1.1e9, 100e-6),
    "Gloo, 100 Gbit/s Ethernet, TCP": (30e-6, 4e9, 100e-6),
    "NCCL, 400 Gbit/s InfiniBand": (5e-6, 45e9, 20e-6),
}


def ring(hosts: int, nbytes: float, latency: float, bandwidth: float) -> float:
    """Seconds of a ring all-reduce: 2 (H - 1) messages, in which 2 (H - 1)/H of the bytes leave every host."""
    return 2 * (hosts - 1) * (latency + nbytes / hosts / bandwidth)


def tree(hosts: int, nbytes: float, latency: float, bandwidth: float) -> float:
    """Seconds of a pipelined double binary tree: 2 log2(H) messages deep, and each byte leaves every host twice."""
    depth = max(1, (hosts - 1).bit_length())
    return (2 * depth * latency + 2 * nbytes / bandwidth) if hosts > 1 else 0.0


def across_hosts(hosts: int, nbytes: float, network: str) -> tuple[float, str]:
    """Seconds of the cheaper of the two, and which it is; Gloo has only the ring."""
    latency, bandwidth, start = NETWORKS[network]
    ways = {"ring": ring(hosts, nbytes, latency, bandwidth)}
    if network.startswith("NCCL"):
        ways["tree"] = tree(hosts, nbytes, latency, bandwidth)
    way = min(ways, key=lambda name: ways[name])
    return (ways[way] + start if hosts > 1 else 0.0), way


def page(suite: dict[str, Any]) -> str:
    return "\n".join([*measured(suite), *modelled(suite), "", *control_plane()]) + "\n"


def control_plane() -> list[str]:
    """What a driver of many hosts costs."""
    return [
        "## A driver of many hosts",
        "",
        "`bench/control_plane.py`, on hosts that only speak the protocol and share this machine's cores with the",
        "driver; so what they take is in the figures. The lines at the end carry them to 1,000 hosts on paper. A",
        "call costs one message a host, and one answer a host where its ranks answer alike, as they mostly do:",
        "else one for each answer that differs. A real host that starts, or comes again, imports torch first, which",
        "takes seconds.",
        "",
        "The driver speaks to each host itself: one thread reads all links, and answers that hosts give alike are",
        "noted once. Of a rank elsewhere it has no file but the connection to the store that ranks meet in, and no",
        "thread.",
        "",
        "```text",
        (results.FOLDER / "control_plane.txt").read_text().rstrip(),
        "```",
    ]


def measured(suite: dict[str, Any]) -> list[str]:
    machine = suite["machine"]
    found = suite["versions"]
    lines = [
        "# What a step costs",
        "",
        "`make bench` measures, fits and writes this page (`python bench/cost.py` writes it again from",
        "`bench/results/scaling.json`). Sizes are 10^3 to 10^8 parameters of float32.",
        "",
        "## On one host: measured, and a model fitted to it",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB, Linux {machine['kernel']}; "
        f"Python {machine['python']}, torch {found['torch']}. One thread a rank.",
        "Medians of the slowest rank's time. More ranks than cores share the cores, so more ranks cost more here.",
        "",
        "    time = latency(ranks) + bytes / bandwidth(ranks)",
        "",
        "A byte's speed depends on where it lies (in which cache, or in memory), so the bytes of one operation are",
        "charged in stretches, each at its own bandwidth. Small all-reduces have one phase and larger ones two, hence",
        "two tables. For each number of ranks latency and bandwidths are the non-negative numbers with the smallest",
        "squared relative errors. The ends of the stretches are those of the measured sizes that best predict points",
        "which were left out of the fit (`bench/fit.py`).",
    ]
    for work, title, unit in (
        ("all_reduce", "All-reduce of a buffer in the arena", "bytes"),
        ("train_step", "Train step (gradients, sharded AdamW) of one square weight matrix, 16 samples", "parameters"),
    ):
        if work not in suite["fits"]:
            continue
        found_fit = suite["fits"][work]
        lines += ["", f"### {title}"]
        for way in found_fit["ways"]:
            lines += ["", *way_table(way, unit, edges=len(found_fit["ways"]) > 1)]
        lines += ["", *times(suite["cases"], work, unit), ""]
        lines.append(
            f"Measured (fitted). The fit's error is {found_fit['median_error']:.0%} in the median and "
            f"{found_fit['largest_error']:.0%} at most"
            + (
                f"; of points left out of the straight lines, one at a time, {found_fit['median_unseen']:.0%} and "
                f"{found_fit['largest_unseen']:.0%}."
                if found_fit["median_unseen"] is not None
                else "."
            )
        )
    return lines


def way_table(way: dict[str, Any], unit: str, *, edges: bool) -> list[str]:
    """Latency and bandwidths of operations that take one code path, a row for each number of ranks.

    Args:
        edges: also say above which size they take it.
    """
    lines = [f"| ranks |{' above |' * edges} latency | bandwidth |", f"|---|{'---|' * edges}---|---|"]
    for ranks, own in way["by_ranks"].items():
        above = f" {amount(own['above'], unit)} |" * edges
        latency, *rest = own["coefficients"]
        ends = [*(f" up to {amount(knee, unit)}" for knee in own["knees"]), " beyond" if own["knees"] else ""]
        stretches = ", ".join(f"{rate(each, unit)}{end}" for each, end in zip(rest, ends, strict=True))
        lines.append(f"| {ranks} |{above} {time_text(latency)} | {stretches} |")
    return lines


def times(cases: list[dict[str, Any]], work: str, unit: str) -> list[str]:
    """Measured and fitted times, a row a size and a column for each number of ranks."""
    cells = {(case["size"], case["ranks"]): case for case in cases if case["work"] == work}
    sizes, ranks = sorted({size for size, _ in cells}), sorted({n for _, n in cells})
    lines = [
        f"| {unit} | {' | '.join('1 rank' if n == 1 else f'{n} ranks' for n in ranks)} |",
        f"|---|{'---|' * len(ranks)}",
    ]
    for size in sizes:
        row = [
            f"{time_text(case['median'])} ({time_text(case['predicted'])})" if (case := cells.get((size, n))) else ""
            for n in ranks
        ]
        lines.append(f"| {amount(size, unit)} | {' | '.join(row)} |")
    return lines


def amount(size: float, unit: str) -> str:
    """A number of bytes, in short, or of parameters.

    >>> amount(32768, "bytes"), amount(4e6, "bytes"), amount(3e5, "parameters")
    ('32 KiB', '4 MB', '300,000')
    """
    if unit != "bytes" or size < 1000:
        return f"{size:,.0f}" + (" B" if unit == "bytes" else "")
    if size % 4096 == 0 and size < 1e6:
        return size_text(round(size))
    return f"{size / 1e6:.3g} MB" if size >= 1e6 else f"{size / 1e3:.3g} kB"


def rate(seconds: float, unit: str) -> str:
    """How many a second; a stretch that costs no time is "free"."""
    if not seconds:
        return "free"
    return f"{1e-9 / seconds:.3g} GB/s" if unit == "bytes" else f"{1e-6 / seconds:.3g} million/s"


def modelled(suite: dict[str, Any]) -> list[str]:
    lines = [
        "",
        "## On thousands of hosts: a model, not a measurement",
        "",
        "Nothing in this section was measured. It is arithmetic on these assumptions:",
        "",
        "* One all-reduce over H hosts, one leader a host; the host's own ranks reduce first, at the cost above.",
        "* Ring: `2 (H - 1) (latency + bytes / H / bandwidth)`. Bytes that leave a host tend to twice the gradients,",
        "  whatever H is, and messages grow with H.",
        "* Tree (NCCL's double binary tree, pipelined): `2 log2(H) latency + 2 bytes / bandwidth`.",
        "* Gloo always goes round the ring; NCCL takes the cheaper of the two.",
        "* Links are full duplex and not shared: no congestion, no stragglers, no failures. Clusters have all three.",
        "* Nothing overlaps. `data_parallel` reduces buckets during the backward pass, so the times below are the most",
        "  that communication can add to a step. But each bucket costs a latency, instead of one for all.",
        "",
        "| network | latency of a message | bandwidth per host and direction | start of an operation |",
        "|---|---|---|---|",
    ]
    for name, (latency, bandwidth, start) in NETWORKS.items():
        lines.append(f"| {name} | {time_text(latency)} | {bandwidth / 1e9:g} GB/s | {time_text(start)} |")
    lines += ["", "Seconds of one all-reduce of all gradients (float32), across hosts only:"]
    for nbytes in GRADIENTS:
        lines += ["", f"### {nbytes // 4:,} parameters ({nbytes / 1e6:,.0f} MB)", ""]
        lines += [f"| network | {' | '.join(f'{h:,} hosts' for h in HOSTS[1:])} |", f"|---|{'---|' * len(HOSTS[1:])}"]
        for name in NETWORKS:
            row = [
                f"{time_text(seconds)}, {way}" for h in HOSTS[1:] for seconds, way in [across_hosts(h, nbytes, name)]
            ]
            lines.append(f"| {name} | {' | '.join(row)} |")
    all_reduce = suite["fits"].get("all_reduce")
    if all_reduce:
        most = max(all_reduce["ways"][-1]["by_ranks"], key=int)
        seconds = fit.predicted_for(all_reduce, int(most), 4 * 10**8)
        lines += [
            "",
            f"Within a host, before and after: {most} ranks on the machine above all-reduce a hundred million",
            f"parameters in {time_text(seconds)} by the fitted model.",
        ]
    lines += [
        "",
        "What follows from it:",
        "",
        "* With large gradients bandwidth counts, and the number of hosts hardly does: `wire_dtype=torch.bfloat16`",
        "  halves the time.",
        "* With small gradients a ring's latency grows in proportion to the hosts: at thousands of them a tree, or",
        "  fewer and larger steps, is the only way. Over Gloo, which has no tree, keep to hundreds of hosts.",
        "* Reducing on each host first divides the ring's length, and the bytes through the network card, by the",
        "  number of ranks a host has.",
        f"* A bucket of {BUCKET >> 20} MiB should take longer to send than its latency. On a ring of H hosts it does",
        "  while `bytes / H / bandwidth > latency`:",
        *(
            f"  {BUCKET / bandwidth / latency:,.0f} hosts for {name};"
            for name, (latency, bandwidth, _) in NETWORKS.items()
        ),
        "  beyond that, larger buckets (`data_parallel(bucket_mb=...)`).",
    ]
    return lines


def main(arguments: list[str]) -> None:
    folder = Path(arguments[0]) if arguments else results.FOLDER
    path = Path(arguments[1]) if len(arguments) > 1 else PAGE
    suites = results.load(folder)
    if "scaling" not in suites:
        print(f"{path} stays as it is: the scaling suite was not measured")
        return
    path.write_text(page(suites["scaling"]))
    print(f"wrote {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
