"""spmd: functional SPMD for PyTorch. A mesh of processes, pure steps, named-axis collectives, transforms."""

import gc as _gc
import importlib as _importlib
import os as _os
import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING

# In a checkout the three sister folders lie beside this one; in an installation they lie inside it.
if not _os.path.isdir(_os.path.join(__path__[0], "kernels")):
    __path__.append(_os.path.dirname(__path__[0]))

__version__ = "0.1.0"

_importlib.import_module(".torch_distributed.registration", __name__).register_when_loaded()

# Where each public name lives. A module is imported when one of its names is first asked for, so that the command line
# answers without torch.
_HOMES = {
    "_check": ("check",),
    "_count_collectives": ("count_collectives",),
    "_functional": ("functional", "functional_with_buffers"),
    "_spmd": ("spmd",),
    "_visualize": ("visualize",),
    "checkpoint.restore": ("restore",),
    "checkpoint.save": ("save",),
    "data.evaluate": ("evaluate",),
    "data.loader": ("Loader",),
    "data.streams": ("Stream",),
    "kernels.errors": ("CollectiveMismatch", "MeshError", "PeerLost", "RemoteError", "SpecError", "SpmdError"),
    "kernels.registry": ("register_backend",),
    "mesh.array": ("Array",),
    "mesh.launch.rendezvous": ("initialize",),
    "mesh.mesh": ("Mesh",),
    "mesh.put": ("fetch", "put"),
    "mesh.remote.handle": ("Remote",),
    "mesh.remote.reference": ("Ref",),
    "mesh.spec": ("P", "Sharded"),
    "optim.averaging": ("ema",),
    "optim.optimizer": ("optimizer",),
    "torch_distributed.dtensor": ("from_dtensor",),
    "transforms": (
        "Sampler",
        "all_gather",
        "all_to_all",
        "axis_index",
        "axis_size",
        "barrier",
        "data_parallel",
        "grad",
        "mean_of",
        "pbroadcast",
        "pmax",
        "pmean",
        "pmin",
        "ppermute",
        "psum",
        "psum_scatter",
        "random_key",
        "value_and_grad",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)

if _TYPE_CHECKING:
    from ._check import check as check
    from ._count_collectives import count_collectives as count_collectives
    from ._functional import functional as functional
    from ._functional import functional_with_buffers as functional_with_buffers
    from ._spmd import spmd as spmd
    from ._visualize import visualize as visualize
    from .checkpoint.restore import restore as restore
    from .checkpoint.save import save as save
    from .data.evaluate import evaluate as evaluate
    from .data.loader import Loader as Loader
    from .data.streams import Stream as Stream
    from .kernels.errors import CollectiveMismatch as CollectiveMismatch
    from .kernels.errors import MeshError as MeshError
    from .kernels.errors import PeerLost as PeerLost
    from .kernels.errors import RemoteError as RemoteError
    from .kernels.errors import SpecError as SpecError
    from .kernels.errors import SpmdError as SpmdError
    from .kernels.registry import register_backend as register_backend
    from .mesh.array import Array as Array
    from .mesh.launch.rendezvous import initialize as initialize
    from .mesh.mesh import Mesh as Mesh
    from .mesh.put import fetch as fetch
    from .mesh.put import put as put
    from .mesh.remote.handle import Remote as Remote
    from .mesh.remote.reference import Ref as Ref
    from .mesh.spec import P as P
    from .mesh.spec import Sharded as Sharded
    from .optim.averaging import ema as ema
    from .optim.optimizer import optimizer as optimizer
    from .torch_distributed.dtensor import from_dtensor as from_dtensor
    from .transforms import Sampler as Sampler
    from .transforms import all_gather as all_gather
    from .transforms import all_to_all as all_to_all
    from .transforms import axis_index as axis_index
    from .transforms import axis_size as axis_size
    from .transforms import barrier as barrier
    from .transforms import data_parallel as data_parallel
    from .transforms import grad as grad
    from .transforms import mean_of as mean_of
    from .transforms import pbroadcast as pbroadcast
    from .transforms import pmax as pmax
    from .transforms import pmean as pmean
    from .transforms import pmin as pmin
    from .transforms import ppermute as ppermute
    from .transforms import psum as psum
    from .transforms import psum_scatter as psum_scatter
    from .transforms import random_key as random_key
    from .transforms import value_and_grad as value_and_grad
else:

    def __getattr__(name):
        if name not in _HOME_OF:
            problem = f"module {__name__!r} has no attribute {name!r}"
            instead = _importlib.import_module("._names_elsewhere", __name__).INSTEAD.get(name)
            if instead is None:
                raise AttributeError(problem)
            # `from spmd import` would replace an AttributeError by one of its own, which says nothing more.
            imports = _sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap"
            raise (ImportError if imports else AttributeError)(f"{problem}: {instead}")
        # Garbage collections during an import find nothing, and take 0.1 s to walk all of torch's objects.
        collects = _gc.isenabled()
        _gc.disable()
        try:
            found = globals()[name] = getattr(_importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
        except AttributeError as error:  # which `from spmd import` would take for a name that spmd does not have
            raise ImportError(f"spmd.{name} cannot be imported: {error}") from error
        finally:
            if collects:
                _gc.enable()
        return found

    def __dir__():
        return sorted({*globals(), *__all__})
