"""Row formats as Triton device functions: quantize and dequantize a tile in registers.

For kernels of this package and of its users. docs/numerics.md ("Random numbers", "Row formats") defines every bit. All
arithmetic is on float32 tiles [ROWS, COLUMNS]. Both sizes are powers of two, the first column of a tile is a multiple
of ``block_of(FORMAT)``, and columns after the row's end are zeros. ``words`` are a tile's random words, uint32 of its
shape, or None to round to the nearest. A block with a NaN or Inf becomes NaN; so does a whole row of int8, int4 or int2
with one, or with a range that they cannot represent.

Bits are exact if the kernel is compiled with ``enable_fp_fusion=False``. In Triton's interpreter, ``tl.fma`` rounds
twice, and rows of int8, int4 and int2 can be off by that rounding.
"""

# ruff: noqa: N803, N806 (kernel constants are upper-case)
from __future__ import annotations

import triton
import triton.language as tl

_INTEGERS = ("int8", "int4", "int2")
_OCP = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1", "mxint8")

_SIGN = tl.constexpr(0x80000000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)
_TWO_TO_MINUS_24 = tl.constexpr(2.0**-24)
_SMALLEST_NORMAL = tl.constexpr(2.0**-126)
_LARGEST_HALF = tl.constexpr(65504.0)
# Adding and subtracting it drops the fraction of values up to 2^22.
_ROUNDER = tl.constexpr(1.5 * 2.0**23)


def block_of(format: str) -> int:
    """Minimum columns of a tile; its first column is a multiple of it."""
    return 32 if format in _OCP else 16


def is_integer_format(format: str) -> bool:
    """True if a row has one grid, so that a tile must hold whole rows."""
    return format in _INTEGERS


@triton.jit
def random_words(seed, step, table, row, first_column, COLUMNS: tl.constexpr):
    """Random words for stochastic rounding of columns first_column, first_column + 1, ... of rows of a table.

    Args:
        seed, step: int64 scalars.
        table: scalar in [0, 2^16).
        row: int64 [ROWS], row indices in the whole table, in [0, 2^44).
        first_column: a multiple of 4.
        COLUMNS: a power of two, at least 4.

    Returns:
        uint32 [ROWS, COLUMNS].
    """
    ROWS: tl.constexpr = row.shape[0]
    block = (first_column // 4 + tl.arange(0, COLUMNS // 4)).to(tl.uint32)
    place = (row >> 32 << 20).to(tl.uint32) | _low_word(table)
    a, b, c, d = tl.philox(seed, block[None, :], row.to(tl.uint32)[:, None], place[:, None], _low_word(step))
    # Interleave the last dimension: pairs by the higher bit of the column index, their results by the lower bit.
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [ROWS, COLUMNS])


