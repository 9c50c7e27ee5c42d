// One vector of floats, as wide as the instruction set allows. Knows no kernel.
//
// This header is compiled once per instruction set (see setup.py), each time in a namespace of its
// own, so that the linker never merges code of different sets. For the same reason the kernels
// use no std:: templates: an inline function compiled for AVX-512 must not serve an older CPU.
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define PF_INLINE static inline __attribute__((always_inline))
#define PF_INLINE_MEMBER inline __attribute__((always_inline))
// Keeps the compiler from computing a value anew wherever it is used.
#define PF_OPAQUE(value) asm("" : "+r"(value))

namespace pagefleet {
namespace PF_ISA {

struct bf16 {
  uint16_t bits;
};

// Eight signed integers of four bits, the lowest bits first.
struct nibbles {
  uint32_t word;
};

PF_INLINE float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

PF_INLINE uint32_t float_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

PF_INLINE float to_float(float value) { return value; }
PF_INLINE float to_float(bf16 value) { return bits_to_float((uint32_t)value.bits << 16); }
PF_INLINE float to_float(int8_t value) { return (float)value; }

PF_INLINE void from_float(float value, float* out) { *out = value; }
// Round to nearest, ties to even; a NaN stays a NaN.
PF_INLINE void from_float(float value, bf16* out) {
  uint32_t bits = float_to_bits(value);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  out->bits = (uint16_t)(value != value ? 0x7fc0u : rounded);
}

PF_INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }
// Into the second level only: it has room for more misses at once than the first.
PF_INLINE void prefetch_l2(const void* address) { __builtin_prefetch(address, 0, 2); }

PF_INLINE long min_of(long a, long b) { return a < b ? a : b; }
PF_INLINE long max_of(long a, long b) { return a > b ? a : b; }
PF_INLINE long ceil_div(long a, long b) { return (a + b - 1) / b; }

#if defined(__AVX512F__)

constexpr int kWidth = 16;
using Vec = __m512;

PF_INLINE Vec splat(float x) { return _mm512_set1_ps(x); }
PF_INLINE Vec zero() { return _mm512_setzero_ps(); }
PF_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
PF_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
PF_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
PF_INLINE Vec divide(Vec a, Vec b) { return _mm512_div_ps(a, b); }
PF_INLINE Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }
PF_INLINE Vec smaller(Vec a, Vec b) { return _mm512_min_ps(a, b); }
PF_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
PF_INLINE Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }
PF_INLINE float sum_of(Vec a) { return _mm512_reduce_add_ps(a); }
PF_INLINE float max_of(Vec a) { return _mm512_reduce_max_ps(a); }

PF_INLINE __mmask16 first(long n) { return (__mmask16)((1u << n) - 1u); }

PF_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
PF_INLINE Vec load_part(const float* p, long n) { return _mm512_maskz_loadu_ps(first(n), p); }
PF_INLINE void store(float* p, Vec a) { _mm512_storeu_ps(p, a); }
PF_INLINE void store_part(float* p, Vec a, long n) { _mm512_mask_storeu_ps(p, first(n), a); }
// Lanes from n on become `fill`.
PF_INLINE Vec keep_first(Vec a, long n, Vec fill) {
  return _mm512_mask_blend_ps(first(n), fill, a);
}

