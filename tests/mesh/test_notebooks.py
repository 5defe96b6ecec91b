"""A mesh in a notebook, driven through a real kernel as a front end does it; and the notebooks of notebooks/."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from frontend import Kernel, kernel, kernels_are_forks
from patience import HANGS, end_within, quick, running, slowness
from scripts import FORKED_CHILDREN, HERE, run

from spmd import Loader, Mesh, P, PeerLost, SpecError, spmd

MESH = "Mesh({'data': 2}, backend='shm', device='cpu')"
IMPORTS = """
import time
import torch
from spmd import *
mesh = Mesh({"data": 2})
"""
# However late a rank shows what others show, too, it is known as the same.
PATIENT = f"""
import sys
sys.path.append({HERE!r})
from internals import compare_late_output
compare_late_output(setattr)
"""


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """One notebook for all tests that leave its mesh as it is."""
    folder = tmp_path_factory.mktemp("notebook")
    with kernel(folder) as started:
        started.ok(PATIENT + IMPORTS)
        yield started


def pids(book: Kernel) -> list[int]:
    """The processes of a notebook's mesh: its ranks, and what they were forked from."""
    text = book.ok("[*mesh.driver.pids, mesh.driver.ranks.all[0]._zygote._process.pid]").result
    return [int(pid) for pid in re.findall(r"\d+", text)]


# -- what is seen of the ranks -----------------------------------------------------------------------------------------


def test_the_table_of_the_ranks_is_live(book: Kernel, tmp_path: Path) -> None:
    """The one that was shown last, wherever that was, and until the mesh is closed."""
    seen = tmp_path / "seen"
    book.ok(f"import os, threading\ndef wait():\n    while not os.path.exists({str(seen)!r}): time.sleep(0.01)")
    book.ok("mesh.run(lambda: None)")
    cell = book.ok("mesh.status()")
    assert "idle" in cell.result and "<table>" in cell.data[-1]["text/html"]
    book.ok("mesh.status()[0].rank")  # is not shown

    def run_until_seen(update: dict[str, Any]) -> None:
        if "in call" in update["data"]["text/plain"]:
            seen.touch()

    working = book.ok("mesh.run(wait)", on_update=run_until_seen)
    seen.unlink()
    (first,) = {update["transient"]["display_id"] for update in working.updates}
    book.ok("mesh.status()")
    again = book.ok("mesh.run(wait)", on_update=run_until_seen)
    assert again.updates[-1]["transient"]["display_id"] != first
    wait = "end = time.monotonic() + 60\nwhile threads() != {} and time.monotonic() < end: time.sleep(0.01)"
    book.ok("def threads():\n    return [one.name for one in threading.enumerate()].count('spmd-status')")
    assert book.ok(f"{wait.format(1)}\nthreads()").result == "1"
    assert book.ok(f"mesh.restart(); mesh.close()\n{wait.format(0)}\nthreads()").result == "0"
    book.ok("mesh.restart()")


# -- functions and values ----------------------------------------------------------------------------------------------


def test_functions_are_redefined(book: Kernel) -> None:
    book.ok("def f(x):\n    return g(x) + 1\n\ndef g(x):\n    return 10 * x")
    assert book.ok("mesh.run(f, 2)").result == "[21, 21]"
    book.ok("def g(x):\n    return 100 * x")
    assert book.ok("mesh.run(f, 2)").result == "[201, 201]"
    book.ok("@spmd(mesh=mesh)\ndef step(x):\n    return g(x)")
    assert book.ok("float(step(torch.tensor(2.0)))").result == "200.0"
    book.ok("def g(x):\n    return 7 * x")
    assert book.ok("float(step(torch.tensor(2.0)))").result == "14.0"
    book.ok("class Shape:\n    sides = 3\ndef sides():\n    return Shape().sides")
    assert book.ok("mesh.run(sides)").result == "[3, 3]"
    book.ok("class Shape:\n    sides = 4")
    assert book.ok("mesh.run(sides)").result == "[4, 4]"


def test_values_stay_on_the_ranks_between_cells(book: Kernel) -> None:
    book.ok("total = put(torch.arange(6.0), P('data'), mesh=mesh)")
    book.ok("@spmd(mesh=mesh, out_specs=P('data'))\ndef double(x):\n    return 2 * x")
    for _ in range(3):
        book.ok("total = double(total)")
    shown = book.ok("total")
    assert shown.result == f"Array(float32[6], P('data'), {MESH})"
    assert "0:3" in shown.data[-1]["text/html"] and "rank 1" in shown.data[-1]["text/html"]
    assert book.ok("total.full().tolist()").result == "[0.0, 8.0, 16.0, 24.0, 32.0, 40.0]"
    assert "rank 1" in book.ok("mesh").data[-1]["text/html"]


