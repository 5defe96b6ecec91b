"""Transforms: pure function to pure function, and the collectives that the bodies of steps call."""

from ._data_parallel import data_parallel as data_parallel
from ._data_parallel import parallel_step as parallel_step
from ._feistel import numbered as numbered
from ._feistel import permutation as permutation
from ._grad import Transformable as Transformable
from ._grad import grad as grad
from ._grad import value_and_grad as value_and_grad
from ._mean_of import mean_of as mean_of
from ._movements import all_gather as all_gather
from ._movements import all_to_all as all_to_all
from ._movements import can_rewrite as can_rewrite
from ._movements import gather_written as gather_written
from ._movements import pbroadcast as pbroadcast
from ._movements import ppermute as ppermute
from ._movements import psum_scatter as psum_scatter
from ._named_axes import axis_index as axis_index
from ._named_axes import axis_size as axis_size
from ._named_axes import barrier as barrier
from ._plan import current_plan as current_plan
from ._random import random_key as random_key
from ._reductions import pmax as pmax
from ._reductions import pmean as pmean
from ._reductions import pmin as pmin
from ._reductions import psum as psum
from ._sampler import Sampler as Sampler
from ._tokens import after_gradient as after_gradient
