"""The GPU kernels in Triton: attention over a paged cache, what writes to it, norms, block copies.

Device code alone; `triton_backend` chooses grids and tiles. Everything is summed in float32, and a
row's result depends on that row alone as long as its keys are not split.
"""
# A kernel's arguments are pointers, and its language is not quite Python.
# pyright: basic, reportMissingImports=false, reportOperatorIssue=false

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend(
    q,  # [T, num_heads, head_dim], strided
    kv,  # [num_blocks, 2, block_size, num_kv_heads, head_dim], strided
    out,  # [T, num_heads, head_dim], contiguous; written where there is one split
    partial,  # float32 [T, num_heads, num_splits, head_dim]; written where there are several
    stats,  # float32 [T, num_heads, num_splits, 2]: a split's greatest score and its sum
    query_starts,  # int32 [num_sequences + 1]
    context_lens,  # int32 [num_sequences]
    block_tables,  # int32 [num_sequences, ...]
    table_stride,
    q_token_stride,
    q_head_stride,
    block_stride,
    value_offset,
    slot_stride,
    kv_head_stride,
    scale,
    window,
    soft_cap,
    num_splits,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Online softmax of one tile of queries over one split of the keys that they see.

    Grid: (num_sequences, num_kv_heads, tiles of the longest sequence * num_splits). A tile is
    BLOCK_M pairs of a query and one of the GROUP heads that share the KV head.
    """
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    tile = tl.program_id(2) // num_splits
    split = tl.program_id(2) % num_splits

    first_token = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - first_token
    context_len = tl.load(context_lens + sequence)
    first_query = tile * BLOCK_M // GROUP
    if first_query >= num_queries:
        return

    pairs = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    queries = pairs // GROUP
    heads = kv_head * GROUP + pairs % GROUP
    is_query = queries < num_queries
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    tokens = (first_token + queries).to(tl.int64)
    q_offsets = tokens[:, None] * q_token_stride + heads[:, None] * q_head_stride + dims[None, :]
    q_tile = tl.load(q + q_offsets, mask=is_query[:, None] & is_dim[None, :], other=0.0)

    # What the tile's queries see: from lowest (its first query's window) to end (its last query).
    before = context_len - num_queries
    positions = before + queries
    last_query = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, num_queries - 1)
    end = before + last_query + 1
    lowest = 0
    if HAS_WINDOW:
        lowest = tl.maximum(before + first_query - window + 1, 0)
    # Steps begin at multiples of BLOCK_N whatever the tile, so that a row's sums do not depend on
    # where its chunk began: steps in which it sees nothing leave them as they are.
    begin = lowest // BLOCK_N * BLOCK_N
    if IS_SPLIT:
        length = tl.cdiv(tl.cdiv(end - begin, num_splits), BLOCK_N) * BLOCK_N
        begin += split * length
        end = tl.minimum(end, begin + length)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table = block_tables + sequence.to(tl.int64) * table_stride
    head_offset = kv_head * kv_head_stride
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        # Slots that nobody sees may hold NaN, which a product with zero would let through.
        is_key = (keys < end) & (keys >= lowest)
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        slots = blocks * block_stride + (keys % BLOCK_SIZE) * slot_stride + head_offset
        k_offsets = slots[None, :] + dims[:, None]
        k = tl.load(kv + k_offsets, mask=is_key[None, :] & is_dim[:, None], other=0.0)
        products = tl.dot(q_tile, k.to(q_tile.dtype), input_precision=PRECISION) * scale
        if HAS_SOFT_CAP:
            # tanh by one exponential: 1 and -1 where that overflows or vanishes
            products = soft_cap * (1 - 2 / (tl.exp(2 * products / soft_cap) + 1))
        is_seen = (keys[None, :] <= positions[:, None]) & is_key[None, :]
        if HAS_WINDOW:
            is_seen = is_seen & (keys[None, :] > positions[:, None] - window)
        products = tl.where(is_seen, products * LOG2_E, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(products, 1))
        # Finite for a row that has seen nothing yet.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(products - base[:, None])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(weights, 1)
        v_offsets = slots[:, None] + value_offset + dims[None, :]
        v = tl.load(kv + v_offsets, mask=is_key[:, None] & is_dim[None, :], other=0.0)
        v = v.to(q_tile.dtype)
        acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        peak = new_peak

    rows = tokens * (tl.num_programs(1) * GROUP) + heads
    if IS_SPLIT:
        parts = rows * num_splits + split
        tl.store(stats + parts * 2, peak, mask=is_query)
        tl.store(stats + parts * 2 + 1, total, mask=is_query)
        offsets = parts[:, None] * HEAD_DIM + dims[None, :]
        tl.store(partial + offsets, acc, mask=is_query[:, None] & is_dim[None, :])
    else:
        total = tl.where(is_query, total, 1.0)  # a tile's spare pairs may have seen nothing
        offsets = rows[:, None] * HEAD_DIM + dims[None, :]
        attended = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + offsets, attended, mask=is_query[:, None] & is_dim[None, :])


@triton.jit
def merge_splits(
    partial,
    stats,
    out,  # [T * num_heads, head_dim]
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """What `attend` left of the splits, as one. Grid: (T * num_heads,)."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, BLOCK_S)
    is_split = splits < num_splits
    parts = row * num_splits + splits
    peaks = tl.load(stats + parts * 2, mask=is_split, other=float("-inf"))
    totals = tl.load(stats + parts * 2 + 1, mask=is_split, other=0.0)
    weights = tl.exp2(peaks - tl.max(peaks, 0))
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    offsets = parts[:, None] * HEAD_DIM + dims[None, :]
    values = tl.load(partial + offsets, mask=is_split[:, None] & is_dim[None, :], other=0.0)
    merged = tl.sum(values * weights[:, None], 0) / tl.sum(totals * weights, 0)
    tl.store(out + row * HEAD_DIM + dims, merged.to(out.dtype.element_ty), mask=is_dim)


@triton.jit
def rope_and_cache(
    q,
    k,
    v,
    q_out,  # [T, num_heads, head_dim], contiguous
    kv,
    cos_sin,  # float32 [max_positions, 2 * HALF]
    positions,  # int64 [T]
    slots,  # int64 [T]
    q_stride,
    k_stride,
    v_stride,
    block_stride,
    value_offset,
    slot_stride,
    kv_head_stride,
    num_heads,
    num_kv_heads,
    limit,  # the greatest number that the cache's dtype holds
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CLAMP: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rotate q and k over half-split pairs; k and v go to their slots.

    Grid: (T, tiles of HEADS heads of q, then of k, then of v). A head's elements stand together.
    """
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    num_q_tiles = tl.cdiv(num_heads, HEADS)
    num_kv_tiles = tl.cdiv(num_kv_heads, HEADS)
    dims = tl.arange(0, BLOCK_D)
    is_dim = (dims < HEAD_DIM)[None, :]
    slot = tl.load(slots + token)
    cached = kv + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
    # Names are each branch's own: the compiler joins those that both define.
    if tile >= num_q_tiles + num_kv_tiles:
        v_heads = (tile - num_q_tiles - num_kv_tiles) * HEADS + tl.arange(0, HEADS)
        v_mask = (v_heads < num_kv_heads)[:, None] & is_dim
        v_source = v + token * v_stride + v_heads[:, None] * HEAD_DIM + dims[None, :]
        v_target = cached + value_offset + v_heads[:, None] * kv_head_stride + dims[None, :]
        v_values = tl.load(v_source, mask=v_mask, other=0.0)
        if CLAMP:
            wide_v = tl.clamp(v_values.to(tl.float32), -limit, limit)
            tl.store(v_target, wide_v.to(kv.dtype.element_ty), mask=v_mask)
        else:
            tl.store(v_target, v_values.to(kv.dtype.element_ty), mask=v_mask)
    else:
        # Each element's partner stands HALF away; what is not rotated has none and is kept.
        is_first = dims < HALF
        is_rotated = dims < 2 * HALF
        partners = tl.where(is_first, dims + HALF, tl.where(is_rotated, dims - HALF, dims))
        angle = tl.load(positions + token) * (2 * HALF) + dims % (HALF + (HALF == 0))
        cos = tl.load(cos_sin + angle, mask=is_rotated, other=1.0)
        sin = tl.load(cos_sin + angle + HALF, mask=is_rotated, other=0.0)
        sin = tl.where(is_first, -sin, sin)
        if tile < num_q_tiles:
            q_heads = tile * HEADS + tl.arange(0, HEADS)
            q_mask = (q_heads < num_heads)[:, None] & is_dim
            q_source = q + token * q_stride + q_heads[:, None] * HEAD_DIM
            q_own = tl.load(q_source + dims[None, :], mask=q_mask, other=0.0).to(tl.float32)
            q_other = tl.load(q_source + partners[None, :], mask=q_mask, other=0.0)
            q_turned = q_own * cos[None, :] + q_other.to(tl.float32) * sin[None, :]
            q_target = q_out + (token * num_heads + q_heads[:, None]) * HEAD_DIM + dims[None, :]
            tl.store(q_target, q_turned.to(q_out.dtype.element_ty), mask=q_mask)
        else:
            k_heads = (tile - num_q_tiles) * HEADS + tl.arange(0, HEADS)
            k_mask = (k_heads < num_kv_heads)[:, None] & is_dim
            k_source = k + token * k_stride + k_heads[:, None] * HEAD_DIM
            k_own = tl.load(k_source + dims[None, :], mask=k_mask, other=0.0).to(tl.float32)
            k_other = tl.load(k_source + partners[None, :], mask=k_mask, other=0.0)
            k_turned = k_own * cos[None, :] + k_other.to(tl.float32) * sin[None, :]
            k_target = cached + k_heads[:, None] * kv_head_stride + dims[None, :]
            # rounded as the model computes, then as the cache stores
            k_rounded = k_turned.to(k.dtype.element_ty)
            if CLAMP:
                wide_k = tl.clamp(k_rounded.to(tl.float32), -limit, limit)
                tl.store(k_target, wide_k.to(kv.dtype.element_ty), mask=k_mask)
            else:
                tl.store(k_target, k_rounded.to(kv.dtype.element_ty), mask=k_mask)


@triton.jit
def rms_norm(
    x,  # [num_rows, width]
    residual,  # [num_rows, width], contiguous; becomes residual + x where HAS_RESIDUAL
    weight,  # [width]
    out,  # [num_rows, width], contiguous
    x_stride,
    num_rows,
    eps,
    WIDTH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Norm of ROWS rows at a time. Grid: (tiles of ROWS,)."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    values = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0)
    offsets = rows[:, None] * WIDTH + columns[None, :]
    if HAS_RESIDUAL:
        added = tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
        values = (added + values.to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual + offsets, values, mask=mask)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)
    normal = (wide * scale[:, None]).to(out.dtype.element_ty)
    factors = tl.load(weight + columns, mask=columns < WIDTH, other=0.0)
    scaled = normal.to(tl.float32) * factors.to(tl.float32)[None, :]
    tl.store(out + offsets, scaled.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gate_and_mul(
    gate_up,  # [num_rows, 2 * width], contiguous
    out,  # [num_rows, width], contiguous
    width,
    IS_GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """silu(gate) * up, or GELU in its tanh approximation. Grid: (num_rows, tiles of BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    start = gate_up + row * 2 * width
    gate = tl.load(start + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(start + width + columns, mask=mask, other=0.0).to(tl.float32)
    if IS_GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        steep = 2 * inner  # (1 + tanh(x)) / 2 is the logistic function of 2 x
    else:
        steep = gate
    activated = gate / (1 + tl.exp(-tl.maximum(steep, -80.0)))  # beyond, it is zero anyway
    activated = activated.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + columns, (activated * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def copy_slots(
    pool,  # words [num_blocks, planes, block_size * slot_words]
    sources,
    targets,
    num_slots,
    block_words,
    plane_words,
    slot_words,
    BLOCK: tl.constexpr,
):
    """The first num_slots[i] slots of each plane of block sources[i]. Grid: (n, planes)."""
    copy = tl.program_id(0)
    plane = tl.program_id(1) * plane_words
    source = pool + tl.load(sources + copy) * block_words + plane
    target = pool + tl.load(targets + copy) * block_words + plane
    num_words = tl.load(num_slots + copy) * slot_words
    for start in range(0, num_words, BLOCK):
        words = start + tl.arange(0, BLOCK)
        mask = words < num_words
        tl.store(target + words, tl.load(source + words, mask=mask), mask=mask)