def test_pictures(book: Kernel) -> None:
    book.ok("drawn = put(torch.zeros(2), P('data'), mesh=mesh)\nsampler = Sampler(8, 4)")
    book.ok("loader = Loader({'x': torch.arange(8)}, 4, mesh=mesh)")
    cell = book.ok("for one in (mesh, drawn, sampler, loader):\n    visualize(one)")
    assert len(cell.data) == 4 and all("background:" in data["text/html"] for data in cell.data)
    assert cell.text() == ""
    page = book.ok("sampler").data[-1]["text/html"]
    assert "rank 1" in page and "step 1" in page


def test_a_change_of_a_global_is_seen_by_the_next_call(book: Kernel) -> None:
    """The rule of docs/notebooks.md: a call sees what its function refers to as it is when the call is made."""
    book.ok(
        "rate, options, weight, names = 1, {'deep': [{'er': 1}]}, torch.ones(2), ['a']\n"
        "class Settings:\n    scale = 1\n"
        "settings = Settings()\n"
        "def look():\n    return rate, options['deep'][0]['er'], float(weight.sum()), len(names), settings.scale\n"
        "seen = lambda: mesh.run(look)[1]"
    )
    assert book.ok("seen()").result == "(1, 1, 2.0, 1, 1)"
    book.ok("rate = 2")  # rebound
    book.ok("options['deep'][0]['er'] = 3; names.append('b'); settings.scale = 4")  # changed in place
    book.ok("weight += 1")
    assert book.ok("seen()").result == "(2, 3, 4.0, 2, 4)"
    # What a rank does to its copy stays there, until the function is sent again.
    book.ok("def write():\n    names.append('c')\n    return len(names)")
    assert book.ok("mesh.run(write), len(names)").result == "([3, 3], 2)"
    # A call that is under way keeps what it was given.
    book.ok("def late():\n    time.sleep(0.3)\n    return rate\nfuture = mesh.submit(late, rank=1)\nrate = 5")
    assert book.ok("future.result(), mesh.run(late, ranks=[0])").result == "(2, [5])"


def test_a_global_that_shadows_an_import_is_sent_too(book: Kernel) -> None:
    book.ok("from math import sqrt\ndef root(x):\n    return sqrt(x)")
    assert book.ok("mesh.run(root, 9)").result == "[3.0, 3.0]"
    book.ok("def sqrt(x):\n    return -1")
    assert book.ok("mesh.run(root, 9)").result == "[-1, -1]"


# -- what ranks show ---------------------------------------------------------------------------------------------------


def test_lines_appear_in_the_running_cell_as_they_are_printed(book: Kernel) -> None:
    cell = book.ok(
        "import sys\n"
        "def talk():\n"
        "    rank = axis_index('data')\n"
        "    for step in range(3):\n"
        "        print('step', step)\n"
        "        print('warn', file=sys.stderr)\n"
        "        time.sleep(0.4)\n"
        "    rank == 1 and print('only me')\n"
        "mesh.run(talk);"
    )
    assert cell.text() == "step 0\nstep 1\nstep 2\n[rank 1] only me\n"
    assert cell.text("stderr") == "warn\n" * 3
    times = {text.strip(): second for second, name, text in cell.pieces if name == "stdout"}
    apart = (times["step 1"] - times["step 0"], times["step 2"] - times["step 1"])
    assert min(apart) > 0.25 or slowness() > 1, cell.pieces  # where cores are taken, lines may wait for each other
    # The next cell's lines are its own, though the same thread writes them.
    assert book.ok("mesh.run(print, 'next');").text() == "next\n"


