"""What of the package is compiled; all else is in pyproject.toml, where setuptools still calls this an experiment."""

from setuptools import Extension, setup

# Small all-reductions are faster with it. Where it can't be compiled, the library is installed without.
small = Extension("spmd.kernels.shm._small", ["kernels/shm/_small.c"], extra_compile_args=["-O3"], optional=True)

setup(ext_modules=[small])
