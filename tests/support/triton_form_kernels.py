"""Small kernels, one for each form that some Triton compiles wrong, and some that look alike and are fine."""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
import triton
import triton.language as tl

N = tl.constexpr(128)


@triton.jit
def scaled_mn(x_ptr, y_ptr):
    at = tl.arange(0, N)
    half = tl.arange(0, N // 2)
    a = tl.load(x_ptr + half[:, None] * N + at[None, :])
    b = tl.load(x_ptr + half[:, None] * N + at[None, :])
    s = tl.full([N, N // 32], 127, tl.uint8)
    acc = tl.dot_scaled(a, s, "e2m1", b, s, "e2m1", lhs_k_pack=False)
    tl.store(y_ptr + at[:, None] * N + at[None, :], acc)


@triton.jit
def scaled_e4m3(x_ptr, y_ptr):
    at = tl.arange(0, N)
    a = tl.load(x_ptr + at[:, None] * N + at[None, :])
    s = tl.full([N, N // 32], 127, tl.uint8)
    acc = tl.dot_scaled(a, s, "e4m3", a, s, "e4m3")
    tl.store(y_ptr + at[:, None] * N + at[None, :], acc)


@triton.jit
def loop(x_ptr, y_ptr, turns, CHAINED: tl.constexpr, RECURRENT: tl.constexpr):
    at = tl.arange(0, N)
    place = at[:, None] * N + at[None, :]
    acc = tl.zeros([N, N], tl.float32)
    for turn in range(turns):
        a = tl.load(x_ptr + turn * N * N + place).to(tl.bfloat16)
        b = a
        if RECURRENT:
            b = acc.to(tl.bfloat16)
        acc = tl.dot(a, b, acc * 0.5)
        if CHAINED:
            acc = tl.dot(a + 1, a, acc)
    tl.store(y_ptr + place, acc)


@triton.jit
def attention(x_ptr, y_ptr, turns):
    """What carries on from a product to the next, row by row, is no recurrence."""
    at = tl.arange(0, N)
    place = at[:, None] * N + at[None, :]
    q = tl.load(x_ptr + place).to(tl.bfloat16)
    acc = tl.zeros([N, N], tl.float32)
    most = tl.zeros([N], tl.float32)
    for turn in range(turns):
        k = tl.load(x_ptr + turn * N * N + place).to(tl.bfloat16)
        scores = tl.dot(q, k) + tl.dot(q + 1, k)
        now = tl.maximum(most, tl.max(scores, 1))
        p = tl.exp(scores - now[:, None]).to(tl.bfloat16)
        acc = acc * tl.exp(most - now)[:, None] + tl.dot(p, k)
        most = now
    tl.store(y_ptr + place, acc)


@triton.jit
def asm(x_ptr, y_ptr, BROADCAST: tl.constexpr):
    at = tl.arange(0, N)
    place = at[:, None] * N + at[None, :]
    x = tl.load(x_ptr + place)
    if BROADCAST:
        x = tl.broadcast_to(tl.load(x_ptr + at)[:, None], [N, N])
    y = tl.inline_asm_elementwise("shl.b32 $0, $1, 1;", "=r,r", [x], dtype=tl.uint8, is_pure=True, pack=4)
    tl.store(y_ptr + place, y.to(tl.float32))