def test_a_traceback_shows_the_lines_of_the_cell(book: Kernel) -> None:
    book.ok("def inner(x):\n    y = x - 1  # the line before\n    return 1 / y")
    number = int(book.ok("len(In) - 2").result)
    cell = book("def outer(x):\n    return inner(x)\nmesh.run(outer, 1)")
    # The other rank may be too slow to say the same.
    where = rf"on rank(s 0-1| 0| 1) of {re.escape(MESH)}"
    assert re.search(rf"ZeroDivisionError: division by zero\n\[raised {where}\]$", cell.error.rstrip()), cell.error
    assert re.search(f"^{where}:", cell.error, re.MULTILINE), cell.error
    assert f"  Cell In[{number}], line 3, in inner\n    return 1 / y" in cell.error, cell.error
    assert f"  Cell In[{number + 2}], line 2, in outer\n    return inner(x)" in cell.error
    assert "mesh.run(outer, 1)" in cell.error and "mesh.py" not in cell.error
    cell = book("@spmd(mesh=mesh)\ndef step(x):\n    return inner(x)\nstep(torch.tensor(1))\nstep(1)")
    assert "ZeroDivisionError" in cell.error and "_spmd.py" not in cell.error, cell.error
    cell = book("step(torch.tensor(1), 2)")
    assert "TypeError: step() too many positional arguments" in cell.error and "_spmd.py" not in cell.error
    book.ok("@spmd(mesh=mesh)\ndef late(x):\n    return inner(int(x)) + x\nlate(torch.tensor(2))")
    cell = book("found = late(put(torch.tensor(1), mesh=mesh))\nfound.full()")
    assert "array.py" not in cell.error and "found.full()" in cell.error, cell.error
    cell = book("def uneven():\n    psum(torch.ones(2 + axis_index('data')), 'data')\nmesh.run(uneven)")
    assert re.search(r"CollectiveMismatch(.|\n)*at Cell In\[\d+\], line 2 in uneven", cell.error), cell.error


def test_one_bar_as_a_widget(book: Kernel) -> None:
    cell = book.ok(
        "from tqdm.auto import tqdm\n"
        "def loop():\n"
        "    for _ in tqdm(range(5), 'steps'):\n"
        "        time.sleep(0.15)\n"
        "mesh.run(loop);"
    )
    widgets = [data for data in cell.data if "application/vnd.jupyter.widget-view+json" in data]
    assert len(widgets) == 1 and "steps" in widgets[0]["text/plain"]
    values = [data["state"]["value"] for data in cell.comms if "value" in data.get("state", {})]
    numbers = [value for value in values if isinstance(value, int | float)]
    assert numbers == sorted(numbers) and numbers[-1] == 5 and len(set(numbers)) >= 4
    assert cell.text() == cell.text("stderr") == ""


# -- stop, restart, end ------------------------------------------------------------------------------------------------


def test_the_stop_button(book: Kernel) -> None:
    ranks = pids(book)
    book.ok("kept = put(torch.ones(2), mesh=mesh)")
    for call in ("time.sleep(30)", "barrier() if axis_index('data') else time.sleep(30)", "[0 for _ in iter(int, 1)]"):
        cell = book(f"mesh.run(lambda: {call})", interrupt_after=0.5)
        assert cell.error.rstrip().endswith("KeyboardInterrupt:"), cell.error
        assert quick(cell.seconds, 2.5)
        assert book.ok("float(kept.full().sum()), mesh.run(lambda: 1)").result == "(2.0, [1, 1])"
    book.ok("@spmd(mesh=mesh)\ndef double(x):\n    return 2 * x\ntotal = double(kept)")
    cell = book("for _ in range(10**9):\n    total = double(total)", interrupt_after=0.5)
    assert "KeyboardInterrupt" in cell.error
    assert book.ok("total.shape").result == "torch.Size([2])"
    assert pids(book) == ranks


@pytest.mark.parametrize("how", ["restart", "kill"])
def test_a_kernel_that_ends_leaves_no_process(tmp_path: Path, how: str) -> None:
    with kernel(tmp_path, fresh=how == "kill") as book:
        book.ok(IMPORTS)
        ranks = pids(book)
        assert all(map(running, ranks))
        if how == "kill":
            book.client.execute("mesh.run(lambda: time.sleep(60))")
            time.sleep(0.3)
            book.manager.signal_kernel(signal.SIGKILL)
        else:
            book.manager.restart_kernel()
            book.client.wait_for_ready(HANGS)
            assert book.ok("1 + 1").result == "2"
        assert end_within(2.0, ranks)


def test_two_notebooks_do_not_meet(book: Kernel, tmp_path: Path) -> None:
    code = "[mesh.run(lambda: float(psum(torch.tensor({}), 'data'))) for _ in range(200)][-1]"
    with kernel(tmp_path) as other:
        other.ok(IMPORTS.replace('"data": 2', '"data": 3'))
        waiting = other.client.execute(code.format("10.0"), user_expressions={"sum": "_"})
        assert book.ok(code.format("1.0")).result == "[2.0, 2.0]"
        assert other.reply(waiting)["status"] == "ok"
        assert other.ok("_").result == "[30.0, 30.0, 30.0]"
        ranks = pids(other)
    assert end_within(2.0, ranks) and book.ok("mesh.run(lambda: mesh.size)").result == "[2, 2]"