PF_INLINE Vec widen(__m256i half) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
PF_INLINE __m256i narrow(Vec a) {
  __m512i bits = _mm512_castps_si512(a);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(
      _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(
      _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0)));
}
PF_INLINE Vec load(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
PF_INLINE Vec load_part(const bf16* p, long n) {
  return widen(_mm256_maskz_loadu_epi16(first(n), p));
}
PF_INLINE void store(bf16* p, Vec a) { _mm256_storeu_si256((__m256i*)p, narrow(a)); }
PF_INLINE void store_part(bf16* p, Vec a, long n) {
  _mm256_mask_storeu_epi16(p, first(n), narrow(a));
}
PF_INLINE Vec load(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}

PF_INLINE Vec scale_by_power(Vec a, Vec n) { return _mm512_scalef_ps(a, n); }
PF_INLINE Vec round_to_int(Vec a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

PF_INLINE void transpose(Vec r[kWidth]) {
  Vec t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_castpd_ps(
        _mm512_unpacklo_pd(_mm512_castps_pd(t[i]), _mm512_castps_pd(t[i + 2])));
    r[i + 1] = _mm512_castpd_ps(
        _mm512_unpackhi_pd(_mm512_castps_pd(t[i]), _mm512_castps_pd(t[i + 2])));
    r[i + 2] = _mm512_castpd_ps(
        _mm512_unpacklo_pd(_mm512_castps_pd(t[i + 1]), _mm512_castps_pd(t[i + 3])));
    r[i + 3] = _mm512_castpd_ps(
        _mm512_unpackhi_pd(_mm512_castps_pd(t[i + 1]), _mm512_castps_pd(t[i + 3])));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// quad[c] = word i + c of each of kWidth rows of 32-bit words. Whole lanes are put in place by loads,
// so that only half of a full transpose's shuffles remain.
PF_INLINE void load_turned(const float* const rows[kWidth], long i, Vec quad[4]) {
  Vec x[4];
#pragma GCC unroll 4
  for (int a = 0; a < 4; a++) {
    Vec v = _mm512_castps128_ps512(_mm_loadu_ps(rows[a] + i));
    v = _mm512_mask_broadcast_f32x4(v, 0x00f0, _mm_loadu_ps(rows[a + 4] + i));
    v = _mm512_mask_broadcast_f32x4(v, 0x0f00, _mm_loadu_ps(rows[a + 8] + i));
    x[a] = _mm512_mask_broadcast_f32x4(v, 0xf000, _mm_loadu_ps(rows[a + 12] + i));
  }
  __m512d low0 = _mm512_castps_pd(_mm512_unpacklo_ps(x[0], x[1]));
  __m512d high0 = _mm512_castps_pd(_mm512_unpackhi_ps(x[0], x[1]));
  __m512d low1 = _mm512_castps_pd(_mm512_unpacklo_ps(x[2], x[3]));
  __m512d high1 = _mm512_castps_pd(_mm512_unpackhi_ps(x[2], x[3]));
  quad[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(low0, low1));
  quad[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low0, low1));
  quad[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high0, high1));
  quad[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high0, high1));
}

// Four floats, in every group of four lanes.
PF_INLINE Vec load_quad(const float* p) { return _mm512_broadcast_f32x4(_mm_loadu_ps(p)); }
// Turns each group of four lanes of four vectors: lane g * 4 + j of out[c] = lane g * 4 + c of r[j].
PF_INLINE void turn_quads(const Vec r[4], Vec out[4]) {
  __m512d low0 = _mm512_castps_pd(_mm512_unpacklo_ps(r[0], r[1]));
  __m512d high0 = _mm512_castps_pd(_mm512_unpackhi_ps(r[0], r[1]));
  __m512d low1 = _mm512_castps_pd(_mm512_unpacklo_ps(r[2], r[3]));
  __m512d high1 = _mm512_castps_pd(_mm512_unpackhi_ps(r[2], r[3]));
  out[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(low0, low1));
  out[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low0, low1));
  out[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high0, high1));
  out[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high0, high1));
}
// The first n groups of four lanes, `stride` floats apart.
PF_INLINE void store_quads(float* p, long stride, Vec a, long n) {
  _mm_storeu_ps(p, _mm512_castps512_ps128(a));
  if (n > 1) _mm_storeu_ps(p + stride, _mm512_extractf32x4_ps(a, 1));
  if (n > 2) _mm_storeu_ps(p + 2 * stride, _mm512_extractf32x4_ps(a, 2));
  if (n > 3) _mm_storeu_ps(p + 3 * stride, _mm512_extractf32x4_ps(a, 3));
}
// Lanes of `a` where |x| < limit, else of `b`.
PF_INLINE Vec where_small(Vec x, float limit, Vec a, Vec b) {
  return _mm512_mask_blend_ps(
      _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(limit), _CMP_LT_OQ), b, a);
}

// The i-th of the eight signed nibbles in each 32-bit word, the lowest first.
PF_INLINE Vec nibble_of(Vec words, int i) {
  const Vec values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
  // The permutation looks at four bits of each index alone.
  return _mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_castps_si512(words), 4 * i), values);
}

