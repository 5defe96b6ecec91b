"""What is restored is what was saved: memory order, specs and kinds of tensors, on any mesh and without one."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from pathlib import Path
from typing import Any

import manifest
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from scripts import launched, script
from strided import dense, values

from spmd import P, SpecError, data_parallel, functional, optimizer, put, restore, save, spmd, value_and_grad


def entry_of(path: Path, name: str) -> dict[str, Any]:
    return next(entry for entry in manifest.read(path)["leaves"] if entry["key"] == name)


# -- the order of elements in memory ----------------------------------------------------------------------------------


def orders() -> dict[str, torch.Tensor]:
    return {
        **values(),
        "complex": torch.complex(torch.ones(2, 3), torch.zeros(2, 3)).t(),
        "half": torch.arange(6).reshape(2, 3).t().bfloat16(),
        "unusual": torch.empty_strided((1, 3, 1), (17, 1, 99)).zero_(),
        "scalar": torch.tensor(2.5),
        "one of two": torch.arange(2.0)[1:].as_strided((1,), (2,)),  # contiguous, for torch
        "imaginary": torch.tensor([1 + 2j]).conj().imag,
    }


@pytest.mark.parametrize("background", [False, True])
def test_strides_without_a_mesh(tmp_path: Path, background: bool) -> None:
    tree = orders()
    folder = save(tmp_path, tree, background=background).result()
    back = restore(tmp_path)
    for name, value in tree.items():
        layout = dense(value)
        assert torch.equal(back[name], value) and back[name].dtype is value.dtype, name
        assert back[name].stride() == layout, name
        assert ("strides" in entry_of(tmp_path, name)) == (layout != torch.empty(value.shape).stride()), name
    plain = load_file(folder / "rank-00000.safetensors")
    assert torch.equal(plain["turned"], tree["turned"]) and plain["turned"].is_contiguous()


@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "data"), P("model", "data")], ids=str)
def test_strides_on_a_mesh(shared_mesh: Any, tmp_path: Path, spec: P) -> None:
    mesh, other = shared_mesh({"data": 2, "model": 2}), shared_mesh({"data": 1})
    names = ("last", "turned", "usual", "complex")
    tree = {name: put(orders()[name][..., :2] if name == "complex" else orders()[name], mesh=mesh) for name in names}
    tree = {name: put(value, spec if name != "complex" else P(), mesh=mesh) for name, value in tree.items()}
    save(tmp_path, tree)
    plain, here, there = restore(tmp_path), restore(tmp_path, mesh=mesh), restore(tmp_path, mesh=other)
    for name, array in tree.items():
        expected = array.full()
        for found in (plain[name], here[name].full(), there[name].full()):
            assert torch.equal(found, expected) and found.stride() == expected.stride(), name
        assert here[name].spec == array.spec
        assert [shard.stride() for shard in here[name].shards()] == [shard.stride() for shard in array.shards()]


def test_a_convolution_goes_on_with_the_same_bits(shared_mesh: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3))
    apply, start = functional(net.to(memory_format=torch.channels_last))
    opt = optimizer(torch.optim.AdamW, lr=1e-2, shard="data")
    x = torch.randn(8, 3, 12, 12)

    @data_parallel(shards=4)
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = value_and_grad(lambda p, b: apply(p, b).square().mean())(params, batch)
        return *opt.step(params, grads, opt_state), loss

    def digest(params: Any) -> str:
        state = hashlib.sha256()
        for value in params.values():
            state.update(value.full().contiguous().numpy().tobytes())
        return state.hexdigest()

    one, two = shared_mesh({"data": 1}), shared_mesh({"data": 2})
    params, opt_state = start, opt.init(start)
    for number in range(4):
        params, opt_state, _ = spmd(step, mesh=one)(params, opt_state, x)
        if number == 1:
            save(tmp_path, {"params": params, "opt_state": opt_state})
    back = restore(tmp_path, mesh=two)
    assert back["params"]["0.weight"].shards()[1].is_contiguous(memory_format=torch.channels_last)
    again, state = back["params"], back["opt_state"]
    for _ in range(2):
        again, state, _ = spmd(step, mesh=two)(again, state, x)
    assert digest(again) == digest(params)
    assert again["0.weight"].full().stride() == params["0.weight"].full().stride() == start["0.weight"].stride()


# -- specs ------------------------------------------------------------------------------------------------------------


def test_specs_are_kept_where_the_axes_cut_alike(shared_mesh: Any, tmp_path: Path) -> None:
    mesh = shared_mesh({"data": 2, "model": 2})
    whole = torch.arange(64.0).reshape(4, 4, 4)
    specs = [P("data"), P(None, "model"), P("model", None, "data"), P(("data", "model")), P(None, ("model", "data"))]
    tree = {str(spec): put(whole, spec, mesh=mesh) for spec in specs}
    folder = save(tmp_path, tree).result()
    assert [entry["parts"] for entry in manifest.read(tmp_path)["leaves"]][2] == [[2], [], [2]]
    rows = [load_file(folder / f"rank-0000{rank}.safetensors") for rank in range(4)]
    assert torch.equal(torch.cat([rows[0]["P('data')"], rows[2]["P('data')"]]), whole)  # each rank its own part
    assert rows[1]["P(None, 'model')"].shape == (4, 2, 4)
    assert all(torch.equal(value, whole) for value in restore(tmp_path).values())
    sizes = {"data": 2, "model": 2}, {"model": 2, "data": 2}, {"model": 2}, {"data": 4, "model": 1}, {"data": 1}
    for axes in sizes:
        other = shared_mesh(axes)
        back = restore(tmp_path, mesh=other)
        for spec in specs:
            kept = all(axes.get(name) == 2 for name in spec.axes)
            assert back[str(spec)].spec == (spec if kept else P()), (axes, spec)
            assert torch.equal(back[str(spec)].full(), whole), (axes, spec)


def test_an_array_in_like_says_how_it_is_cut(shared_mesh: Any, tmp_path: Path) -> None:
    mesh = shared_mesh({"data": 2, "model": 2})
    whole = torch.arange(24.0).reshape(4, 6)
    save(tmp_path, {"w": put(whole, P("data"), mesh=mesh)})
    for spec in (P(), P("data"), P(None, "model"), P("model", "data"), P(("model", "data"))):
        like = {"w": put(torch.zeros(4, 6), spec, mesh=mesh)}
        for back in (restore(tmp_path, like=like), restore(tmp_path, like=like, mesh=mesh)):
            assert back["w"].spec == spec and torch.equal(back["w"].full(), whole)
        # On another mesh its axes may be missing, or cut otherwise.
        back = restore(tmp_path, like=like, mesh=shared_mesh({"data": 1}))
        assert back["w"].spec == P() and torch.equal(back["w"].full(), whole)
    assert restore(tmp_path, like={"w": torch.zeros(4, 6)}, mesh=mesh)["w"].spec == P("data")


def test_a_sharded_optimizer_of_cut_parameters(shared_mesh: Any, tmp_path: Path) -> None:
    """Its state goes on where the axes have the sizes that they had, and is refused where it would be mixed up."""
    opt = optimizer(torch.optim.AdamW, lr=0.1, shard="data")
    start = torch.linspace(0, 1, 384).reshape(4, 96)

    def step(params: Any, state: Any) -> Any:
        return opt.step(params, {"w": params["w"] ** 2}, state)

    def on(mesh: Any, params: Any, state: Any) -> Any:
        params = put(params, P("model"), mesh=mesh)
        return spmd(step, mesh=mesh, out_specs=({"w": P("model")}, P()))(params, state)

    mesh = shared_mesh({"data": 2, "model": 2})
    params, state = on(mesh, {"w": start}, opt.init({"w": start}))
    save(tmp_path, {"params": params, "state": state})
    back = restore(tmp_path, mesh=mesh)
    assert back["params"]["w"].spec == P("model")
    (own,) = back["state"]["state"].values()
    assert own["exp_avg"].spec == P(("data", "model"))
    assert torch.equal(on(mesh, back["params"], back["state"])[0]["w"].full(), on(mesh, params, state)[0]["w"].full())
    for axes in ({"data": 4, "model": 1}, {"data": 1, "model": 2}):
        other = shared_mesh(axes)
        back = restore(tmp_path, mesh=other)
        with pytest.raises(SpecError, match=r"cut .*go on with it on a mesh with the sizes"):
            on(other, back["params"], back["state"])[0]["w"].full()


LAUNCHED = r"""
import sys
import torch
from spmd import Mesh, P, put, restore, save
mesh = Mesh({"data": 2, "model": 2})
whole = torch.arange(24.0).reshape(6, 4).t()
frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
specs = [P(), P("data"), P(None, "model"), P("model", "data"), P(("data", "model"))]
state = {"frozen": put(frozen, mesh=mesh), **{str(spec): put(whole, spec, mesh=mesh) for spec in specs}}
for background in (False, True):
    save(sys.argv[1], state, background=background).result()
    back = restore(sys.argv[1], mesh=mesh)
    for name, value in state.items():
        mine, theirs = value.local, back[name].local
        if not torch.equal(mine, theirs) or mine.stride() != theirs.stride() or value.spec != back[name].spec:
            print("differs", mesh.rank, name, mine.stride(), theirs.stride(), back[name].spec)
    if not isinstance(back["frozen"].local, torch.nn.Parameter):
        print("not frozen")
