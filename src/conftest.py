"""Modules that doctest leaves out: those written in Triton's language, where it is missing."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["halfword/backends/kernels/*.py"]
