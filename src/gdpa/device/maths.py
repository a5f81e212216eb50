"""Element-wise functions for device code that ``tl`` lacks, or has only in one precision.

Plain names are accurate to a few float32 ulps and use nothing but ``tl``, so they also run on AMD and under the
interpreter. Names ending in ``_close`` and ``_approx`` are for 16-bit data and use PTX.
functions/accuracy/precision.py has a bound on the error of each, and decides which of the three a function may use.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2_HI = tl.constexpr(0.693145751953125)  # 17 bits: n * LN2_HI is exact for the n that occur
LN2_LO = tl.constexpr(1.428606765330187e-06)
PI = tl.constexpr(3.141592653589793)
INF = tl.constexpr(float("inf"))


# ---- accurate, portable ----------------------------------------------------------------------------------------------
@triton.jit
def exp(x):
    """e^x = 2^n e^r, |r| < ln2/2. tl.exp multiplies by log2(e) in one rounding and loses |x| ulps."""
    n = tl.floor(x * LOG2E + 0.5)
    r = (x - n * LN2_HI) - n * LN2_LO
    half = tl.floor(n * 0.5)  # in two steps, since 2^128 overflows where e^88.7 does not
    y = tl.exp2(r * LOG2E) * tl.exp2(half) * tl.exp2(n - half)
    return tl.where(tl.abs(x) < 200.0, y, tl.exp(x))  # inf, NaN and certain over- or underflow


@triton.jit
def expm1(x):
    """Kahan: (u - 1) x / log(u) with u = e^x cancels the rounding of u."""
    u = exp(x)
    y = (u - 1.0) * (x / tl.log(u))
    y = tl.where(u == 1.0, x, y)
    y = tl.where(u < 2.0**-25, -1.0, y)  # also where u is denormal, and its logarithm poor
    return tl.where(u == INF, u, y)


@triton.jit
def log1p(x):
    """Kahan: log(u) x / (u - 1) with u = 1 + x."""
    u = 1.0 + x
    y = tl.log(u) * (x / (u - 1.0))
    y = tl.where(u == 1.0, x, y)
    return tl.where(u == INF, u, y)


@triton.jit
def odd(a, x):
    """``a`` = f(|x|) with the sign of x; x itself at 0, so that -0 stays."""
    return tl.where(x == 0.0, x, tl.where(x < 0.0, -a, a))


@triton.jit
def tanh(x):
    a = tl.abs(x)
    t = expm1(2.0 * tl.minimum(a, 15.0))  # tanh is 1 to float32 from 9.1 on
    # 1 - 2 / (t + 2) becomes exactly 1, which derivatives of the form 1 - tanh^2 rely on; near 0 it would cancel.
    y = odd(tl.where(a < 1.0, t / (t + 2.0), 1.0 - 2.0 / (t + 2.0)), x)
    return tl.where(x == x, y, x)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + exp(-x))


@triton.jit
def sinh(x):
    a = tl.abs(x)
    t = expm1(tl.minimum(a, 20.0))
    small = 0.5 * (t + t / (t + 1.0))
    return odd(tl.where(a < 20.0, small, half_exp(a)), x)


@triton.jit
def half_exp(x):
    """e^x / 2, finite wherever it fits: e^(x - ln 2) would lose |x| ulps in the subtraction."""
    root = exp(0.5 * x)
    return (0.5 * root) * root


@triton.jit
def cosh(x):
    h = half_exp(tl.abs(x))
    return h + 0.25 / h


@triton.jit
def tan(x):
    return tl.sin(x) / tl.cos(x)


@triton.jit
def atan(x):
    """Reduced to [0, 1] by 1/x, then to [0, 0.4142] by halving the angle; odd polynomial, 6e-10 relative."""
    a = tl.abs(x)
    z = tl.where(a > 1.0, 1.0 / a, a)
    y = z / (1.0 + tl.sqrt(1.0 + z * z))
    w = y * y
    p = -0.060338083654642105 * w + 0.10573100298643112
    p = p * w - 0.142400324344635
    p = p * w + 0.19998213648796082
    p = p * w - 0.3333330750465393
    angle = 2.0 * (y + y * w * p)
    return odd(tl.where(a > 1.0, 0.5 * PI - angle, angle), x)


@triton.jit
def asin(x):
    return atan(x / tl.sqrt((1.0 - x) * (1.0 + x)))


@triton.jit
def acos(x):
    return 2.0 * atan(tl.sqrt((1.0 - x) / (1.0 + x)))


@triton.jit
def atan2(y, x):
    a = tl.abs(x)
    b = tl.abs(y)
    ratio = tl.where(a == b, tl.where(a == 0.0, 0.0, 1.0), tl.minimum(a, b) / tl.maximum(a, b))  # inf / inf is 1
    angle = atan(ratio)
    angle = tl.where(b > a, 0.5 * PI - angle, angle)
    angle = tl.where(x < 0.0, PI - angle, angle)
    angle = tl.where(y < 0.0, -angle, angle)
    return tl.where((x == x) & (y == y), angle, x + y)


@triton.jit
def erfc(x):
    """1 - erf(x) near 0; e^(-x^2) t Q(t) with t = 1 / (1 + |x|/2) beyond 0.5, 1e-8 relative."""
    a = tl.abs(x)
    t = 1.0 / (1.0 + 0.5 * a)
    q = -0.05971340462565422 * t + 0.28936225175857544
    q = q * t - 0.49905920028686523
    q = q * t + 0.29260697960853577
    q = q * t - 0.03667990863323212
    q = q * t + 0.2067708820104599
    q = q * t + 0.24214467406272888
    q = q * t + 0.2824948728084564
    q = q * t + 0.28208035230636597
    # a = h + l with h of 8 bits: h * h is exact, where the rounding of a * a would cost a^2 ulps.
    h = tl.floor(16.0 * tl.minimum(a, 11.0)) * 0.0625
    tail = exp(-h * h) * exp((h - a) * (h + a)) * t * q
    return tl.where(a < 0.5, 1.0 - tl.erf(x), tl.where(x < 0.0, 2.0 - tail, tail))


@triton.jit
def trunc(x):
    return tl.where(x < 0.0, tl.ceil(x), tl.floor(x))


@triton.jit
def spread(x, s):
    """x in the shape of s. In Gluon a shape alone has no layout, and `x + s * 0` would turn inf into NaN."""
    return tl.where(s == s, x, x).to(tl.float32)


@triton.jit
def round(x):
    """Half to even: adding 1.5 * 2^23 leaves no bit below 1 (larger numbers have none)."""
    r = (x + 12582912.0) - 12582912.0
    return tl.where(tl.abs(x) < 4194304.0, tl.where(r == 0.0, 0.0 * x, r), x)


@triton.jit
def sign(x):
    """0 for NaN, as torch.sign."""
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))


@triton.jit
def fmod(x, y):
    """In float64, where the product is exact for quotients up to 2^29."""
    a = tl.cast(x, tl.float64)
    b = tl.cast(y, tl.float64)
    r = a - trunc(a / b) * b
    both = x * y  # for its dtype
    return tl.where(tl.abs(b) == INF, x, r.to(both.dtype))


@triton.jit
def remainder(x, y):
    """fmod with the sign of y."""
    r = fmod(x, y)
    return tl.where((r != 0.0) & ((r < 0.0) != (y < 0.0)), r + y, r)


@triton.jit
def pow_with_sign(magnitude, x, y):
    """|x|^y turned into x^y, with the special cases of C's pow."""
    is_odd = y - 2.0 * tl.floor(0.5 * y) == 1.0
    is_whole = tl.floor(y) == y
    r = tl.where(x < 0.0, tl.where(is_odd, -magnitude, magnitude), magnitude)
    r = tl.where((x < 0.0) & (x > -INF) & (is_whole == 0), float("nan"), r)
    r = tl.where((tl.abs(x) == 1.0) & (tl.abs(y) == INF), 1.0, r)
    return tl.where((y == 0.0) | (x == 1.0), 1.0, r)


