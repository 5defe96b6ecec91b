"""Batches that would be something else than they look like: each with the message that it gets, or the right result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from spmd import (
    CollectiveMismatch,
    Loader,
    Mesh,
    P,
    Sharded,
    SpecError,
    all_gather,
    data_parallel,
    functional,
    mean_of,
    pmean,
    ppermute,
    put,
    spmd,
    value_and_grad,
)

X = torch.arange(8.0).reshape(8, 1)
W = {"w": torch.tensor([0.5])}


@pytest.fixture
def mesh(shared_mesh: Callable[..., Mesh]) -> Mesh:
    return shared_mesh({"data": 2})


def side_by_side(mesh: Mesh, batch: Any, shards: int | None = None) -> torch.Tensor:
    @spmd(mesh=mesh)
    @data_parallel(shards=shards)
    def step(batch):
        return Sharded(torch.cat([batch["x"], batch["w"]], 1), P("data"))

    return step(batch).full()


@pytest.mark.parametrize("shards", [None, 4])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_whole_tensor_beside_what_a_loader_dealt(
    shared_mesh: Callable[..., Mesh], ranks: int, shards: int | None
) -> None:
    mesh = shared_mesh({"data": ranks})
    for batch in Loader({"x": X}, 8, mesh=mesh, shuffle=False, shards=shards):
        with pytest.raises(
            SpecError,
            match=r"argument 0\['w'\] of step is whole, .* a Loader has dealt argument 0\['x'\] of step: their rows "
            r"would be of different samples.*give it to the Loader's dataset, Loader\(\{",
        ):
            side_by_side(mesh, {"x": batch["x"], "w": X}, shards)


def test_the_same_after_a_call_that_was_right(mesh: Mesh) -> None:
    """A signature that is known is that of leaves which were dealt alike."""

    @spmd(mesh=mesh)
    @data_parallel
    def step(batch):
        return Sharded(torch.cat([batch["x"], batch["w"]], 1), P("data"))

    assert torch.equal(step({"x": put(X, P("data"), mesh=mesh), "w": X}).full(), torch.cat([X, X], 1))
    (batch,) = Loader({"x": X}, 8, mesh=mesh, shuffle=False)
    with pytest.raises(SpecError, match="is whole, and beside it in the batch a Loader has dealt"):
        step({"x": batch["x"], "w": X})


def test_all_of_it_from_the_loader(mesh: Mesh) -> None:
    (batch,) = Loader({"x": X, "w": X}, 8, mesh=mesh)
    both = side_by_side(mesh, batch)
    assert torch.equal(both[:, 0], both[:, 1])


def test_a_whole_tensor_beside_a_part_within_a_region(mesh: Mesh) -> None:
    @data_parallel
    def inner(batch):
        return batch["x"].sum()

    @spmd(mesh=mesh)
    def step(x, w):
        return inner({"x": x, "w": w})

    (x,) = Loader(X, 8, mesh=mesh, shuffle=False)
    with pytest.raises(SpecError, match=r"parts: batch\['x'\]; whole: batch\['w'\].*give all of it to the"):
        step(x, X)


# -- accumulation ------------------------------------------------------------------------------------------------------


def squares(params: Any, batch: torch.Tensor) -> torch.Tensor:
    return (params["w"] * batch).square().mean()


def captured(loss_fn: Callable, chunk: torch.Tensor) -> Callable:
    return lambda params: loss_fn(params, chunk)


def by_default(loss_fn: Callable, chunk: torch.Tensor) -> Callable:
    return lambda params, chunk=chunk: loss_fn(params, chunk)


def by_keyword(loss_fn: Callable, chunk: torch.Tensor) -> Callable:
    return lambda params, *, chunk=chunk: loss_fn(params, chunk)


def accumulating(mesh: Mesh, batch: Any, chunks: int, loss_fn: Callable = squares, held: Any = None) -> Any:
    @spmd(mesh=mesh)
    @data_parallel
    def step(params, batch):
        total, grads = torch.zeros(()), torch.zeros(1)
        for chunk in batch.chunk(chunks):
            if held is not None:
                loss, found = value_and_grad(held(loss_fn, chunk))(params)
            else:
                loss, found = value_and_grad(loss_fn)(params, chunk)
            total, grads = total + loss / chunks, grads + found["w"] / chunks
        return total, grads

    return step(W, batch)


def test_accumulation_over_equal_chunks(mesh: Mesh) -> None:
    loss, gradient = accumulating(mesh, X, 2)
    expected, grads = value_and_grad(squares)(W, X)
    torch.testing.assert_close(loss.full(), expected)
    torch.testing.assert_close(gradient.full(), grads["w"])


@pytest.mark.parametrize("held", [None, captured, by_default, by_keyword])
@pytest.mark.parametrize("samples", [7, 6])
def test_accumulation_over_chunks_that_differ(mesh: Mesh, samples: int, held: Any) -> None:
    """Seven samples on two ranks are four and three; six are three and three, of which chunks have two and one."""
    accumulating(mesh, X, 2, held=held)  # the last batch of an epoch comes after larger ones
    with pytest.raises(SpecError, match=r"is given a part of the batch.*got 2 of [34] samples.*shards=\)"):
        accumulating(mesh, X[:samples], 2, held=held)


def test_accumulation_as_virtual_shards(mesh: Mesh) -> None:
    @spmd(mesh=mesh)
    @data_parallel(shards=4)
    def step(params, batch):
        return value_and_grad(squares)(params, batch)

    loss, gradient = step(W, X[:7])
    expected, grads = value_and_grad(squares)(W, X[:7])
    torch.testing.assert_close(loss.full(), expected)
    torch.testing.assert_close(gradient["w"].full(), grads["w"])


def test_chunks_with_their_counts(mesh: Mesh) -> None:
    """A pair of a total and a count is right for every chunk by itself."""

    def loss_fn(params, chunk):
        return mean_of((params["w"] * chunk).square().sum(), len(chunk))

    accumulating(mesh, X[:7], 2, loss_fn)


def test_what_is_no_chunk(mesh: Mesh) -> None:
    """Columns of an uneven batch, its transpose, and what was computed from it are not taken for a part of it."""

    @spmd(mesh=mesh)
    @data_parallel
    def step(params, batch):
        first, _ = value_and_grad(squares)(params, batch[:, :1])
        second, _ = value_and_grad(squares)(params, (batch * 1)[:1])
        third, _ = value_and_grad(lambda params, columns: squares(params, columns.T))(params, batch.T)
        return first, second, third

    step(W, X[:7].expand(7, 3))


# -- collectives of uneven batches -------------------------------------------------------------------------------------


def test_gathering_an_uneven_batch(make_mesh: Callable[..., Mesh]) -> None:
    """As contrastive losses do."""

    @spmd(mesh=make_mesh({"data": 2}))
    @data_parallel
    def step(params, batch):
        def loss_fn(params, batch):
            mine = params["w"] * batch
            return (mine @ all_gather(mine, "data", tiled=True).T).mean()

        return value_and_grad(loss_fn)(params, batch)

    with pytest.raises(CollectiveMismatch, match=r"(?s)all_gather.*pad them to the longest.*drop_last=True"):
        step(W, X[:7])

    @spmd(mesh=make_mesh({"data": 2}))
    @data_parallel
    def ring(batch):
        return pmean((batch @ ppermute(batch, "data", [(0, 1), (1, 0)]).T).mean(), "data")

    with pytest.raises(CollectiveMismatch, match=r"(?s)as ppermute.*pad them to the longest.*drop_last=True"):
        ring(X[:7])


@pytest.mark.parametrize("entries", [["a", "b", "c", "d"], [1, 2, 3, 4]])
def test_a_list_with_an_entry_for_each_sample(mesh: Mesh, entries: list[Any]) -> None:
    """As a DataLoader makes it of strings."""

    @spmd(mesh=mesh)
    @data_parallel
    def step(batch):
        return pmean(batch["x"].mean() * len(batch["t"]), "data")

    with pytest.raises(
        SpecError, match=r"batch\['t'\] of step is a list with an entry for each of 4 samples.*tensor of it"
    ):
        step({"x": torch.arange(4.0), "t": entries})
    for kind in (str, object):
        with pytest.raises(SpecError, match=r"batch\['t'\] of step is an array with an entry.*got an array of "):
            step({"x": torch.arange(4.0), "t": np.array(entries).astype(kind)})
    assert step({"x": torch.arange(4.0), "t": tuple(entries)}).item() == 6.0
    assert step({"x": torch.arange(4.0), "t": entries[:3]}).item() == 4.5


def test_a_list_beside_a_whole_batch_within_a_region(mesh: Mesh) -> None:
    @spmd(mesh=mesh)
    def outer():
        return data_parallel(lambda batch: batch["x"].sum())({"x": torch.arange(4.0), "t": list("abcd")})

    with pytest.raises(SpecError, match="a list with an entry for each of 4 samples"):
        outer()


def test_what_cannot_be_split(mesh: Mesh) -> None:
    """With what to pass instead."""

    @spmd(mesh=mesh)
    @data_parallel
    def step(batch):
        return pmean(torch.zeros(()), "data")

    x = torch.eye(4)
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    for tensor in (x.to_sparse(), ragged):
        with pytest.raises(SpecError, match=r"argument 0.* can't be cut.*to_dense\(\).*to_padded_tensor"):
            step({"x": tensor})
    for call in (lambda x: put(x, P("data"), mesh=mesh), spmd(lambda x: x, mesh=mesh, in_specs=P("data"))):
        with pytest.raises(SpecError, match=r"can't be cut.*layout torch.sparse_coo"):
            call(x.to_sparse())
    packed = nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    with pytest.raises(
        SpecError,
        match=r"differ in dimension 0.*\.data.*pack a PackedSequence in the loss.*let the batch be their numbers",
    ):
        step({"x": packed, "y": x[:2]})


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="notes came with Python 3.11")
def test_an_argument_besides_the_batch_with_something_for_each_sample(mesh: Mesh) -> None:
    """A hidden state: torch tells of sizes, and a note of what they are."""
    apply, params = functional(nn.GRU(3, 4, batch_first=True))

    @spmd(mesh=mesh)
    @data_parallel
    def step(params: Any, hidden: Tensor, batch: Tensor) -> Any:
        return value_and_grad(lambda params: apply(params, batch, hidden)[0].square().mean())(params)

    with pytest.raises(RuntimeError, match="Expected hidden size") as found:
        step(params, torch.zeros(1, 6, 4), torch.ones(6, 2, 3))
    (note,) = [text for text in found.value.__notes__ if "samples" in text]
    assert "has 3 of 6 samples" in note and "is whole, of shape [1, 6, 4]" in note and "part of the batch" in note
    with pytest.raises(RuntimeError) as found:
        step(params, torch.zeros(1, 2, 4), torch.ones(6, 2, 3))
    assert not [text for text in found.value.__notes__ if "samples" in text]


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="notes came with Python 3.11")
def test_a_rank_without_samples_on_which_the_step_cannot_run(mesh: Mesh) -> None:
    @spmd(mesh=mesh, out_specs=P("data"))
    @data_parallel
    def step(batch: Tensor) -> Tensor:
        return batch - batch.max()

    with pytest.raises(RuntimeError, match="numel") as found:
        step(torch.ones(1))
    assert [text for text in found.value.__notes__ if "none of the 1 samples" in text and "len(batch) is 0" in text]