def test_a_mesh_is_restarted(tmp_path: Path) -> None:
    with kernel(tmp_path) as book:
        book.ok(IMPORTS)
        book.ok("value = put(torch.ones(2), mesh=mesh)")
        book.ok("@spmd(mesh=mesh)\ndef double(x):\n    return 2 * x\ndouble(value)")
        ranks = pids(book)[:-1]
        book("mesh.run(lambda: [0 for _ in iter(int, 1)])", interrupt_after=0.3)
        book.ok("mesh.restart()")
        assert end_within(2.0, ranks)
        for use in ("value.full()", "double(value)", "mesh.run(lambda: value.local)"):
            cell = book(use)
            said = r"MeshError: this value was lost when its mesh was restarted.*put\(\) it again"
            assert re.search(said, cell.error), cell.error
        assert book.ok("double(put(torch.ones(2), mesh=mesh)).full().tolist()").result == "[2.0, 2.0]"
        book.ok("mesh.close()")
        book.ok("mesh.restart()")
        assert book.ok("mesh.run(lambda: mesh.rank)").result == "[0, 1]"


def test_a_module_that_was_edited_is_loaded_again(tmp_path: Path) -> None:
    def write(**texts: str) -> None:
        for name, text in texts.items():
            (tmp_path / f"{name}.py").write_text(text)

    write(constants="RATE = 1\n", model="from constants import RATE\n\ndef f(x):\n    return x * RATE\n")
    with kernel(tmp_path) as book:
        book.ok(IMPORTS)
        book.ok("import model\nfrom model import f\nkept = put(torch.tensor(3.0), mesh=mesh)")
        book.ok("step = spmd(f, mesh=mesh)\ndef through(x):\n    return model.f(x)")
        look = "float(step(kept)), mesh.run(through, 3), mesh.run(f, 3), f(3)"
        assert book.ok(look).result == "(3.0, [3, 3], [3, 3], 3)"
        assert book.ok("mesh.reload()").result == "[]"
        write(constants="RATE = 10\n")
        assert book.ok(look).result == "(3.0, [3, 3], [3, 3], 3)"
        assert book.ok("mesh.reload()").result == "['constants', 'model']"
        assert book.ok(look).result == "(30.0, [30, 30], [30, 30], 30)"
        write(model="def f(x):\n    return x, x + 1\n")  # results of another structure
        assert book.ok("mesh.reload()").result == "['model']"
        assert book.ok("float(step(kept)[1]), mesh.run(through, 3), f(3)").result == "(4.0, [(3, 4), (3, 4)], (3, 4))"
        write(model="def f(x):\n    return x +\n")
        cell = book("mesh.reload()")
        assert "SyntaxError" in cell.error and book.ok("mesh.run(f, 3)[0]").result == "(3, 4)"
        write(model="def f(x):\n    return -x\n")
        assert book.ok("mesh.reload('model'), mesh.run(f, 3)").result == "(['model'], [-3, -3])"
        # A module that only the ranks have imported.
        write(theirs="answer = 1\n")
        book.ok("def theirs():\n    import theirs\n    return theirs.answer")
        assert book.ok("mesh.run(theirs), mesh.run(len, 'noticed')[0]").result == "([1, 1], 7)"
        write(theirs="answer = 22\n")
        assert book.ok("mesh.reload(), mesh.run(theirs)").result == "(['theirs'], [22, 22])"


