"""Seccomp filters for the program that this text is put in front of; needs nothing of tiermem."""

import ctypes
import struct
import sys

LOAD, EQUAL, GREATER, GIVE = 0x20, 0x15, 0x25, 0x06  # LD|W|ABS, JMP|JEQ|K, JMP|JGT|K, RET|K
ALLOW, FAIL = 0x7FFF0000, 0x00050000


def forbid(numbers: list[int], error: int) -> None:
    """These system calls fail with this errno in this thread and those that it starts."""
    code = [(LOAD, 0, 0, 0)]
    code += [(EQUAL, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]
    install([*code, (GIVE, 0, 0, ALLOW), (GIVE, 0, 0, FAIL | error)])


def forbid_batches(number: int, most: int, error: int) -> None:
    """The system call fails if its second argument is above ``most``."""
    code = [(LOAD, 0, 0, 0), (EQUAL, 0, 2, number), (LOAD, 0, 0, 24), (GREATER, 1, 0, most)]
    install([*code, (GIVE, 0, 0, ALLOW), (GIVE, 0, 0, FAIL | error)])


def install(code: list[tuple[int, int, int, int]]) -> None:
    raw = b"".join(struct.pack("HBBI", *one) for one in code)
    text = ctypes.create_string_buffer(raw)
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(text)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
        sys.exit("SKIP seccomp filters do not work here")
