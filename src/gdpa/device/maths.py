"""Element-wise functions for device code that ``tl`` lacks, or has only in one precision.

Plain names are accurate to a few float32 ulps and use nothing but ``tl``, so they also run on AMD and under the
interpreter. Names ending in ``_close`` are good to about 1e-6 absolute, those in ``_approx`` to about 5e-4, for 16-bit
data; both use PTX. functions/precision.py decides which of the three a function may use.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
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
    y = tl.where(u == 0.0, -1.0, y)
    return tl.where(u == INF, u, y)


@triton.jit
def log1p(x):
    """Kahan: log(u) x / (u - 1) with u = 1 + x."""
    u = 1.0 + x
    y = tl.log(u) * (x / (u - 1.0))
    y = tl.where(u == 1.0, x, y)
    return tl.where(u == INF, u, y)


@triton.jit
def copysign(a, x):
    return tl.where(x < 0.0, -a, a)


@triton.jit
def tanh(x):
    a = tl.abs(x)
    t = expm1(2.0 * tl.minimum(a, 15.0))  # tanh is 1 to float32 from 9.1 on
    y = copysign(t / (t + 2.0), x)
    return tl.where(x == x, y, x)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + exp(-x))


@triton.jit
def sinh(x):
    a = tl.abs(x)
    t = expm1(tl.minimum(a, 20.0))
    small = 0.5 * (t + t / (t + 1.0))
    return copysign(tl.where(a < 20.0, small, exp(a - LN2)), x)


@triton.jit
def cosh(x):
    h = exp(tl.abs(x) - LN2)  # e^|x| / 2: finite wherever cosh is
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
    return copysign(tl.where(a > 1.0, 0.5 * PI - angle, angle), x)


@triton.jit
def asin(x):
    return atan(x / tl.sqrt((1.0 - x) * (1.0 + x)))


@triton.jit
def acos(x):
    return 2.0 * atan(tl.sqrt((1.0 - x) / (1.0 + x)))


@triton.jit
def atan2(y, x):
    angle = atan(y / x)
    angle = tl.where(x < 0.0, tl.where(y < 0.0, angle - PI, angle + PI), angle)
    return tl.where((x == 0.0) & (y == 0.0), 0.0, angle)


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
    tail = exp(-a * a) * t * q
    return tl.where(a < 0.5, 1.0 - tl.erf(x), tl.where(x < 0.0, 2.0 - tail, tail))


@triton.jit
def trunc(x):
    return tl.where(x < 0.0, tl.ceil(x), tl.floor(x))


@triton.jit
def round(x):
    """Half to even: adding 1.5 * 2^23 leaves no bit below 1 (larger numbers have none)."""
    return tl.where(tl.abs(x) < 4194304.0, (x + 12582912.0) - 12582912.0, x)


@triton.jit
def sign(x):
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0 * x))


@triton.jit
def fmod(x, y):
    return x - trunc(x / y) * y


@triton.jit
def remainder(x, y):
    return x - tl.floor(x / y) * y


@triton.jit
def pow_with_sign(magnitude, x, y):
    """|x|^y turned into x^y, with the special cases of C's pow."""
    odd = tl.abs(remainder(y, 2.0)) == 1.0
    whole = tl.floor(y) == y
    r = tl.where(x < 0.0, tl.where(whole, tl.where(odd, -magnitude, magnitude), float("nan")), magnitude)
    return tl.where(y == 0.0, 1.0, r)


@triton.jit
def pow(x, y):
    return pow_with_sign(tl.exp2(y * tl.log2(tl.abs(x))), x, y)


# ---- for 16-bit data: PTX, fewer instructions ------------------------------------------------------------------------
@triton.jit
def tanh_approx(x):
    """One MUFU instruction; error below 2^-11."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def sigmoid_approx(x):
    return 0.5 * tanh_approx(0.5 * x) + 0.5


@triton.jit
def erf_approx(x):
    """tanh(x (1.1297 + 0.0998 x^2)), 2.8e-4 apart from tanh's own error."""
    return tanh_approx(x * (0.09979271 * (x * x) + 1.12967582))


@triton.jit
def rcp_close(x):
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def log2_close(x):
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def log_close(x):
    return log2_close(x) * LN2


@triton.jit
def log1p_close(x):
    return log2_close(x + 1.0) * LN2


@triton.jit
def exp_close(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def tanh_close(x):
    """1 - 2 / (1 + e^2x): e^2x = inf gives 1."""
    return 1.0 - 2.0 * rcp_close(1.0 + tl.exp2(x * (2.0 * LOG2E)))


@triton.jit
def sigmoid_close(x):
    return rcp_close(1.0 + tl.exp2(x * (-LOG2E)))


@triton.jit
def erf_close(x):
    """Odd polynomial on [-3, 3], constant beyond: 2.2e-5."""
    z = tl.minimum(tl.maximum(x, -3.0), 3.0)
    w = z * z
    p = 4.074208703741533e-08 * w - 1.9448218608886236e-06
    p = p * w + 4.106050982954912e-05
    p = p * w - 0.0005110367783345282
    p = p * w + 0.0042354268953204155
    p = p * w - 0.025102859362959862
    p = p * w + 0.11107933521270752
    p = p * w - 0.375314861536026
    p = p * w + 1.1282684803009033
    return p * z


@triton.jit
def pow_close(x, y):
    return pow_with_sign(tl.exp2(y * log2_close(tl.abs(x))), x, y)