@triton.jit
def fake_quantize_tile(x, words, inside, FORMAT: tl.constexpr, ROUND_UP: tl.constexpr):
    """Quantizes and dequantizes a tile in any row format.

    Args:
        x: float32 [ROWS, COLUMNS], COLUMNS at least ``block_of(FORMAT)``; whole rows for int8, int4 and int2.
        words: uint32 [ROWS, COLUMNS] or None.
        inside: bool [1, COLUMNS] or [ROWS, COLUMNS]: columns inside the row.
        FORMAT: one of ``rk.ROW_FORMATS``.
        ROUND_UP: scale rule "rceil" of the formats in blocks, else "floor".

    Returns:
        float32 [ROWS, COLUMNS].
    """
    if FORMAT == "fp32":
        y = x
    elif FORMAT == "fp16":
        y = half_tile(x, words)
    elif FORMAT == "bf16":
        y = bfloat16_tile(x, words)
    elif FORMAT == "int8":
        y = integer_tile(x, words, *row_ends(x, inside), 8)
    elif FORMAT == "int4":
        y = integer_tile(x, words, *row_ends(x, inside), 4)
    elif FORMAT == "int2":
        y = integer_tile(x, words, *row_ends(x, inside), 2)
    elif FORMAT == "mx9":
        y = shared_microexponent_tile(x, words, ROUND_UP, 7)
    elif FORMAT == "mx6":
        y = shared_microexponent_tile(x, words, ROUND_UP, 4)
    elif FORMAT == "mx4":
        y = shared_microexponent_tile(x, words, ROUND_UP, 2)
    elif FORMAT == "mxfp8_e4m3":
        y = microscaling_tile(x, words, ROUND_UP, 7, 3, 8, 448.0)
    elif FORMAT == "mxfp8_e5m2":
        y = microscaling_tile(x, words, ROUND_UP, 15, 2, 15, 57344.0)
    elif FORMAT == "mxfp6_e3m2":
        y = microscaling_tile(x, words, ROUND_UP, 3, 2, 4, 28.0)
    elif FORMAT == "mxfp6_e2m3":
        y = microscaling_tile(x, words, ROUND_UP, 1, 3, 2, 7.5)
    elif FORMAT == "mxfp4_e2m1":
        y = microscaling_tile(x, words, ROUND_UP, 1, 1, 2, 6.0)
    else:
        tl.static_assert(FORMAT == "mxint8", "not a row format")
        # Magnitudes k / 64 are those of a float with one exponent bit.
        y = microscaling_tile(x, words, ROUND_UP, 1, 6, 0, 127.0 / 64.0)
        y = tl.where(y == 0.0, 0.0, y)  # two's complement has no -0
    return y


@triton.jit
def half_tile(x, words):
    """fp16. x: float32, words: uint32 of its shape, or None. Returns float32 of that shape, as all of these do."""
    if words is None:
        y = x.to(tl.float16).to(tl.float32)
    else:
        field = _exponent_field(x)
        significand = (_bits(x) & 0x007FFFFF) | 0x00800000
        # Number of bits dropped; below half the smallest denormal, all of them.
        drop = tl.minimum(13 + tl.maximum(113 - field, 0), 63)
        kept = ((significand.to(tl.uint64) << 32 >> drop.to(tl.uint64)) + words.to(tl.uint64)) >> 32
        y = kept.to(tl.int32).to(tl.float32) * _power_of_two(tl.maximum(field, 113) - 10)
        y = _with_sign(tl.minimum(y, _LARGEST_HALF), x)
        y = tl.where(_is_finite(x), y, x)
    return y


@triton.jit
def bfloat16_tile(x, words):
    """bf16. As ``half_tile``."""
    bits = _bits(x)
    if words is None:
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) & 0xFFFF0000
    else:
        rounded = (bits + (words >> 16)) & 0xFFFF0000
        rounded = tl.where((rounded & _MAGNITUDE) >= _INFINITY, (bits & _SIGN) | 0x7F7F0000, rounded)
    return tl.where(_is_finite(x), _float(rounded), x)


@triton.jit
def row_ends(x, inside):
    """Minimum and maximum of each row, which may be loaded tile by tile.

    Args:
        x: float32 [ROWS, COLUMNS].
        inside: bool [1, COLUMNS] or [ROWS, COLUMNS]: columns to include.

    Returns:
        Two int32 [ROWS, 1] in the order of the values; NaN is beyond Inf of its sign, so it is not lost. Combine tiles
        by ``tl.minimum`` and ``tl.maximum``.
    """
    key = _ordered(x.to(tl.int32, bitcast=True))
    low = tl.min(tl.where(inside, key, 0x7FFFFFFF), axis=1, keep_dims=True)
    return low, tl.max(tl.where(inside, key, -0x80000000), axis=1, keep_dims=True)


