"""SIGBUS in a process that computes on mapped files: one line and an exit code in place of a bare signal.

A page of a mapped file that cannot be read (the file was truncated, or its disk fails) sends SIGBUS to the thread that
touches it. Python cannot handle that: its handlers run between two instructions of Python, and the failed instruction
never ends. So the handler is machine code, made by LLVM. A library must not change how its process handles signals;
the programs that are ours call `install`.
"""

import ctypes
import signal
import sys
from functools import cache
from typing import Any

from quengine.errors import CannotRunError

MESSAGE = (
    b"engine: error: a file of the model cannot be read any more: it was truncated or overwritten while in use, or "
    b"its disk failed; start again with a whole file\n"
)
_BUS_ADRERR = 2  # si_code of a page that its file does not have, or that cannot be read
_SI_CODE_AT = 8  # bytes into siginfo_t
_SA_SIGINFO = 4


class _SigAction(ctypes.Structure):
    """struct sigaction of Linux's C libraries, for 64-bit x86 and Arm."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


@cache
def install() -> None:
    """Has such a SIGBUS print MESSAGE and end the process with exit code 2; any other goes to the former handler."""
    if sys.platform != "linux":
        return
    before = _SigAction()
    sigaction = ctypes.CDLL(None).sigaction
    if sigaction(signal.SIGBUS, None, ctypes.byref(before)):
        return
    message = ctypes.create_string_buffer(MESSAGE, len(MESSAGE))
    handler = _compiled(_handler_ir(ctypes.addressof(message), len(MESSAGE), ctypes.addressof(before)))
    _kept.extend((message, before))
    sigaction(signal.SIGBUS, ctypes.byref(_SigAction(handler, flags=_SA_SIGINFO)), None)


_kept: list[Any] = []  # what the handler's code points to


def _handler_ir(message: int, length: int, before: int) -> str:
    """LLVM IR of handler(signal, siginfo_t*, context*). message, before: addresses that must stay valid."""
    from llvmlite import ir

    i32, i64, pointer = ir.IntType(32), ir.IntType(64), ir.IntType(8).as_pointer()
    module = ir.Module("bus_error")

    def external(name: str, result: ir.Type, *parameters: ir.Type) -> ir.Function:
        return ir.Function(module, ir.FunctionType(result, parameters), name)

    write, leave = external("write", i64, i32, pointer, i64), external("_exit", ir.VoidType(), i32)
    sigaction, send = external("sigaction", i32, i32, pointer, pointer), external("raise", i32, i32)
    handler = external("handler", ir.VoidType(), i32, pointer, pointer)
    builder = ir.IRBuilder(handler.append_basic_block())
    number, info, _ = handler.args

    at = builder.gep(info, [i64(_SI_CODE_AT)])
    code = builder.load(builder.bitcast(at, i32.as_pointer()))
    with builder.if_then(builder.icmp_signed("==", code, i32(_BUS_ADRERR))):
        builder.call(write, [i32(2), i64(message).inttoptr(pointer), i64(length)])
        builder.call(leave, [i32(CannotRunError.exit_code)])
    # A signal that was sent comes again, now to the former handler; a failed instruction fails again.
    builder.call(sigaction, [number, i64(before).inttoptr(pointer), pointer(None)])
    builder.call(send, [number])
    builder.ret_void()
    return str(module)


def _compiled(code: str) -> int:
    """Compiles LLVM IR; returns the address of its `handler`, valid until the process ends."""
    from llvmlite import binding
    from llvmlite.binding.orcjit import JITLibraryBuilder, create_lljit_compiler

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    library = JITLibraryBuilder().add_ir(code).add_current_process().export_symbol("handler")
    compiler = create_lljit_compiler(suppress_errors=True)
    linked = library.link(compiler, "bus_error")
    address = int(linked["handler"])
    linked.detach()  # it is never unloaded
    _kept.append(compiler)
    return address