def test_a_module_that_the_kernel_has_loaded_again(tmp_path: Path) -> None:
    """By IPython's %autoreload, which may run only the lines that have changed, or by importlib: on the ranks, too."""

    def write(text: str, second: int) -> None:
        (tmp_path / "model.py").write_text(text)
        os.utime(tmp_path / "model.py", (second, second))

    begin = int(time.time())
    write("RATE = 1\n\ndef f(x):\n    return x * RATE\n", begin)
    look = "float(step(kept)), mesh.run(f, 3), mesh.run(lambda: model.RATE), f(3)"
    with kernel(tmp_path) as book:
        book.ok(IMPORTS + "import importlib, model\nfrom model import f\nkept = put(torch.tensor(3.0), mesh=mesh)")
        book.ok("step = spmd(f, mesh=mesh)\n%load_ext autoreload\n%autoreload 2")
        assert book.ok(look).result == "(3.0, [3, 3], [1, 1], 3)"
        write("RATE = 10\n\ndef f(x):\n    return x * RATE\n", begin + 10)
        for _ in range(2):
            assert book.ok(look).result == "(30.0, [30, 30], [10, 10], 30)"
        book.ok("%autoreload 0")
        write("RATE = 100\n\ndef f(x):\n    return x * RATE, x\n", begin + 20)
        assert book.ok(look).result == "(30.0, [30, 30], [10, 10], 30)"
        book.ok("model = importlib.reload(model)")
        assert book.ok("mesh.run(lambda: model.f(3))").result == "[(300, 3), (300, 3)]"
        write("RATE = 100\n\ndef f(x):\n    return x +\n", begin + 30)
        for code in "importlib.reload(model)", "mesh.run(f, 3)", "step(kept)":
            assert "SyntaxError" in book(code).error
        write("RATE = 7\n\ndef f(x):\n    return x * RATE\n", begin + 40)
        book.ok("model = importlib.reload(model)")
        assert book.ok("mesh.run(lambda: model.RATE)").result == "[7, 7]"


def imported(name: str, monkeypatch: pytest.MonkeyPatch, *parts: str) -> Any:
    """A module, which is not there any more after the test: a later `mesh.reload` would look for its file."""
    for one in (name, *parts):
        monkeypatch.setitem(sys.modules, one, types.ModuleType(one))
        del sys.modules[one]
    return importlib.import_module(name)