@triton.jit
def integer_tile(x, words, low, high, BITS: tl.constexpr):
    """int8, int4, int2.

    Args:
        x: float32 [ROWS, COLUMNS], any columns of the rows.
        words: uint32 [ROWS, COLUMNS] or None.
        low, high: ``row_ends`` of the whole rows.
        BITS: 8, 4 or 2.
    """
    STEPS: tl.constexpr = 2.0**BITS - 1.0
    low, high = _ordered(low).to(tl.float32, bitcast=True), _ordered(high).to(tl.float32, bitcast=True)
    if BITS == 8:
        bias = low
        scale = tl.math.div_rn(high - low, STEPS)
        if words is None:
            inverse = tl.math.div_rn(STEPS, (high - low) + 1e-8)
        else:
            nothing = scale < _SMALLEST_NORMAL
            inverse = tl.where(nothing, 0.0, tl.math.div_rn(1.0, tl.where(nothing, 1.0, scale)))
    else:
        bias = _half_beside(low, words, False)
        scale = _half_beside(tl.math.div_rn(high - bias, STEPS), words, True)
        nothing = scale == 0.0
        scale = tl.where(nothing, 1.0, scale)
        inverse = tl.math.div_rn(1.0, scale)
        if words is not None:
            inverse = tl.where(nothing, 0.0, inverse)
    code = _to_grid((x - bias) * inverse, words)
    code = tl.minimum(tl.where(code > 0.0, code, 0.0), STEPS)
    # The scale is not finite if any value of the row, or its bias, is not.
    return tl.where(_is_finite(scale), tl.math.fma(code, scale, bias), float("nan"))


@triton.jit
def shared_microexponent_tile(x, words, ROUND_UP: tl.constexpr, BITS: tl.constexpr):
    """mx9, mx6, mx4: BITS is 7, 4 or 2. x: float32 [ROWS, COLUMNS], words: uint32 [ROWS, COLUMNS] or None."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    PAIRS: tl.constexpr = [ROWS, COLUMNS // 16, 8, 2]
    largest = tl.max(tl.reshape(_bits(x) & _MAGNITUDE, PAIRS), axis=3)  # of each pair
    pair = (largest >> 23).to(tl.int32)
    finite = tl.max(pair, axis=2, keep_dims=True) < 255
    if ROUND_UP:
        # Above (2^BITS - 1) * 2^(pair - 127 + 1 - BITS). Where pair is 0, its step does not change when it becomes 1.
        MANTISSA: tl.constexpr = ((1 << (BITS - 1)) - 1) << (24 - BITS)
        pair = tl.minimum(pair + ((largest & 0x007FFFFF) > MANTISSA).to(tl.int32), 254)
    shared = tl.max(pair, axis=2, keep_dims=True)
    step = tl.maximum(shared - (shared > pair).to(tl.int32) - (BITS - 1), 1)
    step, inverse = _power_of_two(step)[:, :, :, None], _power_of_two(254 - step)[:, :, :, None]
    if words is not None:
        words = tl.reshape(words, PAIRS)
    value = tl.reshape(x, PAIRS)
    code = tl.minimum(_to_grid(tl.abs(value) * inverse, words), (1 << BITS) - 1.0)
    value = tl.where(finite[:, :, :, None], _with_sign(code * step, value), float("nan"))
    return tl.reshape(value, [ROWS, COLUMNS])


@triton.jit
def microscaling_tile(
    x,
    words,
    ROUND_UP: tl.constexpr,
    BIAS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    LARGEST_EXPONENT: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """OCP formats with float elements. x: float32 [ROWS, COLUMNS], words: uint32 [ROWS, COLUMNS] or None."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    BLOCKS: tl.constexpr = [ROWS, COLUMNS // 32, 32]
    largest = tl.max(tl.reshape(_bits(x) & _MAGNITUDE, BLOCKS), axis=2, keep_dims=True)
    finite = largest < _INFINITY
    if ROUND_UP:
        ratio = _bits(_float(largest) * (1.0 / LARGEST))
        # The smallest scale, 2^-127, is itself a denormal.
        exact = tl.where(ratio < 0x00800000, 0x00400000, 0).to(tl.uint32)
        scale = (ratio >> 23).to(tl.int32) + ((ratio & 0x007FFFFF) > exact).to(tl.int32)
    else:
        scale = tl.maximum((largest >> 23).to(tl.int32) - LARGEST_EXPONENT, 0)
    scale = tl.minimum(scale, 254 - LARGEST_EXPONENT)  # no element may decode to Inf
    if words is not None:
        words = tl.reshape(words, BLOCKS)
    value = tl.reshape(x, BLOCKS)
    v = tl.abs(value) * _power_of_two(254 - scale)
    step = tl.maximum(_exponent_field(v), 128 - BIAS) - MANTISSA_BITS
    element = _to_grid(v * _power_of_two(254 - step), words) * _power_of_two(step)
    element = tl.minimum(element, LARGEST)
    value = tl.where(finite, _with_sign(element * _power_of_two(scale), value), float("nan"))
    return tl.reshape(value, [ROWS, COLUMNS])


