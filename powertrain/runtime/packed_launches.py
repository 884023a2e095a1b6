"""Packing of the arguments of consecutive launches into one buffer.

Addresses change from call to call: each is packed once, whatever kernels take it, all by one call of struct. The
others, most of them, are written when the buffer is made.
"""

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple


class Address(NamedTuple):
    """An argument that changes: an address as an expression, or with `rest` the tensor map of one."""

    expression: str
    rest: bytes | None = None


class PackedLaunches:
    """slots    (buffer, address of each launch's pointer array, those arrays): taken and put back, so that threads
                never share one
    changing    the addresses in the order in which `pack_into(buffer, 0, ...)` takes them
    """

    def __init__(self, launches: Sequence[tuple[Any, Sequence[Address | int | float]]]) -> None:
        """`launches`: each kernel, loaded (runtime/launch.py), and its arguments, Triton's hidden ones too."""
        every = [argument for _, arguments in launches for argument in arguments]
        self.changing = list(dict.fromkeys(argument for argument in every if isinstance(argument, Address)))
        formats = ["Q" if address.rest is None else "Q120s" for address in self.changing]
        layout = struct.Struct("@" + "".join(formats))
        self.pack_into = layout.pack_into
        places = [struct.calcsize("@" + "".join(formats[:count])) for count in range(len(formats))]
        place_of = dict(zip(self.changing, places, strict=True))
        self._constants: list[tuple[str, int, int | float]] = []  # format, place, value
        self._zero = self._size = layout.size
        self._pointers: list[list[int]] = []  # of each launch: places in the buffer
        for loaded, arguments in launches:
            places = [
                place_of[argument] if isinstance(argument, Address) else self._constant(format, argument)
                for format, argument in zip(loaded.formats, arguments, strict=True)
            ]
            self._pointers.append(loaded.pointers(places, self._zero))
        self.slots: list[tuple[Any, ...]] = []

    def _constant(self, format: str, value: int | float) -> int:
        """Its place; 8 bytes for each, whatever its size, behind a zero, which an absent tensor map is."""
        if format == "Q120s":
            return self._zero
        self._size += 8
        self._constants.append((format, self._size, value))
        return self._size

    def new_slot(self) -> tuple[Any, ...]:
        buffer = ctypes.create_string_buffer(self._size + 8)
        for format, place, value in self._constants:
            struct.pack_into("@" + format, buffer, place, value)
        base = ctypes.addressof(buffer)
        arrays = [(ctypes.c_void_p * len(places))(*(base + place for place in places)) for places in self._pointers]
        return buffer, *map(ctypes.addressof, arrays), arrays