print("done", mesh.rank)
mesh.close()
"""


@pytest.mark.long
def test_launched(tmp_path: Path) -> None:
    status, out, err = launched(4, script(tmp_path, LAUNCHED), str(tmp_path / "runs"))
    assert status == 0, err
    assert sorted(out.split("\n")) == ["", *(f"done {rank}" for rank in range(4))]
    back = restore(tmp_path / "runs")
    assert all(torch.equal(back[name], torch.arange(24.0).reshape(6, 4).t()) for name in back if name != "frozen")


# -- kinds of tensors -------------------------------------------------------------------------------------------------


def kinds(value: torch.Tensor) -> tuple[bool, bool]:
    return isinstance(value, torch.nn.Parameter), value.requires_grad


@pytest.mark.parametrize("background", [False, True])
def test_parameters_stay_parameters(tmp_path: Path, background: bool) -> None:
    tree = {
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "trained": torch.nn.Parameter(torch.ones(2)),
        "leaf": torch.ones(2, requires_grad=True),
        "plain": torch.ones(2),
        "result": torch.ones(2, requires_grad=True) * 2,
    }
    save(tmp_path, tree, background=background)
    back = {name: kinds(value) for name, value in restore(tmp_path).items()}
    assert back == {**{name: kinds(value) for name, value in tree.items()}, "result": (False, False)}


def test_frozen_parameters_stay_frozen_on_a_mesh(shared_mesh: Any, tmp_path: Path) -> None:
    """They would be trained by the run that goes on."""
    mesh = shared_mesh({"data": 2})
    net = torch.nn.Linear(4, 4)
    net.weight.requires_grad_(False)
    apply, start = functional(net)
    opt = optimizer(torch.optim.SGD, lr=0.1)

    @spmd(mesh=mesh)
    def step(params: Any, state: Any) -> Any:
        _, grads = value_and_grad(lambda p: F.relu(apply(p, torch.ones(2, 4))).sum())(params)
        return opt.step(params, grads, state)

    params, state = step(start, opt.init(start))
    save(tmp_path, {"params": params, "state": state})
    for back in (restore(tmp_path), restore(tmp_path, mesh=mesh)):
        after = step(back["params"], back["state"])[0]
        assert torch.equal(after["weight"].full(), start["weight"]), type(back["params"]["weight"])
        assert torch.equal(after["bias"].full(), step(params, state)[0]["bias"].full())


def test_another_format_is_refused(tmp_path: Path) -> None:
    save(tmp_path, {"w": 1})
    manifest.edit(tmp_path, lambda said: said.update(format=4))
    with pytest.raises(Exception, match="has another format"):
        restore(tmp_path)


def test_the_format_before_is_read(tmp_path: Path) -> None:
    """Its files have a SHA-256 each."""
    folder = save(tmp_path, {"w": torch.arange(5000.0), "odd": torch.ones(3, dtype=torch.bool)}).result()

    def to_format_2(said: dict) -> None:
        said.update(format=2)
        for about in said["files"]:
            del about["sums"]
            about["sha256"] = hashlib.sha256((folder / about["file"]).read_bytes()).hexdigest()

    manifest.edit(tmp_path, to_format_2)
    back = restore(tmp_path)
    assert torch.equal(back["w"], torch.arange(5000.0)) and back["odd"].all()
    data = bytearray((folder / "rank-00000.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "rank-00000.safetensors").write_bytes(data)
    with pytest.raises(Exception, match="its checksum differs"):
        restore(folder)


@pytest.mark.parametrize("refused", ["nowhere", "when it is opened", "when it is written"])
def test_any_lengths_where_a_file_system_takes_no_direct_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """Above and below what is written at once, and not whole blocks."""
    opens, write, refusals = os.open, os.write, []

    def opened(file: Any, flags: int, *args: Any, **more: Any) -> int:
        if flags & os.O_DIRECT and refused == "when it is opened":
            refusals.append(file)
            raise OSError(errno.EINVAL, "no direct writes")
        return opens(file, flags, *args, **more)

    def written(number: int, data: Any) -> int:
        if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_DIRECT and refused == "when it is written":
            refusals.append(number)
            raise OSError(errno.EINVAL, "no direct writes")
        return write(number, data)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "write", written)
    tree = {str(n): torch.randint(0, 255, (n,), dtype=torch.uint8) for n in (0, 1, 4095, 4096, 5 << 20, (8 << 20) - 7)}
    folder = save(tmp_path, tree).result()
    for found in (restore(tmp_path), load_file(folder / "rank-00000.safetensors")):
        assert {*found} == {*tree} and all(torch.equal(found[name], tree[name]) for name in tree)
    assert bool(refusals) == (refused != "nowhere")


@pytest.mark.parametrize("damage", ["a bit", "exchanged blocks", "exchanged words", "a lost block", "a tail"])
def test_damage_is_told(tmp_path: Path, damage: str) -> None:
    torch.manual_seed(0)
    folder = save(tmp_path, {"w": torch.randint(0, 255, (100_000,), dtype=torch.uint8)}).result()
    file = folder / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    if damage == "a bit":
        data[50_000] ^= 4
    elif damage == "exchanged blocks":
        data[8192:12288], data[20480:24576] = data[20480:24576], data[8192:12288]
    elif damage == "exchanged words":  # within a block
        data[8192:8200], data[8200:8208] = data[8200:8208], data[8192:8200]
    elif damage == "a lost block":
        data[40960:45056] = bytes(4096)
    else:
        data[-100:] = bytes(100)
    file.write_bytes(data)
    with pytest.raises(Exception, match="its checksum differs"):
        restore(folder)
