"""The collectives of every backend at 1 to 4 ranks, against the oracle."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from bodies import NUMELS, SHAPE, at_sizes, attempt, length, mixed_outstanding, reduce_all_ways, unequal_pieces
from cases import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import DTYPES, OPS, bits, exact, meaningful, reduced, same, value

from spmd import Mesh

cloudpickle.register_pickle_by_value(sys.modules[__name__])

BACKENDS = ("shm", "gloo")
RANKS = (1, 2, 3, 4)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every backend with every number of ranks; over Gloo, which adds along a ring, four do what three do."""
    choices = {name: every for name, every in (("backend", BACKENDS), ("size", RANKS)) if name in metafunc.fixturenames}
    if choices:
        metafunc.parametrize([*choices], cases(lambda *case: case != ("gloo", 4), *choices.values()))


@pytest.fixture
def mesh(shared_mesh: Callable[..., Mesh], backend: str, size: int) -> Mesh:
    return shared_mesh({"data": size}, backend=backend)


# -- every op with every dtype -----------------------------------------------------------------------------------------


def test_ops_and_dtypes(mesh: Mesh, size: int) -> None:
    cases = [(op, dtype) for op in OPS for dtype in DTYPES]
    answers = mesh.run(reduce_all_ways, mesh, cases)
    wrong = []
    for index, (op, dtype) in enumerate(cases):
        for rank in range(size):
            got = answers[rank][index]
            if not meaningful(op, dtype):
                if not (isinstance(got, str) and op in got and str(dtype) in got):
                    wrong.append(f"{op} of {dtype} on rank {rank} is not refused: {got}")
                continue
            if isinstance(got, str):
                wrong.append(f"{op} of {dtype} on rank {rank}: {got}")
                continue
            inputs = [value(dtype, SHAPE, r) for r in range(size)]
            total = reduced(inputs, op)
            piece = reduced([value(dtype, SHAPE, r, rank) for r in range(size)], op)
            expected = [total, total, total if rank == size - 1 else inputs[rank], piece]
            for name, a, b in zip(
                ("all_reduce", "all_reduced", "reduce", "reduce_scatter"), got, expected, strict=True
            ):
                fine = same(a, b) if exact(op, dtype) else torch.allclose(a, b)
                if not fine:
                    wrong.append(f"{name} {op} of {dtype} on rank {rank}: {a.flatten()[:3]}, not {b.flatten()[:3]}")
        # Where NumPy rounds in another way, the ranks still agree bit for bit.
        totals = {bits(found[index][0]) for found in answers if isinstance(found[index], list)}
        if meaningful(op, dtype) and len(totals) != 1:
            wrong.append(f"{op} of {dtype} differs between ranks")
    assert not wrong, "\n".join(wrong[:20])


def test_unknown_op_and_dtype(mesh: Mesh) -> None:
    def body() -> list[Any]:
        comm = mesh.comm()
        return [
            attempt(lambda: comm.all_reduce(torch.ones(2), "median")),
            attempt(lambda: comm.all_reduce(torch.ones(2).to(torch.float8_e4m3fn))),
        ]

    for unknown, eight in mesh.run(body):
        assert "'median'" in unknown
        assert "'sum'" in unknown  # what there is
        assert "float8" in eight


def test_nan_and_infinity(mesh: Mesh, size: int) -> None:
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0])

    def body() -> list[torch.Tensor]:
        comm = mesh.comm()
        mine = torch.roll(special, comm.rank)
        return [comm.all_reduced(mine, op).clone() for op in ("sum", "min", "max", "product")]

    for got in mesh.run(body):
        inputs = [torch.roll(special, rank) for rank in range(size)]
        for op, tensor in zip(("sum", "min", "max", "product"), got, strict=True):
            assert torch.equal(tensor.isnan(), reduced(inputs, op).isnan())
            assert torch.equal(tensor.nan_to_num(), reduced(inputs, op).nan_to_num())


# -- layouts of memory -------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda t: t,
    "every second": lambda t: t[:, :, ::2],
    "from the middle": lambda t: t[1:2, 1:, 3:],
    "transposed": lambda t: t.mT,
    "permuted": lambda t: t.permute(2, 0, 1),
    "channels last": lambda t: t.reshape(2, 2, 2, 6).contiguous(memory_format=torch.channels_last),
    "0-dim": lambda t: t[0, 1, 2],
    "empty": lambda t: t[:, :0],
    "empty 1-dim": lambda t: t.view(-1)[:0],
    "leaf": lambda t: t.clone().requires_grad_(t.is_floating_point()),
    "transposed leaf": lambda t: t.clone().mT.detach().requires_grad_(t.is_floating_point()),
    "conjugated": lambda t: t.to(torch.complex64).mul(1 + 2j).conj(),
    "negated": lambda t: t.to(torch.complex64).mul(1 + 2j).conj().imag,
    "made in inference mode": torch.inference_mode()(torch.clone),
}
COPIES = ("channels last", "leaf", "transposed leaf", "conjugated", "negated", "made in inference mode")


