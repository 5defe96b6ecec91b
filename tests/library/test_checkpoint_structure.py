"""Classes around what was saved come from `like`, and dicts within them that have grown come back whole."""

from __future__ import annotations

import collections
import dataclasses
import doctest
import enum
from pathlib import Path
from typing import Any, NamedTuple

import manifest
import numpy as np
import optree
import pytest
import torch
from pytrees import NAMESPACE

from spmd import Loader, SpecError, data_parallel, optimizer, restore, save, spmd
from spmd.checkpoint import manifest as manifests
from spmd.checkpoint import tree as trees


class State(NamedTuple):
    params: Any
    opt_state: Any
    step: int = 0


@dataclasses.dataclass
class Run:
    state: Any
    name: str = "run"

    def __post_init__(self) -> None:
        assert isinstance(self.name, str)  # it is never made of anything but what was saved


class Wrapped:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


register: Any = optree.register_pytree_node
register(
    Run,
    lambda run: ((run.state, run.name), None, ("state", "name")),
    lambda _, children: Run(*children),
    path_entry_type=optree.GetAttrEntry,
    namespace=NAMESPACE,
)
register(Wrapped, lambda w: ((w.inner,), None), lambda _, children: Wrapped(*children), namespace=NAMESPACE)

AROUND = [
    lambda params, opt_state: State(params, opt_state),
    lambda params, opt_state: Run({"params": params, "opt_state": opt_state}),
    lambda params, opt_state: {"all": [State(Wrapped(params), (Wrapped(opt_state), 1))]},
    lambda params, opt_state: collections.OrderedDict(opt_state=opt_state, params=params),
]


def same(got: Any, expected: Any) -> bool:
    paths = [optree.tree_paths(tree, none_is_leaf=True, namespace=NAMESPACE) for tree in (got, expected)]
    leaves = [optree.tree_leaves(tree, none_is_leaf=True, namespace=NAMESPACE) for tree in (got, expected)]
    listed = [[leaf.full().tolist() if hasattr(leaf, "full") else leaf for leaf in found] for found in leaves]
    listed = [[leaf.tolist() if hasattr(leaf, "tolist") else leaf for leaf in found] for found in listed]
    return paths[0] == paths[1] and listed[0] == listed[1]


def test_docstrings() -> None:
    assert doctest.testmod(trees).failed == 0 and doctest.testmod(manifests).failed == 0


@pytest.mark.parametrize("around", AROUND)
def test_state_that_has_grown(shared_mesh: Any, tmp_path: Path, around: Any) -> None:
    mesh, opt = shared_mesh({"data": 2}), optimizer(torch.optim.AdamW, lr=0.1)
    start = {"w": torch.ones(3), "b": torch.zeros(2)}

    @spmd(mesh=mesh)
    @data_parallel
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        return opt.step(params, params, opt_state)

    before = around(start, opt.init(start))
    params, opt_state = step(start, opt.init(start), torch.ones(2))
    save(tmp_path, around(params, opt_state))
    for back in (restore(tmp_path, like=before), restore(tmp_path, like=before, mesh=mesh)):
        assert type(back) is type(before) and same(back, around(params, opt_state))
    assert same(restore(tmp_path, like=around(params, opt_state)), around(params, opt_state))
    if type(before) is collections.OrderedDict:
        assert same(restore(tmp_path), around(params, opt_state))
    else:
        with pytest.raises(SpecError, match="pass like="):
            restore(tmp_path)


def test_dicts_of_other_classes(tmp_path: Path) -> None:
    grown = collections.defaultdict(list, {"b": State(1, {"x": 2}), "a": 3})
    expected = {"deque": collections.deque([1, 2]), "grown": grown, (1, 2): {"k": 5}}
    save(tmp_path, expected)
    like = {
        (1, 2): {},
        "deque": collections.deque([0, 0]),
        "grown": collections.defaultdict(list, b=State(0, {})),
    }
    back = restore(tmp_path, like=like)
    assert list(back) == list(like)  # keys that JSON has not are those of like
    assert back == expected
    assert type(back["grown"]) is collections.defaultdict and back["grown"]["new"] == []
    assert type(back["grown"]["b"]) is State


def test_an_ordered_dict_whose_keys_were_moved(tmp_path: Path) -> None:
    moved = collections.OrderedDict(b=1, a={"x": 2}, c=3)
    moved.move_to_end("b")
    save(tmp_path, moved)
    assert dict(restore(tmp_path)) == dict(restore(tmp_path, like=moved)) == {"b": 1, "a": {"x": 2}, "c": 3}


def test_what_was_plain_takes_the_class_of_like(tmp_path: Path) -> None:
    save(tmp_path, {"b": 1, "a": {"x": [2, 3]}})
    back = restore(tmp_path, like=collections.OrderedDict(a={}))
    assert type(back) is collections.OrderedDict and back == {"b": 1, "a": {"x": [2, 3]}} and list(back) == ["b", "a"]