def test_a_module_that_only_the_driver_can_load_again(
    make_mesh: Callable[..., Mesh], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks never run old code in silence: each call says that they can't, until they can."""
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "loaded_here_alone.py"
    file.write_text("rate = 1\n")
    module = imported("loaded_here_alone", monkeypatch)
    mesh = make_mesh({"data": 2})

    def rate() -> int:
        return importlib.import_module("loaded_here_alone").rate

    try:
        assert mesh.run(rate) == [1, 1]
        file.write_text(f"import os\nrate = 22\nif os.getpid() != {os.getpid()}:\n    raise OSError('no data here')\n")
        importlib.reload(module)
        for call in lambda: mesh.run(rate), lambda: spmd(rate, mesh=mesh)():
            for _ in range(2):
                with pytest.raises(OSError, match="no data here") as caught:
                    call()
                notes = "".join(getattr(caught.value, "__notes__", ()))
                assert sys.version_info < (3, 11) or "could not load loaded_here_alone again" in notes
        file.write_text("rate = 333\n")
        assert mesh.run(rate) == [333, 333]
    finally:
        mesh.close()


def test_classes_of_a_module_that_was_loaded_again(
    make_mesh: Callable[..., Mesh], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object keeps its old class, and a class of a cell has the base that it has in the notebook."""
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "with_a_class.py"
    text = "RATE = {}\n\nclass Kind:\n    def rate(self):\n        return {}\n"
    file.write_text(text.format(1, "RATE"))
    module = imported("with_a_class", monkeypatch)
    mesh, kept = make_mesh({"data": 2}), module.Kind()
    of_cell = type("Cell", (module.Kind,), {"__module__": "__main__"})

    def rates() -> tuple[int, int]:
        return kept.rate(), of_cell().rate()

    assert mesh.run(rates) == [(1, 1)] * 2
    for rate in 22, 333:
        file.write_text(text.format(rate, "0 * RATE"))
        assert mesh.reload() == ["with_a_class"]
        assert mesh.run(rates) == [rates()] * 2 == [(rate, rate)] * 2
    # %autoreload changes a class in place.
    kept, of_cell = module.Kind(), type("Cell", (module.Kind,), {"__module__": "__main__"})
    assert mesh.run(rates) == [(0, 0)] * 2
    file.write_text(text.format(4444, "-RATE"))
    before = module.Kind
    importlib.reload(module)
    before.rate, module.Kind = module.Kind.rate, before
    assert mesh.run(rates) == [rates()] * 2 == [(-4444, -4444)] * 2


def test_a_module_that_was_edited_is_the_driver_s_on_new_ranks_too(
    make_mesh: Callable[..., Mesh], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those in the place of dead ones, those of a resize, and processes that read: until the driver loads it again."""
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "being_edited"
    package.mkdir()
    files = [package / "__init__.py", package / "part.py", package / "later.py"]
    text = "import torch\nfrom . import part, later\nclass Rows:\n    rate = {}\n    def __len__(self):\n"
    text += "        return 4\n    def __getitem__(self, i):\n        return torch.tensor(self.rate)\n"
    texts = [text, "RATE = {}\n", "RATE = {}\n"]

    def write(rate: int) -> None:
        for file, content in zip(files, texts, strict=True):
            file.write_text(content.format(rate))

    write(1)
    module = imported("being_edited", monkeypatch, "being_edited.part", "being_edited.later")
    mesh = make_mesh({"data": 2})

    def rates() -> set[int]:
        loaders = [Loader(module.Rows(), 2, workers=workers, mesh=mesh) for workers in (0, 1)]
        read = {int(rate) for loader in loaders for batch in loader for rate in batch.full()}
        return {*read, *mesh.run(lambda: module.part.RATE), *mesh.run(lambda: module.Rows().rate)}

    assert rates() == {1}
    write(22)
    files[2].unlink()
    killed = mesh.run(os.getpid)[1]
    os.kill(killed, signal.SIGKILL)
    with contextlib.suppress(PeerLost):
        mesh.run(os.getpid)
    assert killed not in mesh.run(os.getpid) and rates() == {1}
    assert mesh.run(lambda: module.later.RATE) == [1, 1]
    mesh.resize({"data": 3})
    assert rates() == {1}
    mesh.restart()
    assert rates() == {1}
    assert make_mesh({"data": 1}).run(lambda: module.part.RATE) == [1]
    write(333)
    assert {*mesh.reload()} == {"being_edited", "being_edited.part", "being_edited.later"}
    assert rates() == {333}
    mesh.resize({"data": 2})
    assert rates() == {333}
    write(4444)
    importlib.reload(module.part)
    mesh.resize({"data": 1})
    assert mesh.run(lambda: module.part.RATE) == [4444]


def test_a_call_of_code_that_was_loaded_again_is_a_first_call(
    make_mesh: Callable[..., Mesh], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "loaded_with_a_mistake.py"
    file.write_text("import spmd\n\ndef total(x):\n    return spmd.psum(x.sum(), 'data')\n")
    mesh = make_mesh({"data": 2})
    monkeypatch.setitem(sys.modules, "another_that_goes", types.ModuleType("another_that_goes"))
    assert mesh.run(lambda: 1) == [1, 1]
    monkeypatch.delitem(sys.modules, "another_that_goes")  # so that there are as many modules as before
    module = imported("loaded_with_a_mistake", monkeypatch)
    total, x = spmd(module.total, mesh=mesh, in_specs=P("data")), torch.ones(2)
    assert [float(total(x)) for _ in range(2)] == [2, 2]
    file.write_text("def total(x):\n    return x.sum()\n")  # the same on both ranks, by chance
    importlib.reload(module)
    with pytest.raises(SpecError, match="total may differ between ranks along data, though it does not this time"):
        total(x)


# -- notebooks/ --------------------------------------------------------------------------------------------------------

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
NAMES = [
    "1_first_steps",
    "2_character_transformer",
    "3_collectives",
    "4_tensor_and_pipeline",
    "5_a_longer_run",
    "6_several_hosts",
]
LONG = ("2_character_transformer", "5_a_longer_run", "6_several_hosts")


def outputs(path: Path) -> list[list[dict[str, Any]]]:
    """What the cells of a notebook show, cell by cell."""
    return [cell["outputs"] for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def kinds(shown: list[dict[str, Any]]) -> set[str]:
    """Of what kinds the outputs of a cell are; a stream comes in as many pieces as time has it."""
    return {kind for output in shown for kind in (output.get("data") or [output["name"]])}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in NAMES])
def test_a_notebook_runs_and_shows_what_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = tmp_path / f"{name}.ipynb"
    shutil.copy(NOTEBOOKS / path.name, path)
    shutil.copy(NOTEBOOKS / "pictures.py", tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SPMD_RANKS", "2")
    if name == NAMES[0]:  # as its reader does it
        code, out, err = run(str(NOTEBOOKS / "execute.py"), str(path), env=FORKED_CHILDREN)
        assert code == 0, out + err
    else:
        monkeypatch.syspath_prepend(NOTEBOOKS)
        with kernels_are_forks():
            nbformat.write(importlib.import_module("execute").execute(path), path)
    committed, found = outputs(NOTEBOOKS / path.name), outputs(path)
    assert list(map(kinds, committed)) == list(map(kinds, found))
    if name == "3_collectives":  # whole numbers: exactly the same everywhere
        assert committed == found


def test_every_notebook_is_run() -> None:
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")) == NAMES
