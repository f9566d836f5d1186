"""Sixteen float32 lanes as a value that compiled kernels can hold in a register.

Owns: the vector type and its operations. Does not know: what is computed with it.

Array operands are C-contiguous and addressed by ONE flat element index: no bounds check, no view
objects, no reference counts. LLVM splits the sixteen lanes on machines with narrower registers.
Read next: ``gated_delta_net/compiled.py``.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic, models, register_model

LANES = 16
_FLOAT = ir.FloatType()
_INT32 = ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_MASK = ir.VectorType(ir.IntType(1), LANES)


class Float32x16(types.Type):
    """Numba type of a vector of sixteen float32."""

    def __init__(self) -> None:
        super().__init__(name="Float32x16")


vector: Any = Float32x16()


@register_model(Float32x16)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _VECTOR)  # type: ignore[no-untyped-call]


def splat(builder: Any, scalar: Any, *, lanes: int = LANES) -> Any:
    """IR: the same scalar in every lane."""
    one = builder.insert_element(
        ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined), scalar, _INT32(0)
    )
    order = ir.Constant(ir.VectorType(_INT32, lanes), [0] * lanes)
    return builder.shuffle_vector(one, one, order)


def call(
    builder: Any, name: str, result: Any, arguments: list[Any], fastmath: tuple[str, ...] = ()
) -> Any:
    """IR: call an LLVM intrinsic by its mangled name."""
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(result, [a.type for a in arguments]), name
    )
    return builder.call(function, arguments, fastmath=fastmath)


def flat_pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """IR: the address of flat element ``index``."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


def lane_mask(builder: Any, count: Any) -> Any:
    """IR: lanes below ``count`` (intp) are on."""
    wide = splat(builder, builder.trunc(count, _INT32))
    lanes = ir.Constant(ir.VectorType(_INT32, LANES), list(range(LANES)))
    return builder.icmp_signed("<", lanes, wide)


def _require_mutable(array: Any) -> None:
    """Read-only arrays are another type: a kernel that would write to one does not compile."""
    if not array.mutable:
        raise TypingError("this memory is read-only: a kernel may not write to it")


def _vector_at(builder: Any, pointer: Any) -> Any:
    return builder.bitcast(pointer, _VECTOR.as_pointer())


@intrinsic
def vload(typingctx: Any, array: Any, index: Any) -> Any:
    """Lanes array.flat[index : index + 16]."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = flat_pointer(context, builder, signature.args[0], args[0], args[1])
        return builder.load(_vector_at(builder, pointer), align=4)

    return vector(array, types.intp), codegen


@intrinsic
def vload_first(typingctx: Any, array: Any, index: Any, count: Any) -> Any:
    """The first ``count`` lanes from array.flat[index:], the others zero."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = flat_pointer(context, builder, signature.args[0], args[0], args[1])
        pointer = _vector_at(builder, pointer)
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        arguments = [pointer, _INT32(4), lane_mask(builder, args[2]), zero]
        return call(builder, "llvm.masked.load.v16f32.p0", _VECTOR, arguments)

    return vector(array, types.intp, types.intp), codegen


@intrinsic
def vstore(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """array.flat[index : index + 16] = value."""

    _require_mutable(array)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = flat_pointer(context, builder, signature.args[0], args[0], args[1])
        builder.store(args[2], _vector_at(builder, pointer), align=4)
        return context.get_dummy_value()

    return types.none(array, types.intp, vector), codegen


@intrinsic
def vstore_first(typingctx: Any, array: Any, index: Any, value: Any, count: Any) -> Any:
    """Write the first ``count`` lanes."""

    _require_mutable(array)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = flat_pointer(context, builder, signature.args[0], args[0], args[1])
        pointer = _vector_at(builder, pointer)
        arguments = [args[2], pointer, _INT32(4), lane_mask(builder, args[3])]
        call(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), arguments)
        return context.get_dummy_value()

    return types.none(array, types.intp, vector, types.intp), codegen


@intrinsic
def at(typingctx: Any, array: Any, index: Any) -> Any:
    """The scalar array.flat[index]."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(flat_pointer(context, builder, signature.args[0], args[0], args[1]))

    return array.dtype(array, types.intp), codegen


@intrinsic
def put(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """array.flat[index] = value."""
    _require_mutable(array)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = flat_pointer(context, builder, signature.args[0], args[0], args[1])
        builder.store(args[2], pointer)
        return context.get_dummy_value()

    return types.none(array, types.intp, array.dtype), codegen


@intrinsic
def vset(typingctx: Any, scalar: Any) -> Any:
    """The scalar in every lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return splat(builder, args[0])

    return vector(types.float32), codegen


@intrinsic
def vfma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return call(builder, "llvm.fma.v16f32", _VECTOR, list(args))

    return vector(vector, vector, vector), codegen


@intrinsic
def vadd(typingctx: Any, a: Any, b: Any) -> Any:
    """a + b."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(args[0], args[1])

    return vector(vector, vector), codegen


@intrinsic
def vmul(typingctx: Any, a: Any, b: Any) -> Any:
    """a * b."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fmul(args[0], args[1])

    return vector(vector, vector), codegen


@intrinsic
def vsum(typingctx: Any, a: Any) -> Any:
    """The sum of the lanes, as a tree."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        arguments = [_FLOAT(0.0), args[0]]
        return call(
            builder, "llvm.vector.reduce.fadd.v16f32", _FLOAT, arguments, fastmath=("reassoc",)
        )

    return types.float32(vector), codegen
