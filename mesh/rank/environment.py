"""What libraries read from the environment as a process starts, and ranks need set another way.

Source: the GNU C library's manual, "Tunables"; libgomp's, "Environment Variables".
"""

from __future__ import annotations

from collections.abc import Mapping

from ...kernels import copying

_PAGES = "glibc.malloc.hugetlb=1"
_SPINS = 10_000  # with 1,000, steps of a CNN on a quiet machine took a tenth longer: threads slept within them


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """What is set in the environment of ranks that are about to start; the user's own settings win.

    GLIBC_TUNABLES sets how large copies are made, and asks for pages of 2 MiB if the kernel has them, which map five
    times as fast. GOMP_SPINCOUNT is how long OpenMP's threads wait for the next operation before they sleep: by itself
    that is for milliseconds, on cores that a driver, readers and other ranks need.

    >>> sorted(environment({})), sorted(environment({"OMP_WAIT_POLICY": "active"}))
    (['GLIBC_TUNABLES', 'GOMP_SPINCOUNT'], ['GLIBC_TUNABLES'])
    """
    found = {"GLIBC_TUNABLES": ":".join(filter(None, [copying.TUNABLES, _PAGES, own.get("GLIBC_TUNABLES")]))}
    return found if own.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} else {**found, "GOMP_SPINCOUNT": str(_SPINS)}