// A lane holds two bfloat16: the lower half is the even element, the upper half the odd one.
PF_INLINE Vec even_of(Vec pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs), 16));
}
PF_INLINE Vec odd_of(Vec pairs) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(_mm512_castps_si512(pairs), _mm512_set1_epi32((int)0xffff0000u)));
}

#elif defined(__AVX2__)

constexpr int kWidth = 8;
using Vec = __m256;

PF_INLINE Vec splat(float x) { return _mm256_set1_ps(x); }
PF_INLINE Vec zero() { return _mm256_setzero_ps(); }
PF_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
PF_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
PF_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
PF_INLINE Vec divide(Vec a, Vec b) { return _mm256_div_ps(a, b); }
PF_INLINE Vec larger(Vec a, Vec b) { return _mm256_max_ps(a, b); }
PF_INLINE Vec smaller(Vec a, Vec b) { return _mm256_min_ps(a, b); }
PF_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
PF_INLINE Vec fnma(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a, b, c); }
PF_INLINE float sum_of(Vec a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
PF_INLINE float max_of(Vec a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

PF_INLINE __m256i first(long n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

PF_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
PF_INLINE Vec load_part(const float* p, long n) { return _mm256_maskload_ps(p, first(n)); }
PF_INLINE void store(float* p, Vec a) { _mm256_storeu_ps(p, a); }
PF_INLINE void store_part(float* p, Vec a, long n) { _mm256_maskstore_ps(p, first(n), a); }
PF_INLINE Vec keep_first(Vec a, long n, Vec fill) {
  return _mm256_blendv_ps(fill, a, _mm256_castsi256_ps(first(n)));
}

PF_INLINE Vec widen(__m128i half) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
PF_INLINE __m128i narrow(Vec a) {
  __m256i bits = _mm256_castps_si256(a);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(
      _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}
PF_INLINE Vec load(const bf16* p) { return widen(_mm_loadu_si128((const __m128i*)p)); }
PF_INLINE Vec load_part(const bf16* p, long n) {
  uint16_t part[8] = {0};
  memcpy(part, p, (size_t)n * 2);
  return widen(_mm_loadu_si128((const __m128i*)part));
}
PF_INLINE void store(bf16* p, Vec a) { _mm_storeu_si128((__m128i*)p, narrow(a)); }
PF_INLINE void store_part(bf16* p, Vec a, long n) {
  uint16_t part[8];
  _mm_storeu_si128((__m128i*)part, narrow(a));
  memcpy(p, part, (size_t)n * 2);
}
PF_INLINE Vec load(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}

PF_INLINE Vec scale_by_power(Vec a, Vec n) {
  __m256i shift = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), shift));
}
PF_INLINE Vec round_to_int(Vec a) {
  return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

PF_INLINE void transpose(Vec r[kWidth]) {
  Vec t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) r[i] = t[i];
}

PF_INLINE void load_turned(const float* const rows[kWidth], long i, Vec quad[4]) {
  Vec x[4];
#pragma GCC unroll 4
  for (int a = 0; a < 4; a++) {
    x[a] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows[a] + i)),
                                _mm_loadu_ps(rows[a + 4] + i), 1);
  }
  __m256d low0 = _mm256_castps_pd(_mm256_unpacklo_ps(x[0], x[1]));
  __m256d high0 = _mm256_castps_pd(_mm256_unpackhi_ps(x[0], x[1]));
  __m256d low1 = _mm256_castps_pd(_mm256_unpacklo_ps(x[2], x[3]));
  __m256d high1 = _mm256_castps_pd(_mm256_unpackhi_ps(x[2], x[3]));
  quad[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(low0, low1));
  quad[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low0, low1));
  quad[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(high0, high1));
  quad[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(high0, high1));
}