def test_a_state_dict_comes_back_alone(tmp_path: Path) -> None:
    """It is an OrderedDict, which needs no `like`."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    saved = {"model": model.state_dict(), "epoch": 3}
    save(tmp_path, saved)
    for like in (None, {"model": None}, {"epoch": 0}, {"model": dict(saved["model"])}):
        back = restore(tmp_path, like=like)
        is_plain = like is not None and type(like.get("model")) is dict
        assert type(back["model"]) is (dict if is_plain else collections.OrderedDict) and back["epoch"] == 3
        assert list(back["model"]) == list(saved["model"])
        model.load_state_dict(back["model"])
    save(tmp_path, collections.defaultdict(int, saved))
    with pytest.raises(SpecError, match=r"restore cannot make this tree alone.*pass like="):
        restore(tmp_path)


class Part(str, enum.Enum):
    ENCODER = "encoder"


class Block(enum.IntEnum):
    FIRST = 1


def test_keys_that_are_members_of_an_enum(tmp_path: Path) -> None:
    tree = {Part.ENCODER: {Block.FIRST: torch.ones(2), np.str_("b"): torch.zeros(1)}, "step": 3}
    save(tmp_path, tree)
    assert restore(tmp_path)["encoder"][1].equal(torch.ones(2))
    back = restore(tmp_path, like=tree)
    inner = back[Part.ENCODER]
    assert [*map(type, (*back, *inner))] == [Part, str, Block, np.str_]
    assert inner[Block.FIRST].equal(torch.ones(2)) and back["step"] == 3
    with pytest.raises(SpecError, match=r"another shape .* for \['encoder'\]\[1\]"):
        restore(tmp_path, like={Part.ENCODER: {Block.FIRST: torch.ones(3)}})


def test_keys_that_are_truths(tmp_path: Path) -> None:
    """They are no numbers, though Python takes True for 1."""
    save(tmp_path, {True: 5, False: 6})
    back = restore(tmp_path, like={True: 0, False: 0})
    assert [*map(type, back)] == [bool, bool] and back == {True: 5, False: 6}
    with pytest.raises(SpecError, match="another structure"):
        restore(tmp_path, like={1: 0, 0: 0})


def test_a_tree_of_one_leaf(tmp_path: Path) -> None:
    save(tmp_path, torch.ones(2))
    assert restore(tmp_path, like=torch.zeros(2)).equal(torch.ones(2))
    with pytest.raises(SpecError, match=r"cannot write, the whole .*got object"):
        save(tmp_path, object())


def test_none_stands_for_a_whole_tree(tmp_path: Path) -> None:
    save(tmp_path, State({"w": 1}, {"state": {"m": [2, 3]}}, 4))
    assert restore(tmp_path, like=State(None, None)) == State({"w": 1}, {"state": {"m": [2, 3]}}, 4)
    save(tmp_path, {"run": State(1, 2, 3)})
    with pytest.raises(SpecError, match=r"like has no State as was saved, \['run'\] \(got one of \['\.params', "):
        restore(tmp_path, like={"run": None})


def test_like_of_other_classes(tmp_path: Path) -> None:
    loader = Loader(torch.arange(10), 2)
    next(iter(loader))
    saved = {"loader": loader, "run": {"grown": State(1, {"x": Wrapped(2)})}}
    save(tmp_path, saved)
    for like, expected in (
        ({"run": {}}, r"no State as was saved, \['run'\]\['grown'\] \(got one of"),
        ({"run": {"grown": State(1, {})}}, r"no Wrapped as was saved, \['run'\]\['grown'\]\.opt_state\['x'\]"),
        ({"run": {"grown": {"params": 1}}}, r"another structure .*\['params'\]"),
        ({"run": {"grown": State(1, {"y": 0})}}, r"another structure .*\['y'\].* not in the checkpoint"),
    ):
        fresh = Loader(torch.arange(10), 2)
        with pytest.raises(SpecError, match=expected):
            restore(tmp_path, like={"loader": fresh, **like})
        assert fresh.state_dict() == {"epoch": 0, "step": 0}  # nothing is touched
    back = restore(tmp_path, like={"run": {"grown": State(0, {"x": Wrapped(0)})}})
    assert back["run"]["grown"].opt_state["x"].inner == 2


def test_the_manifest_tells_of_classes(tmp_path: Path) -> None:
    save(tmp_path, Run(1))
    assert manifest.read(tmp_path)["tree"] == {"class": "Run", "at": [".state", ".name"], "of": ["leaf", "leaf"]}


def test_names_that_cannot_be_written(tmp_path: Path) -> None:
    for tree in ({"\ud800": torch.ones(2)}, {"a": {"b\udfff": [torch.ones(2)]}}):
        with pytest.raises(SpecError, match="half of a character"):
            save(tmp_path, tree)
    save(tmp_path, {"\U0001f600": torch.ones(2), "a": "\ud800"}).result()
    assert restore(tmp_path)["a"] == "\ud800"
