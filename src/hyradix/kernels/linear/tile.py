"""One register tile of a matrix product, as LLVM IR: R rows of a weight times M rows of x.

Owns: the IR. Does not know: how tiles cover a matrix.
Invariant: each sum runs over k in the same order whatever R and M are.
Read next: ``compiled.py`` (who calls it).
"""

from __future__ import annotations

from itertools import product
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hyradix.kernels.simd import LANES, call, flat_pointer, lane_mask

_FLOAT = ir.FloatType()
_INT32 = ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_ZERO = ir.Constant(_VECTOR, [0.0] * LANES)
_SHIFT = ir.Constant(ir.VectorType(_INT32, LANES), [16] * LANES)


def _load(builder: Any, pointer: Any, mask: Any, *, is_bf16: bool) -> Any:
    """IR: sixteen lanes (those of ``mask``, if there is one) as float32."""
    element = ir.IntType(16) if is_bf16 else _FLOAT
    kind = ir.VectorType(element, LANES)
    pointer = builder.bitcast(pointer, kind.as_pointer())
    if mask is None:
        value = builder.load(pointer, align=element.width // 8 if is_bf16 else 4)
    else:
        name = f"llvm.masked.load.v16{'i16' if is_bf16 else 'f32'}.p0"
        zero = ir.Constant(kind, [0] * LANES if is_bf16 else [0.0] * LANES)
        value = call(builder, name, kind, [pointer, _INT32(2 if is_bf16 else 4), mask, zero])
    if not is_bf16:
        return value
    wide = builder.zext(value, ir.VectorType(_INT32, LANES))
    return builder.bitcast(builder.shl(wide, _SHIFT), _VECTOR)


def _prefetch(builder: Any, pointer: Any) -> None:
    """IR: ask for the cache line; an address past the end does no harm."""
    pointer = builder.bitcast(pointer, ir.IntType(8).as_pointer())
    hints = [_INT32(0), _INT32(3), _INT32(1)]  # to read, keep in all levels, data
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, *hints])


def _accumulate(
    builder: Any, w: list[Any], x: list[Any], sums: list[Any], k: Any, mask: Any, is_bf16: bool,
    ahead: Any = None,
) -> list[Any]:  # fmt: skip
    """IR: sums[r][m] += w[r][k:k+16] * x[m][k:k+16], flattened."""
    rows = []
    for p in w:
        rows.append(_load(builder, builder.gep(p, [k]), mask, is_bf16=is_bf16))
        if ahead is not None:
            _prefetch(builder, builder.gep(p, [builder.add(k, ahead)]))
    out = list(sums)
    for m, p in enumerate(x):  # one column in a register at a time: all rows and sums fit
        column = _load(builder, builder.gep(p, [k]), mask, is_bf16=False)
        for r, row in enumerate(rows):
            place = r * len(x) + m
            out[place] = call(builder, "llvm.fma.v16f32", _VECTOR, [row, column, sums[place]])
    return out


@intrinsic(prefer_literal=True)
def dot_tile(
    typingctx: Any, rows: Any, columns: Any, weight: Any, w: Any, x: Any, x_index: Any,
    size: Any, out: Any, out_index: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """out[o + m * out_stride + r] = sum_k weight[w + r * size + k] * x[x0 + m * size + k].

    ``rows`` R and ``columns`` M are literals; the weight is float32, or bfloat16 seen as uint16.
    All places are flat.
    """
    num_rows, num_columns = rows.literal_value, columns.literal_value
    is_bf16 = weight.dtype == types.uint16

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        stride = args[6]
        intp = stride.type
        w_base = flat_pointer(context, builder, kinds[2], args[2], args[3])
        x_base = flat_pointer(context, builder, kinds[4], args[4], args[5])
        w_rows = [builder.gep(w_base, [builder.mul(stride, intp(r))]) for r in range(num_rows)]
        x_rows = [builder.gep(x_base, [builder.mul(stride, intp(m))]) for m in range(num_columns)]
        ahead = builder.mul(stride, intp(num_rows))  # the same place of the next tile
        sums = _loop(builder, w_rows, x_rows, stride, is_bf16, ahead)
        for r, m in product(range(num_rows), range(num_columns)):
            arguments = [_FLOAT(0.0), sums[r * num_columns + m]]
            reduce = "llvm.vector.reduce.fadd.v16f32"
            total = call(builder, reduce, _FLOAT, arguments, fastmath=("reassoc",))
            place = builder.add(args[8], builder.mul(args[9], intp(m)))
            place = builder.add(place, intp(r))
            builder.store(total, flat_pointer(context, builder, kinds[7], args[7], place))
        return context.get_dummy_value()

    intp = types.intp
    return types.none(rows, columns, weight, intp, x, intp, intp, out, intp, intp), codegen


def _loop(
    builder: Any, w: list[Any], x: list[Any], size: Any, is_bf16: bool, ahead: Any
) -> list[Any]:
    """IR: the loop over k by sixteens, and a masked last step where sixteen does not divide."""
    intp = size.type
    count = len(w) * len(x)
    entry = builder.block
    body = builder.append_basic_block("tile.body")
    check = builder.append_basic_block("tile.check")
    tail = builder.append_basic_block("tile.tail")
    done = builder.append_basic_block("tile.done")
    whole = builder.sub(size, builder.srem(size, intp(LANES)))
    builder.cbranch(builder.icmp_signed(">", whole, intp(0)), body, check)

    builder.position_at_end(body)
    k = builder.phi(intp)
    phis = [builder.phi(_VECTOR) for _ in range(count)]
    sums = _accumulate(builder, w, x, phis, k, None, is_bf16, ahead)
    following = builder.add(k, intp(LANES))
    k.add_incoming(intp(0), entry)
    k.add_incoming(following, body)
    for phi, value in zip(phis, sums, strict=True):
        phi.add_incoming(_ZERO, entry)
        phi.add_incoming(value, body)
    builder.cbranch(builder.icmp_signed("<", following, whole), body, check)

    builder.position_at_end(check)
    merged = [builder.phi(_VECTOR) for _ in range(count)]
    for phi, value in zip(merged, sums, strict=True):
        phi.add_incoming(_ZERO, entry)
        phi.add_incoming(value, body)
    builder.cbranch(builder.icmp_signed("<", whole, size), tail, done)

    builder.position_at_end(tail)
    mask = lane_mask(builder, builder.sub(size, whole))
    ends = _accumulate(builder, w, x, merged, whole, mask, is_bf16)
    builder.branch(done)

    builder.position_at_end(done)
    final = [builder.phi(_VECTOR) for _ in range(count)]
    for phi, early, late in zip(final, merged, ends, strict=True):
        phi.add_incoming(early, check)
        phi.add_incoming(late, tail)
    return final
