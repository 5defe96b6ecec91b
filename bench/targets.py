"""Every target beside what was measured. All ratios are of medians that were measured in turn in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Record = dict[str, Any]
KIB = 1024
SIXTY_FOUR_MIB = 64 << 20
# model -> how many times as fast as DDP on Gloo
FASTER_THAN_DDP = {"mlp_1k": 2.0, "mlp_4k": 2.0, "encoder": 1.1, "cnn": 1.05}


class Row(NamedTuple):
    """One target: what was measured, as text; the target; whether it is met (None: reported without a target)."""

    what: str
    measured: str
    target: str = ""
    met: bool | None = None


def median(record: Record, contender: str) -> float | None:
    found = record["quartiles"].get(contender)
    return None if found is None else found[1]


def best(record: Record, start: str) -> tuple[str, float] | None:
    """The fastest contender whose name starts so, and its median."""
    found = [(name, values[1]) for name, values in record["quartiles"].items() if name.startswith(start)]
    return min(found, key=lambda pair: pair[1]) if found else None


def rows(suites: dict[str, Record]) -> list[Row]:
    """All targets of the suites that were measured."""
    kinds: dict[str, Callable[[Record], Iterator[Row]]] = {
        "all_reduce": all_reduce,
        "train_step": train_step,
        "layer": layer,
        "driver": driver,
        "memory": memory,
        "scaling": scaling,
    }
    return [row for name, of in kinds.items() if name in suites for row in of(suites[name])]


def size_text(size: int) -> str:
    """A number of bytes, with a short unit.

    >>> size_text(4), size_text(65536), size_text(1 << 26)
    ('4 B', '64 KiB', '64 MiB')
    """
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:g} {unit}"
    return f"{size} B"


def time_text(seconds: float) -> str:
    """A time with three digits and its unit.

    >>> time_text(2.5e-6), time_text(0.0123), time_text(3)
    ('2.5 us', '12.3 ms', '3 s')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale or unit == "us":
            return f"{seconds / scale:.3g} {unit}"
    raise AssertionError


def all_reduce(suite: Record) -> Iterator[Row]:
    for ranks in sorted({record["ranks"] for record in suite["cases"]}):
        of_size = {record["case"]: record for record in suite["cases"] if record["ranks"] == ranks}
        for ours, peer, least, most, wanted in (
            ("ours, in the arena, given up", "gloo", 4, SIXTY_FOUR_MIB, 10.0),
            ("ours, in the arena, given up", "open mpi", 256 * KIB, SIXTY_FOUR_MIB, 4.0),
            ("ours, in the arena, kept", "gloo", 4, SIXTY_FOUR_MIB, 10.0),
            ("ours, in the arena, kept", "open mpi", 256 * KIB, SIXTY_FOUR_MIB, 4.0),
            ("ours, in the arena, kept", "open mpi", 4, KIB - 1, 1 / 3),
            ("ours, in the arena, overwritten", "gloo", 4, SIXTY_FOUR_MIB, 10.0),
            ("ours, in the arena, overwritten", "open mpi", 256 * KIB, SIXTY_FOUR_MIB, 4.0),
            ("ours, in the arena, overwritten", "open mpi", 4, KIB - 1, 1 / 2),
            ("ours, any tensor", "gloo", 4, SIXTY_FOUR_MIB, 5.0),
            ("ours, any tensor", "open mpi", 4096 * KIB, SIXTY_FOUR_MIB, 1.0),
            ("adding alone", "gloo", 256 * KIB, SIXTY_FOUR_MIB, None),
            ("adding alone", "open mpi", 256 * KIB, SIXTY_FOUR_MIB, None),
        ):
            ratios = {}
            for size, record in of_size.items():
                theirs, own = best(record, peer), median(record, ours)
                if least <= size <= most and theirs and own:
                    ratios[size] = theirs[1] / own
            if not ratios:
                continue
            worst = min(ratios, key=lambda size: ratios[size])
            finest = max(ratios, key=lambda size: ratios[size])
            sizes = f"{size_text(min(ratios))} to {size_text(max(ratios))}"
            what = f"all-reduce, {ours}, against {peer}, {sizes}, {ranks} ranks"
            said = f"{ratios[worst]:.2f}x at {size_text(worst)}, {ratios[finest]:.2f}x at {size_text(finest)}"
            if ranks == 2 and wanted is not None:
                yield Row(what, said, f"at least {wanted:.3g}x", ratios[worst] >= wanted)
            else:
                yield Row(what, said)


