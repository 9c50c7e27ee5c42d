// What is done to each token by itself: norms, SwiGLU, rotary embedding with the cache write.

#include <math.h>

#include "kernels.h"
#include "vec.h"

namespace pagefleet {
namespace PF_ISA {

constexpr long kSerialElements = 32768;  // elements below which threads do not pay

template <typename T>
PF_INLINE Vec load_up_to(const T* p, long n) {
  return n >= kWidth ? load(p) : load_part(p, n);
}

template <typename T>
PF_INLINE void store_up_to(T* p, Vec a, long n) {
  if (n >= kWidth) {
    store(p, a);
  } else {
    store_part(p, a, n);
  }
}

template <typename T>
static void normalize_row(const T* x, const T* weight, T* out, long hidden, float eps) {
  Vec squares = zero();
  for (long i = 0; i < hidden; i += kWidth) {
    Vec value = load_up_to(x + i, hidden - i);
    squares = fma(value, value, squares);
  }
  Vec inverse = splat(1.0f / sqrtf(sum_of(squares) / (float)hidden + eps));
  for (long i = 0; i < hidden; i += kWidth) {
    Vec value = mul(load_up_to(x + i, hidden - i), inverse);
    store_up_to(out + i, mul(value, load_up_to(weight + i, hidden - i)), hidden - i);
  }
}

template <typename T>
static void add_row(const T* x, T* residual, long hidden) {
  for (long i = 0; i < hidden; i += kWidth) {
    Vec sum = add(load_up_to(residual + i, hidden - i), load_up_to(x + i, hidden - i));
    store_up_to(residual + i, sum, hidden - i);
  }
}

template <typename T>
static void norm_rows(const T* x, T* residual, const T* weight, T* out, long rows, long hidden,
                      float eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) \
    if (threads > 1 && rows > 1 && rows * hidden > kSerialElements)
  for (long r = 0; r < rows; r++) {
    const T* source = x + r * hidden;
    if (residual != nullptr) {
      add_row(source, residual + r * hidden, hidden);
      source = residual + r * hidden;
    }
    normalize_row(source, weight, out + r * hidden, hidden, eps);
  }
}

static void add_rms_norm(const void* x, void* residual, const void* weight, void* out, int64_t rows,
                         int64_t hidden, float eps, int32_t dtype, int32_t threads) {
  if (dtype == kFloat32) {
    norm_rows((const float*)x, (float*)residual, (const float*)weight, (float*)out, rows, hidden,
              eps, threads);
  } else {
    norm_rows((const bf16*)x, (bf16*)residual, (const bf16*)weight, (bf16*)out, rows, hidden, eps,
              threads);
  }
}

static void rms_norm(const void* x, const void* weight, void* out, int64_t rows, int64_t hidden,
                     float eps, int32_t dtype, int32_t threads) {
  add_rms_norm(x, nullptr, weight, out, rows, hidden, eps, dtype, threads);
}

struct Silu {
  static PF_INLINE_MEMBER Vec of(Vec x) {
    return divide(x, add(splat(1.0f), exp_of(sub(zero(), x))));
  }
};

// x / 2 * (1 + tanh(u)) with u = sqrt(2 / pi) * (x + 0.044715 x^3), which is x * sigmoid(2 u).
struct GeluTanh {
  static PF_INLINE_MEMBER Vec of(Vec x) {
    Vec bent = fma(mul(mul(x, x), x), splat(0.044715f), x);
    return divide(x, add(splat(1.0f), exp_of(mul(bent, splat(-1.5957691216057308f)))));
  }
};

template <typename Activation, typename T>
static void gated_rows(const T* gate_up, T* out, long rows, long ffn, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) \
    if (threads > 1 && rows > 1 && rows * ffn > kSerialElements)
  for (long r = 0; r < rows; r++) {
    const T* gate = gate_up + r * 2 * ffn;
    for (long i = 0; i < ffn; i += kWidth) {
      Vec g = load_up_to(gate + i, ffn - i), u = load_up_to(gate + ffn + i, ffn - i);
      store_up_to(out + r * ffn + i, mul(Activation::of(g), u), ffn - i);
    }
  }
}

