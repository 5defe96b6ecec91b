"""What ranks log and warn of reaches the program's own handlers and filters."""

from __future__ import annotations

import logging
import sys
import warnings

import cloudpickle
import pytest
import torch
from scripts import run, script

from spmd import axis_index, spmd

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def kept():
    """A handler of the logger "app", whose level is INFO while the mesh is made."""
    logger, handler = logging.getLogger("app"), Kept()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def test_records_reach_the_handlers_with_their_rank(kept, make_mesh, capfd):
    mesh = make_mesh({"data": 2})

    @spmd(mesh=mesh)
    def step(x):
        app = logging.getLogger("app.training")
        app.debug("not wanted")
        app.info("part %d of %s", axis_index("data"), "two", extra={"loss": 0.5})
        try:
            1 / 0  # noqa: B018
        except ZeroDivisionError:
            app.exception("failed")
        return x

    step(torch.ones(1)).full()
    records = sorted(kept.records, key=lambda record: (record.rank, record.created))
    assert [(record.rank, record.levelname, record.getMessage()) for record in records] == [
        *((0, "INFO", "part 0 of two"), (0, "ERROR", "failed")),
        *((1, "INFO", "[rank 1] part 1 of two"), (1, "ERROR", "[rank 1] failed")),
    ]
    first = records[0]
    assert first.name == "app.training" and first.funcName == "step" and first.loss == 0.5
    assert first.processName == "rank 0" and first.pathname == __file__
    assert "ZeroDivisionError" in logging.Formatter().format(records[1])
    logging.getLogger("app").setLevel(logging.ERROR)  # what is set later holds here
    kept.records.clear()
    step(torch.ones(1)).full()
    assert {record.levelname for record in kept.records} == {"ERROR"}
    assert capfd.readouterr().err == ""  # and nothing is printed besides


def test_warnings_meet_the_filters_once(make_mesh):
    mesh = make_mesh({"data": 3})

    @spmd(mesh=mesh)
    def step(x):
        warnings.warn("the same on all ranks", UserWarning, stacklevel=1)
        warnings.warn("quiet", RuntimeWarning, stacklevel=1)
        return x

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        warnings.simplefilter("ignore", RuntimeWarning)
        step(torch.ones(1)).full()
        step(torch.ones(2)).full()
        mesh.run(lambda: None)
    assert [(str(one.message), one.category, one.filename) for one in found] == [
        ("the same on all ranks", UserWarning, __file__)
    ]


def test_where_a_filter_makes_errors_of_them_they_are_shown(make_mesh, capfd):
    mesh = make_mesh({"data": 2})

    def warn():
        warnings.warn("odd", UserWarning, stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh.run(warn)
    assert capfd.readouterr().err.count("UserWarning: odd") == 1


PROGRAM = """
import logging, spmd
if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s|%(processName)s|%(message)s")
    mesh = spmd.Mesh({"data": 2})
    def tell():
        logging.basicConfig(level=logging.INFO)  # as modules do when they are imported
        logging.info("here")
        logging.debug("not here")
    mesh.run(tell)
"""


def test_a_script_with_a_basic_configuration(tmp_path):
    code, out, err = run(script(tmp_path, PROGRAM))
    assert code == 0 and out == "" and sorted(err.splitlines()) == ["INFO|rank 0|here", "INFO|rank 1|[rank 1] here"]