PF_INLINE Vec load_quad(const float* p) { return _mm256_broadcast_ps((const __m128*)p); }
PF_INLINE void turn_quads(const Vec r[4], Vec out[4]) {
  __m256d low0 = _mm256_castps_pd(_mm256_unpacklo_ps(r[0], r[1]));
  __m256d high0 = _mm256_castps_pd(_mm256_unpackhi_ps(r[0], r[1]));
  __m256d low1 = _mm256_castps_pd(_mm256_unpacklo_ps(r[2], r[3]));
  __m256d high1 = _mm256_castps_pd(_mm256_unpackhi_ps(r[2], r[3]));
  out[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(low0, low1));
  out[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low0, low1));
  out[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(high0, high1));
  out[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(high0, high1));
}
PF_INLINE void store_quads(float* p, long stride, Vec a, long n) {
  _mm_storeu_ps(p, _mm256_castps256_ps128(a));
  if (n > 1) _mm_storeu_ps(p + stride, _mm256_extractf128_ps(a, 1));
}
PF_INLINE Vec where_small(Vec x, float limit, Vec a, Vec b) {
  Vec size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
  return _mm256_blendv_ps(b, a, _mm256_cmp_ps(size, _mm256_set1_ps(limit), _CMP_LT_OQ));
}

PF_INLINE Vec nibble_of(Vec words, int i) {
  __m256i high = _mm256_slli_epi32(_mm256_castps_si256(words), 28 - 4 * i);
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(high, 28));
}

PF_INLINE Vec even_of(Vec pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs), 16));
}
PF_INLINE Vec odd_of(Vec pairs) {
  return _mm256_castsi256_ps(
      _mm256_and_si256(_mm256_castps_si256(pairs), _mm256_set1_epi32((int)0xffff0000u)));
}

#else  // any CPU: the compiler turns its vector extension into what there is

constexpr int kWidth = 8;
#pragma GCC diagnostic ignored "-Wpsabi"  // no vector crosses a border of this library
typedef float Vec __attribute__((vector_size(32)));

PF_INLINE Vec splat(float x) { return Vec{x, x, x, x, x, x, x, x}; }
PF_INLINE Vec zero() { return splat(0.0f); }
PF_INLINE Vec add(Vec a, Vec b) { return a + b; }
PF_INLINE Vec sub(Vec a, Vec b) { return a - b; }
PF_INLINE Vec mul(Vec a, Vec b) { return a * b; }
PF_INLINE Vec divide(Vec a, Vec b) { return a / b; }
PF_INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }
PF_INLINE Vec smaller(Vec a, Vec b) { return a < b ? a : b; }
PF_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
PF_INLINE Vec fnma(Vec a, Vec b, Vec c) { return c - a * b; }
PF_INLINE float sum_of(Vec a) {
  return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
}
PF_INLINE float max_of(Vec a) {
  float m = a[0];
  for (int i = 1; i < kWidth; i++) m = a[i] > m ? a[i] : m;
  return m;
}

template <typename T>
PF_INLINE Vec load_part(const T* p, long n) {
  Vec v = zero();
  for (long i = 0; i < n; i++) v[i] = to_float(p[i]);
  return v;
}
template <typename T>
PF_INLINE void store_part(T* p, Vec a, long n) {
  for (long i = 0; i < n; i++) from_float(a[i], p + i);
}
PF_INLINE Vec load(const float* p) {
  Vec v;
  memcpy(&v, p, sizeof v);
  return v;
}
PF_INLINE Vec load(const bf16* p) { return load_part(p, kWidth); }
PF_INLINE Vec load(const int8_t* p) { return load_part(p, kWidth); }
PF_INLINE void store(float* p, Vec a) { memcpy(p, &a, sizeof a); }
PF_INLINE void store(bf16* p, Vec a) { store_part(p, a, kWidth); }
PF_INLINE Vec keep_first(Vec a, long n, Vec fill) {
  for (long i = n; i < kWidth; i++) a[i] = fill[i];
  return a;
}

PF_INLINE Vec scale_by_power(Vec a, Vec n) {
  for (int i = 0; i < kWidth; i++) {
    a[i] = bits_to_float(float_to_bits(a[i]) + ((uint32_t)(int32_t)n[i] << 23));
  }
  return a;
}
PF_INLINE Vec round_to_int(Vec a) {
  // Adding and taking away 1.5 * 2^23 leaves the nearest integer for the small values of exp.
  Vec magic = splat(12582912.0f);
  return (a + magic) - magic;
}