template <typename Activation>
static void gated(const void* gate_up, void* out, int64_t rows, int64_t ffn, int32_t dtype,
                  int32_t threads) {
  if (dtype == kFloat32) {
    gated_rows<Activation>((const float*)gate_up, (float*)out, rows, ffn, threads);
  } else {
    gated_rows<Activation>((const bf16*)gate_up, (bf16*)out, rows, ffn, threads);
  }
}

static void silu_and_mul(const void* gate_up, void* out, int64_t rows, int64_t ffn, int32_t dtype,
                         int32_t threads) {
  gated<Silu>(gate_up, out, rows, ffn, dtype, threads);
}

static void gelu_tanh_and_mul(const void* gate_up, void* out, int64_t rows, int64_t ffn,
                              int32_t dtype, int32_t threads) {
  gated<GeluTanh>(gate_up, out, rows, ffn, dtype, threads);
}

// `next`: as many floats that are read after these, to be fetched meanwhile; or null.
static float sum(const float* x, const float* next, int64_t count) {
  Vec sums[8];
  for (Vec& part : sums) part = zero();
  long i = 0;
  for (; i + 8 * kWidth <= count; i += 8 * kWidth) {
    for (int v = 0; v < 8; v++) {
      if (next) prefetch_l2(next + i + v * kWidth);
      sums[v] = add(sums[v], load(x + i + v * kWidth));
    }
  }
  for (; i < count; i += kWidth) sums[0] = add(sums[0], load_up_to(x + i, count - i));
  for (int v = 1; v < 8; v++) sums[0] = add(sums[0], sums[v]);
  return sum_of(sums[0]);
}

// Half-split pairs: (x[i], x[i + half]) turn by the angle of i; what is past 2 * half is copied.
template <typename T>
static void rotate_head(const T* x, const float* cos, const float* sin, long half, long dim, T* out) {
  for (long i = 0; i < half; i += kWidth) {
    long n = half - i;
    Vec a = load_up_to(x + i, n), b = load_up_to(x + half + i, n);
    Vec c = load_up_to(cos + i, n), s = load_up_to(sin + i, n);
    store_up_to(out + i, fnma(b, s, mul(a, c)), n);
    store_up_to(out + half + i, fma(a, s, mul(b, c)), n);
  }
  memcpy(out + 2 * half, x + 2 * half, (size_t)(dim - 2 * half) * sizeof(T));
}

template <typename T>
static void rope_token(const RopeArgs& args, long t) {
  long dim = args.head_dim, half = args.rotary_dim / 2;
  const float* cos = args.cos_sin + args.positions[t] * args.rotary_dim;
  const float* sin = cos + half;
  const T* q = (const T*)args.q + t * args.q_stride;
  T* q_out = (T*)args.q_out + t * args.num_heads * dim;
  for (long h = 0; h < args.num_heads; h++) {
    rotate_head(q + h * dim, cos, sin, half, dim, q_out + h * dim);
  }
  const T* k = (const T*)args.k + t * args.k_stride;
  const T* v = (const T*)args.v + t * args.v_stride;
  int64_t slot = args.slots[t];
  T* key = (T*)args.kv + slot / args.block_size * args.block_stride +
           slot % args.block_size * args.token_stride;
  for (long h = 0; h < args.num_kv_heads; h++, key += args.head_stride) {
    rotate_head(k + h * dim, cos, sin, half, dim, key);
    memcpy(key + args.value_offset, v + h * dim, (size_t)dim * sizeof(T));
  }
}

static void rope_and_cache(const RopeArgs* args) {
  long elements = args->num_tokens * (args->num_heads + 2 * args->num_kv_heads) * args->head_dim;
#pragma omp parallel for num_threads(args->threads) schedule(static) \
    if (args->threads > 1 && elements > kSerialElements)
  for (long t = 0; t < args->num_tokens; t++) {
    if (args->dtype == kFloat32) {
      rope_token<float>(*args, t);
    } else {
      rope_token<bf16>(*args, t);
    }
  }
}

}  // namespace PF_ISA
}  // namespace pagefleet
