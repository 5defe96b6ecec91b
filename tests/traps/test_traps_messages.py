"""Errors are shown as the user's own: no frame of the library lies between the line that was wrong and the message."""

from __future__ import annotations

import importlib
import pickle
import traceback
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import launched, script

import spmd as library
import spmd.kernels
import spmd.mesh
import spmd.transforms
from spmd import (
    Loader,
    Mesh,
    P,
    Sampler,
    Sharded,
    SpecError,
    Stream,
    check,
    data_parallel,
    ema,
    evaluate,
    fetch,
    from_dtensor,
    functional,
    functional_with_buffers,
    initialize,
    mean_of,
    optimizer,
    psum,
    put,
    random_key,
    register_backend,
    restore,
    save,
    spmd,
    value_and_grad,
    visualize,
)

OURS = [Path(package.__path__[0]) for package in (library, library.kernels, library.mesh, library.transforms)]
APPLY, PARAMS = functional(torch.nn.Linear(3, 1))
OPT = optimizer(torch.optim.AdamW, lr=0.1)
X = torch.ones(4, 3)


def frames(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def is_ours(file: str) -> bool:
    return any(package in Path(file).parents for package in OURS)


class Unreadable:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        raise KeyError("no such sample")

    def read(self) -> Any:
        return self[0]


def fails(x):
    return x.no_such_thing


def read(mesh: Mesh) -> None:
    for _ in Loader(Unreadable(), 2, mesh=mesh):
        pass


def lazily(mesh: Mesh) -> float:
    step = spmd(lambda x: x / x.sum() if x.sum() else fails(x), mesh=mesh)
    step(torch.ones(()))
    return float(step(torch.zeros(())))


PROGRAMS = {
    "a step": lambda mesh: spmd(fails, mesh=mesh)(X),
    "arguments": lambda mesh: spmd(fails, mesh=mesh)(),
    "specs": lambda mesh: spmd(fails, mesh=mesh, in_specs=P("data"))(torch.ones(3)),
    "a fetch": lazily,
    "run": lambda mesh: mesh.run(fails, X),
    "submit": lambda mesh: mesh.submit(fails, X, rank=7),
    "put": lambda mesh: put(X, P("model"), mesh=mesh),
    "fetch": lambda mesh: fetch(spmd(fails, mesh=mesh)(X)),
    "a Loader": read,
    "operators": lambda mesh: put(X, mesh=mesh) + torch.ones(7),
    "data_parallel outside": lambda mesh: data_parallel(lambda batch: batch)(X),
    "the gradient of a function": lambda mesh: value_and_grad(lambda p: fails(p["weight"]))(PARAMS),
    "a loss that is none": lambda mesh: value_and_grad(lambda p: p["weight"])(PARAMS),
    "an optimizer's step": lambda mesh: OPT.step(PARAMS, {}, OPT.init(PARAMS)),
    "a mesh": lambda mesh: Mesh({"data": -3}),
    "a mesh that cannot be had": lambda mesh: Mesh({"data": 10**9}),
    "an index that is set": lambda mesh: put(X, mesh=mesh).__setitem__(0, 1),
    "a value that is written to": lambda mesh: torch.add(X, 1, out=put(X, mesh=mesh)),
    "a gradient of a value": lambda mesh: put(X, mesh=mesh).grad,
    "a pickled mesh": lambda mesh: pickle.dumps(Loader(X, 2, mesh=mesh)),
    "a pickled value": lambda mesh: pickle.dumps(put(X, mesh=mesh)),
    "a pair in a sum": lambda mesh: mean_of(X.sum(), 1) + 1,
    "a mode": lambda mesh: APPLY.eval(),
    "torch's optimizer": lambda mesh: OPT.zero_grad(),
    "torch's sampler": lambda mesh: Sampler(8, 2).set_epoch(1),
    "torch's loader": lambda mesh: Loader(X, 2).set_epoch(1),
    "a length": lambda mesh: len(Loader(Stream([3], iter), 2)),
    "a method": lambda mesh: mesh.remote(list).nothing(),
    "an attribute": lambda mesh: setattr(mesh.remote(list), "seen", 3),
    "a call of an object": lambda mesh: mesh.remote(list)(),
    "a result": lambda mesh: mesh.remote(Unreadable).read().get(),
    "a result that is compared": lambda mesh: mesh.remote(list).copy() == [],
    "a result under another name": lambda mesh: mesh.remote(list).copy().result(),
    "a pickled result": lambda mesh: pickle.dumps(mesh.remote(list).copy()),
    "a collective outside": lambda mesh: psum(X, "data"),
    "an argument under another name": lambda mesh: psum(X, axis_name="data"),
    "a call without arguments": lambda mesh: psum(),
    "a key outside": lambda mesh: random_key(),
    "a pair": lambda mesh: mean_of("a", 1),
    "a spec": lambda mesh: P(3),
    "a declared spec": lambda mesh: Sharded(X, "data"),
    "an optimizer": lambda mesh: optimizer(3),
    "an average": lambda mesh: ema(OPT, 2),
    "a state of no average": lambda mesh: ema(OPT).step(PARAMS, {}, OPT.init(PARAMS)),
    "a model": lambda mesh: functional(3),
    "buffers": lambda mesh: functional_with_buffers(None),
    "a state_dict": lambda mesh: APPLY.params(None),
    "other weights": lambda mesh: APPLY.to_module({}),
    "a step to check": lambda mesh: check(None, {"data": 2}),
    "an evaluation": lambda mesh: evaluate(None, Loader(X, 2, mesh=mesh)),
    "a checkpoint": lambda mesh: restore(""),
    "a place for one": lambda mesh: save("", X),
    "a communicator": lambda mesh: mesh.comm(),
    "coordinates": lambda mesh: mesh.coords(-1),
    "a size": lambda mesh: mesh.resize({"data": 0}),
    "an own part": lambda mesh: put(X, mesh=mesh).local,
    "a mesh of torch": lambda mesh: mesh.device_mesh,
    "a DTensor": lambda mesh: from_dtensor(X),
    "a position": lambda mesh: Loader(X, 2, mesh=mesh).load_state_dict({}),
    "a sample": lambda mesh: Sampler(8, 2).batch(0, 9),
    "a stream": lambda mesh: Stream(3, iter),
    "a window": lambda mesh: Stream([3], iter).shuffle(0),
    "paths": lambda mesh: Stream.jsonl(3),
    "a picture": lambda mesh: visualize(3, mesh=mesh),
    "a backend": lambda mesh: register_backend("auto", print),
    "a job": lambda mesh: initialize("0", 2),
    # Python's and torch's errors about what the program calls, of which the last frame is one of ours:
    "a row in a step": lambda mesh: spmd(lambda x: x[99], mesh=mesh)(X),
    "a row in a loss": lambda mesh: _step(lambda params, batch: batch[99].sum(), mesh)(PARAMS, X),
    "a loss's arguments": lambda mesh: _step(lambda params, batch, more: batch.sum(), mesh)(PARAMS, X),
}


def _step(loss: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    return spmd(data_parallel(lambda params, batch: value_and_grad(loss)(params, batch)), mesh=mesh)


@pytest.mark.parametrize("name", PROGRAMS)
def test_tracebacks(shared_mesh: Callable[..., Mesh], name: str) -> None:
    with pytest.raises(Exception) as caught:
        PROGRAMS[name](shared_mesh({"data": 2}))
    error = caught.value
    assert not [file for file in frames(error) if is_ours(file)]
    if isinstance(error, library.SpmdError):
        assert frames(error)[-1] == __file__
    remote = "" if name == "operators" else str(error.__cause__ or "")  # nothing of the user's runs on the ranks there
    assert not [line for line in remote.splitlines() if 'File "' in line and is_ours(line.split('"')[1])], remote


@pytest.mark.parametrize("look", [Mesh.status, Mesh.stacks])
def test_tracebacks_of_a_closed_mesh(make_mesh: Callable[..., Mesh], look: Callable[[Mesh], Any]) -> None:
    mesh = make_mesh({"data": 1})
    mesh.close()
    with pytest.raises(library.MeshError) as caught:
        look(mesh)
    assert set(frames(caught.value)) == {__file__}


def test_a_fault_of_the_library_shows_its_frames(
    shared_mesh: Callable[..., Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a traceback here, and in that of a rank."""
    mesh = shared_mesh({"data": 2})
    monkeypatch.setattr("spmd.mesh.put.check_specs", lambda *_: None)
    with pytest.raises(AttributeError) as caught:
        put(X, 3, mesh=mesh)
    assert is_ours(frames(caught.value)[-1])

    def fault() -> None:
        module = importlib.import_module("spmd.transforms._reductions")
        with unittest.mock.patch.object(module, "group", None):
            psum(X, "data")

    with pytest.raises(TypeError, match="NoneType") as caught:
        mesh.run(fault, ranks=[0])
    shown = [line.split('"')[1] for line in str(caught.value.__cause__).splitlines() if 'File "' in line]
    assert is_ours(shown[-1])


def test_all_frames_if_asked(shared_mesh: Callable[..., Mesh], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPMD_TRACEBACK", "full")
    with pytest.raises(library.SpecError) as caught:
        PROGRAMS["specs"](shared_mesh({"data": 2}))
    assert any(map(is_ours, frames(caught.value)))


def test_an_interrupt_in_code_that_is_of_no_line() -> None:
    class Samples:
        def __len__(self) -> int:
            raise KeyboardInterrupt

        def __getitem__(self, index: int) -> int:
            return index

    function: Any = Samples.__len__
    function.__code__ = function.__code__.replace(co_linetable=b"")
    with pytest.raises(KeyboardInterrupt):
        library.Loader(Samples(), 2)


LAUNCHED = """
import torch
from spmd import Mesh, data_parallel, functional, spmd, value_and_grad

apply, params = functional(torch.nn.Linear(3, 1))

@spmd(mesh=Mesh())
@data_parallel
def step(params, batch):
    return value_and_grad(lambda p, b: apply(p, b).no_such_thing)(params, batch)

step(params, torch.ones(4, 3))
"""


def test_tracebacks_of_launched_ranks(tmp_path: Path) -> None:
    code, _, err = launched(2, script(tmp_path, LAUNCHED))
    shown = [line.split('"')[1] for line in err.splitlines() if 'File "' in line]
    assert code and "no_such_thing" in err
    assert shown and not [file for file in shown if is_ours(file)], err


def test_a_loop_that_was_left(shared_mesh: Callable[..., Mesh]) -> None:
    """Batches that were read ahead and never asked for fail without a word, and not in some later call."""
    mesh = shared_mesh({"data": 2})
    with pytest.raises(KeyError):
        read(mesh)
    assert spmd(lambda x: x + 1, mesh=mesh)(torch.zeros(())).item() == 1
    mesh.run(lambda: None)


def test_shapes_are_shown_whole(shared_mesh: Callable[..., Mesh]) -> None:
    def parts(x):
        return torch.ones(2, 3 + library.axis_index("data"), 5)

    with pytest.raises(library.SpecError, match=r"rank 0: \[2, 3, 5\]; rank 1: \[2, 4, 5\]"):
        spmd(parts, out_specs=P("data"), mesh=shared_mesh({"data": 2}))(X)
    with pytest.raises(library.SpecError, match=r"rank 0: float32\[2, 3, 5\].*rank 1: float32\[2, 4, 5\]"):
        spmd(parts, mesh=shared_mesh({"data": 2}))(X)


def test_a_model_where_its_parameters_belong() -> None:
    opt = optimizer(torch.optim.AdamW, lr=0.1)
    for given in (torch.nn.Linear(2, 1), torch.nn.Linear(2, 1).parameters()):
        with pytest.raises(SpecError, match=r"opt.init takes the tree of parameters.*functional\(model\)"):
            opt.init(given)


def test_what_is_passed_to_a_step_instead(shared_mesh: Callable[..., Mesh]) -> None:
    mesh = shared_mesh({"data": 2})
    loss_fn = lambda params, batch: (params["w"] * batch).mean()  # noqa: E731
    step = spmd(data_parallel(lambda params, batch: library.grad(loss_fn)(params, batch)), mesh=mesh)
    with pytest.raises(SpecError, match=r"no tensor to split.*got a Loader.*for batch in loader"):
        step({"w": torch.ones(())}, Loader(torch.ones(4), 2, mesh=mesh))
    with pytest.raises(
        SpecError, match=r"an argument without tensors.*got Linear\).*apply, params = functional\(model\)"
    ):
        step(torch.nn.Linear(1, 1), torch.ones(4))
    with pytest.raises(SpecError, match=r"no argument named 'batch' to split.*batch = \(x, y\)"):
        data_parallel(lambda params, x, y: None)


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="Python has no notes of exceptions yet")
def test_a_backward_pass_in_a_step(shared_mesh: Callable[..., Mesh]) -> None:
    """As in a loop of torch's: torch's own error, and what to write instead."""

    def backward(params, batch):
        (params["w"] * batch).mean().backward()

    def gradients(params, batch):
        return torch.autograd.grad((params["w"] * batch).mean(), params["w"])

    for step in (backward, gradients):
        with pytest.raises(RuntimeError, match="does not require grad") as caught:
            spmd(data_parallel(step), mesh=shared_mesh({"data": 2}))({"w": torch.ones(())}, torch.ones(4))
        assert "loss, grads = value_and_grad(loss_fn)(params, batch)" in caught.value.__notes__[0]


def test_check_with_a_mesh(shared_mesh: Callable[..., Mesh]) -> None:
    with pytest.raises(SpecError, match=r"check takes the axes of a mesh.*check\(step, mesh.axes"):
        check(lambda x: x, shared_mesh({"data": 2}), torch.ones(2))
