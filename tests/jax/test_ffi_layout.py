"""What csrc/xla_ffi.h says of XLA's C interface, compared with the header of the JAX that is installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

jax = pytest.importorskip("jax")

_TYPES = pytest.importorskip("attnspan.interop._convert").TYPES


def _xla_name(name: str) -> str:
    """As XLA abbreviates "bfloat16", "float8_e5m2", "uint8"."""
    if name == "bool":
        return "PRED"
    name = name.replace("float8_", "f8").replace("bfloat", "bf").replace("float", "f").replace("complex", "c")
    return name.replace("uint", "u").replace("int", "s").upper()


CSRC = Path(__file__).parents[2] / "csrc"
#: Ours, theirs, and the fields of both in the order of ours; "ours=theirs" where names differ.
STRUCTS = """
Extension XLA_FFI_Extension_Base type next
Version XLA_FFI_Api_Version major=major_version minor=minor_version
Metadata XLA_FFI_Metadata version=api_version traits
MetadataExtension XLA_FFI_Metadata_Extension metadata
Buffer XLA_FFI_Buffer dtype data rank dims
Scalar XLA_FFI_Scalar dtype value
Text XLA_FFI_ByteSpan data=ptr size=len
Buffers XLA_FFI_Args size types values=args
Buffers XLA_FFI_Rets size types values=rets
Attributes XLA_FFI_Attrs size names values=attrs
ErrorCreate XLA_FFI_Error_Create_Args message code=errc
ErrorDestroy XLA_FFI_Error_Destroy_Args error
Schedule XLA_FFI_ThreadPool_Schedule_Args task data
NumThreads XLA_FFI_ThreadPool_NumThreads_Args threads=num_threads
Api XLA_FFI_Api version=api_version error_create=XLA_FFI_Error_Create error_destroy=XLA_FFI_Error_Destroy
Api XLA_FFI_Api thread_pool_schedule=XLA_FFI_ThreadPool_Schedule
Api XLA_FFI_Api thread_pool_num_threads=XLA_FFI_ThreadPool_NumThreads
CallFrame XLA_FFI_CallFrame api context=ctx stage arguments=args results=rets attributes=attrs
"""
CONSTANTS = [
    ("(int)attnspan::ffi::Stage::execute", "XLA_FFI_ExecutionStage_EXECUTE"),
    ("attnspan::ffi::invalid_argument", "XLA_FFI_Error_Code_INVALID_ARGUMENT"),
    ("attnspan::ffi::resource_exhausted", "XLA_FFI_Error_Code_RESOURCE_EXHAUSTED"),
    ("attnspan::ffi::internal", "XLA_FFI_Error_Code_INTERNAL"),
    ("attnspan::ffi::scalar", "XLA_FFI_AttrType_SCALAR"),
    ("1", "XLA_FFI_Extension_Metadata"),
    *(
        (f"attnspan::ffi::{name}", f"XLA_FFI_DataType_{name.upper()}")
        for name in ("s32", "s64", "u32", "f16", "f32", "f64", "bf16")
    ),
    *((str(number), f"XLA_FFI_DataType_{_xla_name(name)}") for number, name in _TYPES.items()),
]


def _program() -> str:
    lines = ['#include "xla/ffi/api/c_api.h"', '#include "xla_ffi.h"', "using namespace attnspan;"]
    for row in STRUCTS.strip().splitlines():
        ours, theirs, *fields = row.split()
        for a, _, b in (field.partition("=") for field in fields):
            b = b or a
            same = f"offsetof(ffi::{ours}, {a}) == offsetof({theirs}, {b}) && "
            same += f"sizeof(ffi::{ours}::{a}) == sizeof({theirs}::{b})"
            lines.append(f'static_assert({same}, "{theirs}.{b}");')
        # A struct's size is part of the protocol only where we make one.
        if ours in ("ErrorCreate", "ErrorDestroy", "Schedule", "NumThreads"):
            lines.append(f'static_assert(sizeof(ffi::{ours}) == sizeof({theirs}), "{theirs}");')
    lines += [f'static_assert({a} == (int){b}, "{b}");' for a, b in CONSTANTS]
    return "\n".join(lines) + "\n"


def test_our_declarations_are_those_of_xla(tmp_path):
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = tmp_path / "layout.cc"
    source.write_text(_program())
    command = [compiler, "-std=c++20", "-fsyntax-only", f"-I{jax.ffi.include_dir()}", f"-I{CSRC}", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