def train_step(suite: Record) -> Iterator[Row]:
    for record in suite["cases"]:
        model, ranks = record["case"].partition(":")[2], record["ranks"]
        ours, own, ddp = best(record, "ours"), median(record, "ours"), best(record, "ddp")
        if ours is None or own is None or ddp is None:
            continue
        judged = ranks == 2
        wanted = FASTER_THAN_DDP.get(model, 1.0)
        ratio = ddp[1] / ours[1]
        said = f"{ratio:.2f}x ({ours[0]} {time_text(ours[1])}, {ddp[0]} {time_text(ddp[1])})"
        target = f"at least {wanted:g}x" if judged else "ahead"
        yield Row(
            f"step of {model}, {ranks} ranks, our best against DDP's best",
            said,
            target,
            ratio >= (wanted if judged else 1),
        )
        plain_ddp = median(record, "ddp")
        if plain_ddp is not None:
            default = median(record, "ours, sharded, fused") or own
            said = f"{plain_ddp / default:.2f}x (ours {time_text(default)}, ddp {time_text(plain_ddp)})"
            yield Row(f"step of {model}, {ranks} ranks, both with default settings", said)
        floor = median(record, "forward and backward alone")
        one = best(record, "one process")
        if floor is not None:
            said = f"{ddp[1] / floor:.2f}x" + (f", one process {one[1] / floor:.2f}x" if one else "")
            yield Row(f"step of {model}, {ranks} ranks, forward and backward alone against DDP's best", said)
        for peer, target in (("one process", "at least 1x"), ("jax", "")):
            theirs = best(record, peer)
            if theirs is not None:
                ratio = theirs[1] / ours[1]
                said = f"{ratio:.2f}x ({theirs[0]} {time_text(theirs[1])})"
                yield Row(
                    f"step of {model}, {ranks} ranks, our best against {peer}",
                    said,
                    target,
                    ratio >= 1 if target else None,
                )


def layer(suite: Record) -> Iterator[Row]:
    for record in suite["cases"]:
        model = record["case"].partition(":")[2]
        for flags in ("", ", fused"):
            for ours in (f"ours{flags}", f"ours{flags}, donated"):
                own = median(record, ours)
                for plain, wanted in ((f"plain{flags}", 1.03), (f"plain{flags}, in our process", None)):
                    theirs = median(record, plain)
                    if own and theirs:
                        said = f"{own / theirs:.3f}x ({ours} {time_text(own)}, {plain} {time_text(theirs)})"
                        target = f"at most {wanted}x" if wanted else ""
                        met = own / theirs <= wanted if wanted else None
                        yield Row(f"the functional layer alone, {model}, one rank", said, target, met)


def driver(suite: Record) -> Iterator[Row]:
    found = {name: q[1] for record in suite["cases"] for name, q in record["quartiles"].items()}
    if "no-op, answered" in found:
        seconds = found["no-op, answered"]
        yield Row("no-op call on 4 ranks, answered", time_text(seconds), "under 300 us", seconds < 300e-6)
    if "no-op, in flight" in found:
        seconds = found["no-op, in flight"]
        what = "no-op call on 4 ranks, each call fed with the last one's result"
        yield Row(what, time_text(seconds), "under 300 us", seconds < 300e-6)
    if "four bare pipes" in found:
        yield Row("a byte to 4 processes of bare Python, and back", time_text(found["four bare pipes"]))
    if "four ranks" in found and "import torch" in found:
        bare, whole = found["import torch"], found["four ranks"]
        if "import spmd" in found:
            seconds = whole - found["import spmd"]
            said = f"{seconds / bare:.2f}x ({time_text(seconds)}, import torch {time_text(bare)})"
            yield Row("four ranks, once spmd is imported", said, "at most 1.5x", seconds <= 1.5 * bare)
        said = f"{whole / bare:.2f}x ({time_text(whole)}, import torch {time_text(bare)})"
        yield Row("four ranks, from the start of Python", said)
    if "replacement" in found:
        seconds = found["replacement"]
        what = "from the kill of a rank until all ranks have answered again"
        yield Row(what, time_text(seconds), "under 100 ms", seconds < 0.1)


def memory(suite: Record) -> Iterator[Row]:
    found = {record["case"]: record for record in suite["cases"]}
    alone = found.get("one process")
    for name, record in found.items():
        if alone is None or name == "one process":
            continue
        for when in ("between_steps", "within_steps"):
            ratio = record[when] / alone[when]
            said = f"{ratio:.2f}x ({record[when] / 1e9:.2f} GB, one process {alone[when] / 1e9:.2f} GB)"
            judged = name.startswith("ours") and when == "between_steps"
            yield Row(
                f"memory of {name}, {when.replace('_', ' ')}",
                said,
                "at most 1.7x" if judged else "",
                ratio <= 1.7 if judged else None,
            )


def scaling(suite: Record) -> Iterator[Row]:
    for name, fit in suite.get("fits", {}).items():
        worst = fit["largest_error"]
        said = f"median error {fit['median_error']:.0%}, largest {worst:.0%}"
        yield Row(f"fitted time of {name}", said, "within 20%", worst <= 0.2)
