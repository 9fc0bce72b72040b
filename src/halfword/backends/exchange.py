"""What many tensors are, seen in one call: DLPack's C exchange interface, which torch offers.

Each question that Python asks of a tensor takes 0.15 us, 0.4 where the tensor is cold, and a step
has several for each of its tensors. In C++ all of them take the time of one, and without a header
of torch.
"""

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfword.backends.compiling import CompileError

WORDS = 3
"""Of each tensor: its address, its elements, and its dtype, device and contiguity together."""

MAJOR = 1
"""Version of dlpack.h whose layout exchange.h states."""


class Exchange:
    """Sees tensors through the compiled library.

    Raises:
        CompileError: this torch offers another interface.
    """

    def __init__(self, compiled: ctypes.CDLL) -> None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        prototype = ctypes.PYFUNCTYPE(ctypes.c_bool, pointer, pointer, integer, pointer)
        self._see: Any = prototype(("halfword_see", compiled))
        self._api = _api()

    def see(self, tensors: Sequence[Tensor]) -> "array[int]":
        """Return ``WORDS`` words of each tensor; none where one has no memory, as sparse ones."""
        objects = array("Q", map(id, tensors))
        words = array("Q", bytes(WORDS * objects.itemsize * len(objects)))
        try:
            self._see(*(self._api, objects.buffer_info()[0], len(objects)), words.buffer_info()[0])
        except RuntimeError:  # torch's
            return array("Q")
        return words


def _api() -> int:
    name = b"dlpack_exchange_api"
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.argtypes, get.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
    address: int = get(torch.Tensor.__dlpack_c_exchange_api__, name)
    major = ctypes.c_uint32.from_address(address).value
    if major != MAJOR:
        raise CompileError(f"torch exchanges tensors by DLPack {major}, not {MAJOR}")
    return address