@triton.jit
def widen(x):
    """Converts a float16, bfloat16 or float32 tile to float32, exactly."""
    # Bit operations: the interpreter converts bfloat16 denormals wrongly.
    return _float(x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16) if x.dtype == tl.bfloat16 else x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Converts a float32 tile to float16, bfloat16 or float32, rounding to nearest, ties to even."""
    # Bit operations: the interpreter truncates to bfloat16.
    if dtype == tl.bfloat16:
        bits = tl.where(x == x, _bits(bfloat16_tile(x, None)), 0x7FC00000)
        y = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(dtype)
    return y


@triton.jit
def _low_word(x):
    """uint32 of an integer: a scalar tensor, a constexpr or Python's. Triton 3.6 has no ``tl.to_tensor``."""
    return (tl.zeros([], tl.int64) + x).to(tl.uint32)


@triton.jit
def _bits(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _exponent_field(x):
    """int32: 0 for zeros and denormals, 255 for NaN and Inf."""
    return ((_bits(x) & _MAGNITUDE) >> 23).to(tl.int32)


@triton.jit
def _is_finite(x):
    return (_bits(x) & _MAGNITUDE) < _INFINITY


@triton.jit
def _power_of_two(field):
    """float32 2^(field - 127), int32 fields from 0 to 254: of 0 it is a denormal."""
    return tl.where(field == 0, 0x00400000, field << 23).to(tl.float32, bitcast=True)


@triton.jit
def _with_sign(magnitude, x):
    return _float(_bits(magnitude) | (_bits(x) & _SIGN))


@triton.jit
def _ordered(bits):
    """Maps int32 bits of floats to integers of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _to_grid(t, words):
    """Rounds to integers: to nearest, ties to even, or by words (t >= 0) down or up; |t| <= 2^22."""
    y = (t + _ROUNDER) - _ROUNDER
    if words is not None:
        floor = tl.where(y > t, y - 1.0, y)  # tl.floor flushes denormals, and is slower
        up = (words >> 8).to(tl.int32).to(tl.float32) * _TWO_TO_MINUS_24 < t - floor
        y = tl.where(up, floor + 1.0, floor)
    return y


@triton.jit
def _half_beside(x, words, UP: tl.constexpr):
    """A neighbouring half as float32: the nearest, or, with words, the one at or above x, else at or below."""
    half = x.to(tl.float16)
    if words is not None:
        bits = half.to(tl.int16, bitcast=True)
        if UP:
            passed, away = half.to(tl.float32) < x, 1
        else:
            passed, away = half.to(tl.float32) > x, -1
        # Sign and magnitude: among negative halves, the larger value has the smaller magnitude.
        bits = tl.where(passed, tl.where(bits < 0, bits - away, bits + away), bits)
        half = bits.to(tl.int16).to(tl.float16, bitcast=True)
    return half.to(tl.float32)
