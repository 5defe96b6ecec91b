"""Values of more than 2 GiB, over every backend of one host; by hand, for it needs 16 GiB and a minute.

python tests/large_values.py
"""

from __future__ import annotations

import torch

from spmd import Mesh, P, put

SIZE = (1 << 31) + 4096


def in_a_region(mesh: Mesh) -> tuple[int, int, int]:
    comm = mesh.comm()
    value = torch.zeros(SIZE, dtype=torch.uint8)
    value[-1] = comm.rank + 1
    comm.all_reduce(value)
    reduced = int(value[-1]), int(value[5])
    value.zero_()
    value[-2] = 9 * comm.rank
    comm.broadcast(value, src=1)
    return *reduced, int(value[-2])


if __name__ == "__main__":
    for backend in ("shm", "gloo"):
        with Mesh({"data": 2}, backend=backend) as mesh:
            whole = torch.zeros(SIZE, dtype=torch.uint8)
            whole[-1], whole[SIZE // 2] = 7, 5
            placed = put(whole, P("data"), mesh=mesh)
            assert torch.equal(placed.full(), whole)
            del placed, whole
            assert mesh.run(in_a_region, mesh) == [(3, 0, 9), (3, 0, 9)]
            print(f"{backend}: {SIZE} bytes placed, fetched, reduced and broadcast")