PF_INLINE void transpose(Vec r[kWidth]) {
  Vec t[kWidth];
  for (int i = 0; i < kWidth; i++) t[i] = r[i];
  for (int i = 0; i < kWidth; i++) {
    for (int j = 0; j < kWidth; j++) r[i][j] = t[j][i];
  }
}

PF_INLINE void load_turned(const float* const rows[kWidth], long i, Vec quad[4]) {
  for (int t = 0; t < kWidth; t++) {
    for (int c = 0; c < 4; c++) quad[c][t] = rows[t][i + c];
  }
}

PF_INLINE Vec load_quad(const float* p) {
  return Vec{p[0], p[1], p[2], p[3], p[0], p[1], p[2], p[3]};
}
PF_INLINE void turn_quads(const Vec r[4], Vec out[4]) {
  for (int c = 0; c < 4; c++) {
    for (int i = 0; i < kWidth; i++) out[c][i] = r[i % 4][i / 4 * 4 + c];
  }
}
PF_INLINE void store_quads(float* p, long stride, Vec a, long n) {
  for (long i = 0; i < min_of(n, kWidth / 4) * 4; i++) p[i / 4 * stride + i % 4] = a[i];
}
PF_INLINE Vec where_small(Vec x, float limit, Vec a, Vec b) {
  for (int i = 0; i < kWidth; i++) a[i] = x[i] < limit && x[i] > -limit ? a[i] : b[i];
  return a;
}

PF_INLINE Vec nibble_of(Vec words, int i) {
  for (int j = 0; j < kWidth; j++) {
    words[j] = (float)((int32_t)(float_to_bits(words[j]) << (28 - 4 * i)) >> 28);
  }
  return words;
}

PF_INLINE Vec even_of(Vec pairs) {
  for (int i = 0; i < kWidth; i++) pairs[i] = bits_to_float(float_to_bits(pairs[i]) << 16);
  return pairs;
}
PF_INLINE Vec odd_of(Vec pairs) {
  for (int i = 0; i < kWidth; i++) pairs[i] = bits_to_float(float_to_bits(pairs[i]) & 0xffff0000u);
  return pairs;
}

#endif

// exp by range reduction (Cody and Waite) and a polynomial of degree 6; exp(0) is exactly 1.
// Below -87.3 the result stays at about 1e-38, which no sum of ours can tell from 0.
PF_INLINE Vec exp_of(Vec x) {
  x = smaller(larger(x, splat(-87.3f)), splat(88.3f));
  Vec n = round_to_int(mul(x, splat(1.44269504088896341f)));
  Vec r = fnma(n, splat(0.693359375f), x);
  r = fnma(n, splat(-2.12194440e-4f), r);
  Vec p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(mul(p, r), r, add(r, splat(1.0f)));
  return scale_by_power(p, n);
}

PF_INLINE float exp_of(float x) {
  float lanes[kWidth];
  store(lanes, exp_of(splat(x)));
  return lanes[0];
}

// Near 0 by a polynomial (Cephes), since 1 less almost 1 loses digits.
PF_INLINE Vec tanh_of(Vec x) {
  Vec square = mul(x, x);
  Vec p = splat(-5.70498872745e-3f);
  p = fma(p, square, splat(2.06390887954e-2f));
  p = fma(p, square, splat(-5.37397155531e-2f));
  p = fma(p, square, splat(1.33314422036e-1f));
  p = fma(p, square, splat(-3.33332819422e-1f));
  Vec near = fma(mul(p, square), x, x);
  Vec far = sub(splat(1.0f), divide(splat(2.0f), add(exp_of(add(x, x)), splat(1.0f))));
  return where_small(x, 0.625f, near, far);
}

// A buffer of the calling thread that grows and is kept: no allocation per call.
struct Scratch {
  void* data = nullptr;
  size_t size = 0;

  ~Scratch() { free(data); }

  float* floats(size_t count) { return (float*)bytes(count * sizeof(float)); }

  void* bytes(size_t count) {
    if (count > size) {
      free(data);
      size = (count + count / 4 + 4095) / 4096 * 4096;
      data = aligned_alloc(4096, size);
      if (data == nullptr) abort();
    }
    return data;
  }
};

}  // namespace PF_ISA
}  // namespace pagefleet
