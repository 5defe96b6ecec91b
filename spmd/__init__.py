"""spmd: functional SPMD for PyTorch. A mesh of processes, pure steps, named-axis collectives, transforms."""

import os as _os

# In a checkout the three sister folders lie beside this one; in an installation they lie inside it.
if not _os.path.isdir(_os.path.join(__path__[0], "kernels")):
    __path__.append(_os.path.dirname(__path__[0]))

from ._checkpoint import save as save
from ._functional import functional as functional
from ._functional import functional_with_buffers as functional_with_buffers
from ._loader import Loader as Loader
from ._optimizer import optimizer as optimizer
from ._restore import restore as restore
from ._spmd import spmd as spmd
from ._visualize import visualize as visualize
from .kernels.errors import CollectiveMismatch as CollectiveMismatch
from .kernels.errors import MeshError as MeshError
from .kernels.errors import PeerLost as PeerLost
from .kernels.errors import RemoteError as RemoteError
from .kernels.errors import SpecError as SpecError
from .kernels.errors import SpmdError as SpmdError
from .kernels.registry import register_backend as register_backend
from .mesh.array import Array as Array
from .mesh.mesh import Mesh as Mesh
from .mesh.placing import put as put
from .mesh.rendezvous import initialize as initialize
from .mesh.spec import P as P
from .mesh.spec import Sharded as Sharded
from .transforms import Sampler as Sampler
from .transforms import all_gather as all_gather
from .transforms import all_to_all as all_to_all
from .transforms import axis_index as axis_index
from .transforms import axis_size as axis_size
from .transforms import barrier as barrier
from .transforms import data_parallel as data_parallel
from .transforms import grad as grad
from .transforms import pbroadcast as pbroadcast
from .transforms import pmax as pmax
from .transforms import pmean as pmean
from .transforms import pmin as pmin
from .transforms import ppermute as ppermute
from .transforms import psum as psum
from .transforms import psum_scatter as psum_scatter
from .transforms import random_key as random_key
from .transforms import value_and_grad as value_and_grad

__version__ = "0.1.0"
