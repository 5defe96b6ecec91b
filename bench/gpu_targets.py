"""The targets on a GPU, and what a run of `gpu.py` says of each: met, missed, or not measured and why.

Invariant: no target is met without a measurement. A target over several cases is missed as soon as one case misses it,
and met only if all were measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Found = dict[str, Any]

WIRES = ("float32", "bfloat16")
BUCKET_MIB = (1, 4, 25, 100)
LEAST_SHARE = 0.80  # of the bandwidth of a plain copy
MOST_OVER = {"plain torch": 1.03, "DDP on NCCL": 1.00}  # times as long as theirs a step may take
LEAST_ROUNDS = 5  # for a ratio to be believed
STEPS = 1000
MOST_LESS_FREE = 32 << 20  # bytes; a segment of torch's allocator has up to 20 MiB


class Verdict(NamedTuple):
    """One target: what it is about, what is wanted, "met", "missed" or "not measured", and the figure or why."""

    what: str
    target: str
    verdict: str
    figure: str

    def text(self) -> str:
        return f"{self.verdict:<12}  {self.what}: {self.figure} (target: {self.target})"


class Unmeasured(Exception):
    """There is no figure, and this is why."""


def verdicts(found: Found) -> list[Verdict]:
    """Every target, in the order of the suites.

    >>> verdicts({"suites": {}})[0].text()
    "not measured  pack, share of a plain copy's bandwidth: suite packing was not run (target: at least 80%)"
    """
    return [
        *(_all_cases(found, f"{name}, share of a plain copy's bandwidth", name, _share) for name in ("pack", "unpack")),
        _all_cases(found, "pack and unpack over torch._foreach_copy_ in and out", "", _over_foreach),
        _verdict(found, "capture", "capture of a step into a CUDA graph", "works", _captured),
        _verdict(found, "memory", f"memory over {STEPS:,} steps", _flat_target(), _flat),
        *(
            _verdict(
                found,
                model,
                f"whole step of the {model} over {peer}",
                f"at most {most:.2f}",
                lambda its, peer=peer, most=most: _over(its, peer, most),
            )
            for model in ("transformer", "cnn")
            for peer, most in MOST_OVER.items()
        ),
    ]


def case_name(wire: str, mib: int) -> str:
    return f"{wire} {mib} MiB"


# -- how a target is judged: whether it is met, and the figure --------------------------------------------------------


def _verdict(found: Found, suite: str, what: str, target: str, judge: Callable[[Found], tuple[bool, str]]) -> Verdict:
    try:
        met, figure = judge(_results(found, suite))
    except Unmeasured as why:
        return Verdict(what, target, "not measured", str(why) or _why(found, suite))
    return Verdict(what, target, "met" if met else "missed", figure)


def _results(found: Found, suite: str) -> Found:
    if "missing" in found.get("environment", {}):
        raise Unmeasured("there is no GPU that can be used")
    if found.get("quick"):
        raise Unmeasured("in a quick run models and rounds are small")
    if not found.get(suite):
        raise Unmeasured
    return found[suite]


def _why(found: Found, suite: str) -> str:
    """Why a suite did not give a result, as far as it is known."""
    how = found.get("suites", {}).get(suite)
    if how is None:
        return f"suite {suite} was not run"
    if "error" not in how:
        return f"suite {suite} ended without it"
    return ": ".join((f"suite {suite}", how["error"], *how.get("last lines", ())[-1:]))


def _all_cases(found: Found, what: str, name: str, judge: Callable[[Found, str], tuple[bool, float, str]]) -> Verdict:
    """A target that every bucket has to meet; the figure is that of the worst."""
    target = f"at least {LEAST_SHARE:.0%}" if name else "at most 1.00"

    def worst(its: Found) -> tuple[bool, str]:
        judged: list[tuple[bool, float, str]] = []
        missing = []
        for case in (case_name(wire, mib) for mib in BUCKET_MIB for wire in WIRES):
            try:
                met, badness, figure = judge(its.get(case, {}), name)
                judged.append((met, badness, f"{figure} for {case}"))
            except Unmeasured as why:
                missing.append(f"{case}: {str(why) or _why(found, 'packing')}")
        if missing and all(met for met, *_ in judged):
            raise Unmeasured("; ".join(missing))
        met, _, figure = max(judged, key=lambda one: one[1])
        return met, f"{figure}, the worst of {len(judged)}"

    return _verdict(found, "packing", what, target, worst)


def _share(case: Found, name: str) -> tuple[bool, float, str]:
    copy, its = _median(case, "copy"), _median(case, name)
    return copy / its >= LEAST_SHARE, -copy / its, f"{copy / its:.1%}"


def _over_foreach(case: Found, _: str) -> tuple[bool, float, str]:
    ours = _median(case, "pack") + _median(case, "unpack")
    ratio = ours / (_median(case, "foreach in") + _median(case, "foreach out"))
    return ratio <= 1, ratio, f"{ratio:.3f}"


def _median(case: Found, name: str) -> float:
    its = case.get("seconds", {}).get(name, case)
    if "median" not in its:
        raise Unmeasured(f"{name}: {its['error']}" if "error" in its else "")
    return its["median"]


def _captured(its: Found) -> tuple[bool, str]:
    if "result" not in its:
        raise Unmeasured
    return its["result"] == "works", its["result"]


def _flat_target() -> str:
    return f"torch gives out no byte more, the device has at most {MOST_LESS_FREE >> 20} MiB less free"


def _flat(its: Found) -> tuple[bool, str]:
    samples = its.get("samples", ())
    if len(samples) < 2:
        raise Unmeasured
    first, *later = samples
    more = max(sample["allocated"] for sample in later) - first["allocated"]
    less = first["free"] - min(sample["free"] for sample in later)
    met, done = more <= 0 and less <= MOST_LESS_FREE, later[-1]["step"]
    if met and done < STEPS:
        raise Unmeasured(f"there was time for {done:,} steps only")
    figure = f"{max(more, 0):,} bytes more and {max(less, 0) / 2**20:.1f} MiB less free"
    return met, f"{figure} than after {first['step']:,} steps, at most, up to {done:,}"


def _over(its: Found, peer: str, most: float) -> tuple[bool, str]:
    errors, ratio = "; ".join(_errors(its, ("spmd", peer))), its.get(f"spmd over {peer}")
    if errors or ratio is None:  # a contender that failed in a later round has a ratio, too
        raise Unmeasured(errors)
    if its["rounds"] < LEAST_ROUNDS:
        raise Unmeasured(f"there was time for {its['rounds']} rounds only")
    return ratio <= most, f"{ratio:.3f}"


def _errors(its: Found, contenders: tuple[str, ...]) -> Iterator[str]:
    for name in contenders:
        if "error" in its.get(name, {}):
            yield f"{name}: {its[name]['error']}"