@triton.jit
def high_bits(x):
    """x cut to 12 bits: products of two such numbers are exact."""
    return (x.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)


@triton.jit
def split_log2(x):
    """log2(x) of a positive, normal float32 as a sum (h, l), to about 2^-32 relative; h has 12 bits.

    x = 2^e m with m in [0.7, 1.4]; log2(m) = 2/ln2 atanh(t), t = (m - 1) / (m + 1).
    """
    bits = x.to(tl.int32, bitcast=True)
    e = (bits - 0x3F3504F3) >> 23
    m = (bits - (e << 23)).to(tl.float32, bitcast=True)
    num = m - 1.0
    den = m + 1.0
    den_h = high_bits(den)
    den_l = m - (den_h - 1.0)
    t_h = high_bits(num / den)
    t_l = ((num - t_h * den_h) - t_h * den_l) / den
    t = t_h + t_l
    w = t * t
    p = 0.33661705255508423 * w + 0.4119001030921936  # 2/ln2 (1/3 + t^2/5 + t^4/7 + ...)
    p = p * w + 0.5770797729492188
    p = p * w + 0.9617967009544373
    C_H: tl.constexpr = 2.884765625
    C_L: tl.constexpr = 0.0006244567779269
    large = C_H * t_h
    small = (C_L * t_h + 2.8853900817779268 * t_l) + t * w * p
    n = e.to(tl.float32)
    total = n + large
    rest = ((n - total) + large) + small
    h = high_bits(total)
    return h, (total - h) + rest


@triton.jit
def pow_positive(x, y):
    """x^y for x >= 0: 2^(y log2 x), the product carried in two parts, since its rounding costs |y log2 x| ulps."""
    log_h, log_l = split_log2(tl.maximum(x, 1.2e-38))
    y_h = high_bits(y)
    y_l = y - y_h
    high = y_h * log_h
    low = y_h * log_l + y_l * (log_h + log_l)
    n = tl.floor(high + low + 0.5)
    half = tl.floor(n * 0.5)
    z = tl.exp2((high - n) + low) * tl.exp2(half) * tl.exp2(n - half)
    rough = y * tl.log2(x)
    plain = (tl.abs(rough) < 200.0) & (x >= 1.2e-38) & (x < INF)
    return tl.where(plain, z, tl.exp2(rough))


@triton.jit
def pow(x, y):
    both = x * y  # either may be a constant, which has no dtype
    if both.dtype == tl.float64:
        x, y = tl.broadcast(tl.cast(x, tl.float64), tl.cast(y, tl.float64))
        return pow_with_sign(tl.exp2(y * tl.log2(tl.abs(x))), x, y)
    else:
        x, y = tl.broadcast(tl.cast(x, tl.float32), tl.cast(y, tl.float32))
        return pow_with_sign(pow_positive(tl.abs(x), y), x, y)


# ---- for 16-bit data: PTX, fewer instructions ------------------------------------------------------------------------
@triton.jit
def tanh_approx(x):
    """One MUFU instruction; error below 2^-11."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def rcp_close(x):
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def log2_close(x):
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def pow_close(x, y):
    return pow_with_sign(tl.exp2(y * log2_close(tl.abs(x))), x, y)