def laid_out(name: str, rank: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(the memory, a view of it laid out so)."""
    base = value(torch.float32, (2, 4, 6), rank, seed)
    view = LAYOUTS[name](base)
    return base, view


def on_layout(mesh: Mesh, name: str) -> dict[str, Any]:
    comm = mesh.comm()
    rank, size = comm.rank, comm.size
    found: dict[str, Any] = {}

    def changed(operation: str, act: Callable[[torch.Tensor], Any]) -> None:
        base, view = laid_out(name, rank)
        act(view)
        found[operation] = (base.clone(), view.detach().resolve_conj().resolve_neg().clone())

    def several(seed: int) -> list[torch.Tensor]:
        return [laid_out(name, rank, seed + i)[1] for i in range(size)]

    def filled(operation: str, act: Callable[[list[torch.Tensor]], Any]) -> None:
        outs = several(50)
        act(outs)
        found[operation] = [out.detach().resolve_conj().resolve_neg().clone() for out in outs]

    mine = laid_out(name, rank)[1]
    changed("all_reduce", lambda t: comm.all_reduce(t))
    changed("reduce", lambda t: comm.reduce(t, size - 1, "avg"))
    changed("broadcast", lambda t: comm.broadcast(t, size - 1))
    changed("scatter", lambda t: comm.scatter(t, several(10) if rank == 0 else None))
    changed("reduce_scatter", lambda t: comm.reduce_scatter(t, several(10)))
    filled("all_gather", lambda outs: comm.all_gather(outs, mine))
    filled("all_to_all", lambda outs: comm.all_to_all(outs, several(10)))
    filled("gather", lambda outs: comm.gather(mine, outs if rank == size - 1 else None, size - 1))
    found["all_reduced"] = comm.all_reduced(mine).clone()
    return found


def test_sums_of_what_was_made_in_inference_mode_are_tensors_of_the_caller(mesh: Mesh) -> None:
    """A gradient may need them; 90,000 elements go another way than a few."""

    def body(numel: int) -> list[bool]:
        with torch.inference_mode():
            given = torch.ones(numel)
        comm = mesh.comm()
        made = [comm.all_reduced(given), comm.all_reduced(given, async_op=True).wait()]
        return [one.is_inference() for one in made]

    for numel in (3, 90_000):
        assert not any(map(any, mesh.run(body, numel)))


def test_reduce_scatter_into_what_it_reads(mesh: Mesh, size: int) -> None:
    """The output may be one of the inputs, or lie among them; 40,000 elements go another way than a few."""

    def body(numel: int) -> list[float]:
        comm = mesh.comm()
        found = []
        for which in range(size):
            whole = torch.arange(size * numel, dtype=torch.float64) * (comm.rank + 1)
            ins = list(whole.split(numel))
            comm.reduce_scatter(ins[which], ins)
            expected = torch.arange(size * numel, dtype=torch.float64).split(numel)[comm.rank]
            found.append(float((ins[which] - expected * (size * (size + 1) // 2)).abs().max()))
        return found

    for numel in (3, 90_000):
        assert mesh.run(body, numel) == [[0.0] * size] * size


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(mesh: Mesh, size: int, name: str) -> None:
    answers = mesh.run(on_layout, mesh, name)

    def plain(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().resolve_conj().resolve_neg()

    inputs = [plain(laid_out(name, rank)[1]) for rank in range(size)]
    pieces = [[plain(laid_out(name, rank, 10 + i)[1]) for i in range(size)] for rank in range(size)]
    for rank, found in enumerate(answers):
        untouched = [plain(laid_out(name, rank, 50 + i)[1]) for i in range(size)]
        expected = {
            "all_reduce": reduced(inputs, "sum"),
            "reduce": reduced(inputs, "avg") if rank == size - 1 else inputs[rank],
            "broadcast": inputs[size - 1],
            "scatter": pieces[0][rank],
            "reduce_scatter": reduced([pieces[r][rank] for r in range(size)], "sum"),
        }
        for operation, result in expected.items():
            base, view = found[operation]
            assert view.shape == result.shape
            assert torch.allclose(view, result), f"{operation} on rank {rank}"
            if name not in COPIES:
                memory, part = laid_out(name, rank)
                part.copy_(view)
                assert same(base, memory), f"{operation} on rank {rank} wrote beside the tensor"
        lists = {
            "all_gather": inputs,
            "all_to_all": [pieces[r][rank] for r in range(size)],
            "gather": inputs if rank == size - 1 else untouched,
        }
        for operation, results in lists.items():
            for got, result in zip(found[operation], results, strict=True):
                assert torch.equal(got, result), f"{operation} on rank {rank}"
        assert torch.allclose(found["all_reduced"], reduced(inputs, "sum"))


# -- pieces of unequal size --------------------------------------------------------------------------------------------


def test_unequal_pieces(mesh: Mesh, size: int) -> None:
    dtype = torch.float64
    for rank, found in enumerate(mesh.run(unequal_pieces, mesh)):
        whole = [value(dtype, (length(r, 0),), r) for r in range(size)]
        nothing = [torch.full((length(r, 0),), -1.0, dtype=dtype) for r in range(size)]
        expected = {
            "gather": whole if rank == 0 else nothing,
            "all_gather": whole,
            "scatter": [value(dtype, (length(size - 1, rank),), size - 1, rank)],
            "all_to_all": [value(dtype, (length(r, rank),), r, rank) for r in range(size)],
        }
        for operation, tensors in expected.items():
            for got, tensor in zip(found[operation], tensors, strict=True):
                assert same(got, tensor), f"{operation} on rank {rank}"


def test_bytes_of_any_length(mesh: Mesh, size: int) -> None:
    def data(rank: int) -> bytes:
        return b"" if rank == 1 else bytes([rank]) * (1 + 300_000 * (rank % 2) + rank)

    assert (
        mesh.run(lambda: mesh.comm().all_gather_bytes(data(mesh.comm().rank)))
        == [[data(rank) for rank in range(size)]] * size
    )


def test_barrier_waits_for_all(mesh: Mesh, size: int) -> None:
    def body() -> list[tuple[float, float]]:
        import time

        comm = mesh.comm()
        comm.barrier()
        times = []
        for late in range(comm.size):
            if comm.rank == late:
                time.sleep(0.01)
            came = time.monotonic()
            comm.barrier()
            times.append((came, time.monotonic()))
        return times

    for turn in zip(*mesh.run(body), strict=True):
        assert max(came for came, _ in turn) <= min(left for _, left in turn)


# -- sizes around the thresholds ---------------------------------------------------------------------------------------


# In float32: one phase ends at 8192 elements over a network and at 32768 (two ranks), 87040 (three) or 65536 (four) in
# shared memory, slices are cut at multiples of 64, blocks of 65536 are added at once.
def test_sizes(mesh: Mesh, size: int) -> None:
    answers = mesh.run(at_sizes, mesh)
    for index, numel in enumerate(NUMELS):
        inputs = [value(torch.float32, (numel,), rank) for rank in range(size)]
        total = reduced(inputs, "sum")
        for rank in range(size):
            got, resident_unchanged = answers[rank][index]
            piece = reduced([tensor + rank for tensor in inputs], "sum")
            expected = [total, total if rank == 0 else inputs[rank], inputs[-1], piece, total, total]
            assert got == [bits(tensor) for tensor in expected], f"{numel} elements on rank {rank}"
            assert resident_unchanged


# -- asynchronous operations -------------------------------------------------------------------------------------------


def many_outstanding(mesh: Mesh, count: int) -> tuple[list[float], list[float], bool, bool]:
    comm = mesh.comm()
    tensors = [torch.tensor([float(comm.rank), i]) for i in range(count)]
    works = []
    results = []
    for i, tensor in enumerate(tensors):
        works.append(comm.all_reduce(tensor, async_op=True))
        results.append(comm.all_reduced(torch.tensor(float(i + comm.rank)), "max", async_op=True))
    order = np.random.default_rng(comm.rank).permutation(count)  # another on each rank
    for i in order:
        results[i].wait()
    for i in order:
        works[i].wait()
    return (
        [float(tensor.sum()) for tensor in tensors],
        [float(work.wait()) for work in results],
        all(work.is_completed() for work in works),
        works[0].wait() is None,
    )


def test_many_outstanding(mesh: Mesh, size: int, backend: str) -> None:
    """A thousand operations; over Gloo, which is slow at it, so many between two ranks only."""
    ranks, count = sum(range(size)), 100 if backend == "gloo" and size > 2 else 500
    for sums, maxima, completed, nothing in mesh.run(many_outstanding, mesh, count):
        assert sums == [ranks + i * size for i in range(count)]
        assert maxima == [i + size - 1 for i in range(count)]
        assert completed
        assert nothing


def test_mixed_outstanding(mesh: Mesh, size: int) -> None:
    expected = []
    for turn in range(12):
        inputs = [value(torch.float32, ((5, 9000, 90_000)[turn % 3],), rank, turn) for rank in range(size)]
        expected += [bits(tensor) for tensor in (*inputs, reduced(inputs, "sum"), inputs[turn % size])]
    assert mesh.run(mixed_outstanding, mesh) == [expected] * size


def one_after_another(mesh: Mesh) -> dict[str, list[float]]:
    """What operations on the same memory find, of which none is waited for before all are started."""
    comm, found = mesh.comm(), {}
    for name, numel in (("small", 6), ("large", 90_000)):
        whole = torch.full((numel * comm.size,), -1.0)
        parts = list(whole.split(numel))
        part, everyone = parts[-1].fill_(comm.rank + 1), [torch.empty(numel) for _ in range(comm.size)]
        apart = torch.full((2,), float(comm.rank))
        works = [
            comm.all_reduce(part, async_op=True),
            comm.all_gather(everyone, part, async_op=True),
            comm.all_reduce(part[::2], async_op=True),  # strided, and only some of it
            comm.all_reduce(apart, async_op=True),
            comm.broadcast(whole, 0, async_op=True),
        ]
        comm.all_reduce(part)  # a blocking one, too
        for work in reversed(works):
            work.wait()
        found[name] = [float(x) for x in (everyone[0][0], everyone[-1][-1], part[0], part[1], apart[0], whole[-1])]
    return found


def test_operations_on_the_same_memory_take_place_in_order(mesh: Mesh, size: int) -> None:
    once = size * (size + 1) / 2
    expected = [once, once, once * size**2, once * size, sum(range(size)), once * size]
    assert mesh.run(one_after_another, mesh) == [{"small": expected, "large": expected}] * size


def test_is_completed_without_waiting(mesh: Mesh) -> None:
    def body() -> tuple[bool, float]:
        """The last rank does its part only when the first one has asked."""
        import time

        comm = mesh.comm()
        comm.barrier()
        last, asked = comm.size - 1, torch.zeros(1)
        if comm.rank == last > 0:
            comm.recv(asked, 0)
        work = comm.all_reduced(torch.ones(90_000), async_op=True)
        early = work.is_completed()
        if comm.rank == 0 < last:
            comm.send(asked, last)
        while not work.is_completed():
            time.sleep(1e-4)
        return early and comm.rank == 0 < last, float(work.wait()[-1])

    for early, total in mesh.run(body):
        assert not early
        assert total == mesh.size


def test_operations_left_unfinished_go_on_in_the_next_region(mesh: Mesh, size: int) -> None:
    """Forgetting `wait()` is no error as long as all ranks forget alike."""
    mesh.run(lambda: mesh.comm().all_reduce(torch.ones(90_000), async_op=True) and None)
    assert mesh.run(lambda: float(mesh.comm().all_reduced(torch.ones(())))) == [size] * size


# -- same bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_rank_order(mesh: Mesh, size: int, dtype: torch.dtype) -> None:
    """The same bits on every rank and in every run: those of the sum in rank order, whoever comes late."""
    shapes = [(100,), (90_000,)]

    def body(turn: int) -> list[bytes]:
        import time

        comm = mesh.comm()
        if comm.rank == turn % comm.size:
            time.sleep(2e-3)
        return [bits(comm.all_reduced(value(dtype, shape, comm.rank))) for shape in shapes]

    expected = [bits(reduced([value(dtype, shape, rank) for rank in range(size)], "sum")) for shape in shapes]
    for turn in range(3):
        assert mesh.run(body, turn) == [expected] * size


def test_backends_agree(shared_mesh: Callable[..., Mesh], size: int) -> None:
    """All transports give the same bits."""
    everywhere = {}
    for name in BACKENDS:
        mesh = shared_mesh({"data": size}, backend=name)
        everywhere[name] = mesh.run(
            lambda mesh=mesh: [
                bits(mesh.comm().all_reduced(value(torch.bfloat16, (numel,), mesh.rank), "avg"))
                for numel in (1000, 90_000)
            ]
        )
    assert everywhere["shm"] == everywhere["gloo"]


# -- results shared by the ranks ---------------------------------------------------------------------------------------


def changed_in_place(mesh: Mesh) -> list[Any]:
    """Every rank changes its result in its own way; later reductions use the same blocks."""
    comm = mesh.comm()
    found: list[Any] = []
    for turn in range(6):
        result = comm.all_reduced(torch.full((90_000,), float(turn + 1)))
        comm.barrier()
        if comm.rank == turn % comm.size:
            result.data.add_(100.0)
        elif comm.rank == (turn + 1) % comm.size:
            result.numpy()[:] = -7.0
        comm.barrier()
        found.append((float(result[0]), float(result[-1]), bool((result == result[0]).all())))
        del result
        comm.barrier()
    return found


def test_a_change_of_a_result_stays_private(mesh: Mesh, size: int) -> None:
    for rank, found in enumerate(mesh.run(changed_in_place, mesh)):
        for turn, (first, last, uniform) in enumerate(found):
            total = float((turn + 1) * size)
            if rank == turn % size:
                total += 100.0
            elif rank == (turn + 1) % size:
                total = -7.0
            assert (first, last, uniform) == (total, total, True)


def many_large(mesh: Mesh) -> tuple[int, int, set[float]]:
    comm: Any = mesh.comm()
    totals, top = set(), 0
    for turn in range(300):
        result = comm.all_reduced(torch.ones(90_000))
        if turn % 7 == 0:
            result += 1  # a written page must not keep the block either
        totals.add(float(result[-1]) - (turn % 7 == 0))
        if turn == 50:
            top = comm.arena.heap._top
    return top, comm.arena.heap._top, totals


def test_blocks_are_used_again(shared_mesh: Callable[..., Mesh], size: int) -> None:
    mesh = shared_mesh({"data": size})
    for before, after, totals in mesh.run(many_large, mesh):
        assert after - before <= 4 * 2**19  # a few blocks may be on their way back at a time
        assert totals == {float(size)}


def test_empty(mesh: Mesh, size: int) -> None:
    def body() -> list[Any]:
        comm = mesh.comm()
        found: list[Any] = []
        for shape, dtype in [((), torch.int64), (3, torch.float32), ((2, 0), torch.uint8), ((90, 1000), torch.float64)]:
            tensor = comm.empty(shape, dtype=dtype)
            tensor.fill_(comm.rank + 1)
            total = comm.all_reduced(tensor)
            found.append(
                (tuple(tensor.shape), tensor.dtype, set(total.view(-1).tolist()), set(tensor.view(-1).tolist()))
            )
            comm.all_reduce(tensor)
            found.append(set(tensor.view(-1).tolist()))
        found.append(comm.empty(2).dtype)
        part = comm.empty(110_000)[20_000:]  # a part of a resident tensor is reduced where it lies
        part.fill_(1.0)
        found.append(float(comm.all_reduced(part).sum()))
        return found

    total = sum(range(1, size + 1))
    for rank, found in enumerate(mesh.run(body)):
        for index, (shape, dtype) in enumerate(
            [((), torch.int64), ((3,), torch.float32), ((2, 0), torch.uint8), ((90, 1000), torch.float64)]
        ):
            something = 0 not in shape
            got_shape, got_dtype, totals, kept = found[2 * index]
            assert (got_shape, got_dtype) == (shape, dtype)
            assert totals == ({total} if something else set())
            assert kept == ({rank + 1} if something else set())
            assert found[2 * index + 1] == totals
        assert found[-2] == torch.float32
        assert found[-1] == 90_000.0 * size


# -- groups ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [{"a": 2, "b": 2}, {"a": 1, "b": 3}], ids=str)
def test_groups(shared_mesh: Callable[..., Mesh], backend: str, axes: dict[str, int]) -> None:
    mesh = shared_mesh(axes, backend=backend)

    def body() -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for axis in ("a", "b", ("a", "b"), ("b", "a"), None):
            comm = mesh.comm(axis)
            mine = torch.tensor(1.0 * 10**mesh.rank)
            everyone = [torch.empty(()) for _ in range(comm.size)]
            comm.all_gather(everyone, mine)
            large = comm.all_reduced(torch.full((90_000,), 10.0**mesh.rank))
            # The same group in another order is another communicator, and so are interleaved operations of two.
            works = [mesh.comm(name).all_reduce(mine.clone(), async_op=True) for name in ("a", "b", axis)]
            for work in reversed(works):
                work.wait()
            found[axis] = (comm.ranks, comm.rank, [int(t) for t in everyone], float(large[-1]))
        return found

    for rank, found in enumerate(mesh.run(body)):
        a, b = divmod(rank, axes["b"])
        groups = {
            "a": [i * axes["b"] + b for i in range(axes["a"])],
            "b": [a * axes["b"] + i for i in range(axes["b"])],
            ("a", "b"): list(range(mesh.size)),
            ("b", "a"): [i * axes["b"] + j for j in range(axes["b"]) for i in range(axes["a"])],
            None: list(range(mesh.size)),
        }
        for axis, members in groups.items():
            if axis == ("b", "a"):
                members = sorted(members) if list(found[axis][0]) == sorted(members) else members
            assert found[axis] == (
                tuple(members),
                members.index(rank),
                [10**r for r in members],
                float(sum(10**r for r in members)),
            )


# -- arguments ---------------------------------------------------------------------------------------------------------


def bad_arguments(mesh: Mesh) -> dict[str, Any]:
    comm = mesh.comm()
    one, many = torch.ones(2), [torch.ones(2) for _ in range(comm.size)]
    integers = [torch.ones(2, dtype=torch.int32) for _ in range(comm.size)]
    wide = torch.ones(1).expand(2)
    cases: dict[str, Callable[[], Any]] = {
        "src": lambda: comm.broadcast(one, comm.size),
        "dst": lambda: comm.reduce(one, -1),
        "gather_list": lambda: comm.gather(one, None, comm.rank),
        "scatter_list": lambda: comm.scatter(one, many[1:], comm.rank),
        "tensor_list": lambda: comm.all_gather([*many, one], one),
        "input_list": lambda: comm.reduce_scatter(one, []),
        "output_list": lambda: comm.all_to_all([], many),
        "tensor_list dtype": lambda: comm.all_gather(integers, one),
        "gather_list dtype": lambda: comm.gather(one, integers, comm.rank),
        "scatter_list dtype": lambda: comm.scatter(one, integers, comm.rank),
        "input_list dtype": lambda: comm.reduce_scatter(one, integers),
        "output_list dtype": lambda: comm.all_to_all(integers, many),
        "tensor expanded": lambda: comm.all_reduce(wide),
        "tensor expanded, async": lambda: comm.all_reduce(wide, async_op=True),
        "tensor received": lambda: comm.irecv(wide, comm.rank),
        "tensor_list[0] expanded": lambda: comm.all_gather([wide, *many[1:]], one),
        "output expanded": lambda: comm.reduce_scatter(wide, many),
    }
    if comm.size > 1:
        cases |= {
            "tensor_list of one tensor": lambda: comm.all_gather([torch.empty(2)] * comm.size, one),
            "gather_list of one tensor": lambda: comm.gather(one, [torch.empty(2)] * comm.size, comm.rank),
            "output_list of one tensor": lambda: comm.all_to_all([torch.empty(2)] * comm.size, many),
        }
    return {name: attempt(case) for name, case in cases.items()}


def test_bad_arguments(mesh: Mesh, size: int) -> None:
    for found in mesh.run(bad_arguments, mesh):
        for name, text in found.items():
            assert isinstance(text, str), f"{name} was taken"
            assert name.split()[0] in text


# -- anything ----------------------------------------------------------------------------------------------------------


def one_reduction(mesh: Mesh, op: str, dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> tuple[bytes, bytes]:
    comm = mesh.comm()
    mine = value(dtype, shape, comm.rank, seed)
    result = bits(comm.all_reduced(mine, op))
    comm.all_reduce(mine, op)
    return result, bits(mine)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_reduction(shared_mesh: Callable[..., Mesh], data: st.DataObject) -> None:
    backend = data.draw(st.sampled_from(BACKENDS), "backend")
    ranks = data.draw(st.sampled_from(RANKS), "ranks")
    op = data.draw(st.sampled_from(OPS), "op")
    dtype = data.draw(st.sampled_from([d for d in DTYPES if meaningful(op, d) and exact(op, d)]), "dtype")
    shape = tuple(data.draw(st.lists(st.integers(0, 40), max_size=3), "shape"))
    seed = data.draw(st.integers(0, 9), "seed")
    mesh = shared_mesh({"data": ranks}, backend=backend)
    expected = bits(reduced([value(dtype, shape, rank, seed) for rank in range(ranks)], op))
    assert mesh.run(one_reduction, mesh, op, dtype, shape, seed) == [(expected, expected)] * ranks
