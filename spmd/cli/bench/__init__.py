"""Measuring this library beside its peers, in turn: what `spmd bench` needs, and the benches in `bench/` build on."""
