"""Transforms: pure function to pure function, and the collectives that the bodies of steps call."""

from ._collectives import all_gather as all_gather
from ._collectives import all_to_all as all_to_all
from ._collectives import axis_index as axis_index
from ._collectives import axis_size as axis_size
from ._collectives import barrier as barrier
from ._collectives import pbroadcast as pbroadcast
from ._collectives import pmax as pmax
from ._collectives import pmean as pmean
from ._collectives import pmin as pmin
from ._collectives import ppermute as ppermute
from ._collectives import psum as psum
from ._collectives import psum_scatter as psum_scatter
from ._data_parallel import data_parallel as data_parallel
from ._grad import grad as grad
from ._grad import value_and_grad as value_and_grad
from ._sampler import Sampler as Sampler
