// The inner product of everything: a few rows times one panel of columns, sums kept in registers.
//
// Each output is one chain of fused multiply-adds in the order of k, whatever the number of rows:
// a row's result depends on nothing but the row. Linear layers and attention both stand on this.
#pragma once

#include "vec.h"

namespace pagefleet {
namespace PF_ISA {

// Accumulators (rows * 2), two columns vectors and a broadcast must fit the vector registers.
#if defined(__AVX512F__)
constexpr int kMaxRows = 12;
#elif defined(__AVX2__)
constexpr int kMaxRows = 6;
#else
constexpr int kMaxRows = 4;
#endif
constexpr int kPanel = 2 * kWidth;   // columns of a panel
constexpr long kPrefetchBytes = 2048;

// What a product fetches meanwhile: from `at` on, `step` bytes with each of its steps. Weights that
// several groups of rows use are fetched by all of them, a part each, so that memory never rests.
struct Fetch {
  const char* at;
  long step;
};

// One step of a product over W, of which it reads kPanel itself.
template <typename W>
PF_INLINE void fetch_more(Fetch& fetch) {
  prefetch_l2(fetch.at);
  if (kPanel * sizeof(W) > 64) prefetch_l2(fetch.at + 64);
  fetch.at += fetch.step;
}

// Rows in groups of at most kMaxRows, as even as possible.
struct RowGroups {
  long rows, count;

  explicit RowGroups(long rows) : rows(rows), count(ceil_div(rows, kMaxRows)) {}
  long begin(long g) const { return g * rows / count; }
  int size(long g) const { return (int)(begin(g + 1) - begin(g)); }
};

template <int ROWS, int VECS>
PF_INLINE void clear_sums(Vec sums[ROWS][VECS]) {
#pragma GCC unroll 12
  for (int m = 0; m < ROWS; m++) {
#pragma GCC unroll 4
    for (int v = 0; v < VECS; v++) sums[m][v] = zero();
  }
}

template <int ROWS, int VECS>
PF_INLINE void store_sums(Vec sums[ROWS][VECS], float* c, long ldc) {
#pragma GCC unroll 12
  for (int m = 0; m < ROWS; m++) {
#pragma GCC unroll 4
    for (int v = 0; v < VECS; v++) store(c + m * ldc + v * kWidth, sums[m][v]);
  }
}

template <int ROWS, int VECS>
PF_INLINE void multiply_add(Vec sums[ROWS][VECS], const float* a, const Vec b[VECS]) {
#pragma GCC unroll 12
  for (int m = 0; m < ROWS; m++) {
    Vec value = splat(a[m]);
#pragma GCC unroll 4
    for (int v = 0; v < VECS; v++) sums[m][v] = fma(value, b[v], sums[m][v]);
  }
}

// How a chain of sums ends: c = them, or c += them.
template <int ROWS, int VECS>
PF_INLINE void end_sums(Vec sums[ROWS][VECS], float* c, long ldc, bool is_added) {
  if (is_added) {
#pragma GCC unroll 12
    for (int m = 0; m < ROWS; m++) {
#pragma GCC unroll 4
      for (int v = 0; v < VECS; v++) sums[m][v] = add(load(c + m * ldc + v * kWidth), sums[m][v]);
    }
  }
  store_sums<ROWS, VECS>(sums, c, ldc);
}

// c[m][0..kPanel) (+)= sum over k of a[k][m] * panel[k][0..kPanel).
template <int ROWS>
static void panel_product(const float* a, const float* panel, long k, float* c, long ldc,
                          bool is_added, Fetch fetch) {
  Vec sums[ROWS][2];
  clear_sums<ROWS, 2>(sums);
  for (long i = 0; i < k; i++) {
    Vec b[2] = {load(panel), load(panel + kWidth)};
    fetch_more<float>(fetch);
    multiply_add<ROWS, 2>(sums, a, b);
    a += ROWS;
    panel += kPanel;
  }
  end_sums<ROWS, 2>(sums, c, ldc, is_added);
}

// The sum of kChains such products over k elements each, which lie one after the other. Totals stay in
// registers too, so half as many rows fit. A step of k is `stride` floats of a.
constexpr int kChains = 4;
constexpr int kChainedRows = kMaxRows / 2;

template <int ROWS>
static void chained_product(const float* a, long stride, const float* panel, long k, float* c,
                            long ldc) {
  Vec totals[ROWS][2];
  clear_sums<ROWS, 2>(totals);
  for (int chain = 0; chain < kChains; chain++) {
    Vec sums[ROWS][2];
    clear_sums<ROWS, 2>(sums);
    for (long i = 0; i < k; i++) {
      Vec b[2] = {load(panel), load(panel + kWidth)};
      multiply_add<ROWS, 2>(sums, a, b);
      a += stride;
      panel += kPanel;
    }
#pragma GCC unroll 6
    for (int m = 0; m < ROWS; m++) {
      totals[m][0] = add(totals[m][0], sums[m][0]);
      totals[m][1] = add(totals[m][1], sums[m][1]);
    }
  }
  store_sums<ROWS, 2>(totals, c, ldc);
}

using ChainedProduct = void (*)(const float*, long, const float*, long, float*, long);

static ChainedProduct chained_product_for(int rows) {
  static const ChainedProduct kernels[] = {
      chained_product<1>, chained_product<2>,
#if defined(__AVX2__)
      chained_product<3>,
#endif
#if defined(__AVX512F__)
      chained_product<4>, chained_product<5>, chained_product<6>,
#endif
  };
  return kernels[rows - 1];
}

// The same for bfloat16: a panel's 32-bit words hold the elements of k (low half) and k + 1.
template <int ROWS>
static void panel_product(const float* a, const uint32_t* panel, long k, float* c, long ldc,
                          bool is_added, Fetch fetch) {
  Vec sums[ROWS][2];
  clear_sums<ROWS, 2>(sums);
  for (long i = 0; i < k; i += 2) {
    const float* words = (const float*)panel;
    fetch_more<uint32_t>(fetch);
    Vec even[2] = {even_of(load(words)), even_of(load(words + kWidth))};
    multiply_add<ROWS, 2>(sums, a, even);
    Vec odd[2] = {odd_of(load(words)), odd_of(load(words + kWidth))};
    multiply_add<ROWS, 2>(sums, a + ROWS, odd);
    a += 2 * ROWS;
    panel += kPanel;
  }
  end_sums<ROWS, 2>(sums, c, ldc, is_added);
}

// The same for int8; the caller applies the scale.
template <int ROWS>
static void panel_product(const float* a, const int8_t* panel, long k, float* c, long ldc,
                          bool is_added, Fetch fetch) {
  Vec sums[ROWS][2];
  clear_sums<ROWS, 2>(sums);
  for (long i = 0; i < k; i++) {
    Vec b[2] = {load(panel), load(panel + kWidth)};
    fetch_more<int8_t>(fetch);
    multiply_add<ROWS, 2>(sums, a, b);
    a += ROWS;
    panel += kPanel;
  }
  end_sums<ROWS, 2>(sums, c, ldc, is_added);
}

// The same for signed nibbles, eight of k in a word.
template <int ROWS>
static void panel_product(const float* a, const nibbles* panel, long k, float* c, long ldc,
                          bool is_added, Fetch fetch) {
  Vec sums[ROWS][2];
  clear_sums<ROWS, 2>(sums);
  for (long i = 0; i < k; i += 8) {
    Vec words[2] = {load((const float*)panel), load((const float*)panel + kWidth)};
    fetch_more<nibbles>(fetch);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
      Vec b[2] = {nibble_of(words[0], j), nibble_of(words[1], j)};
      multiply_add<ROWS, 2>(sums, a, b);
      a += ROWS;
    }
    panel += kPanel;
  }
  end_sums<ROWS, 2>(sums, c, ldc, is_added);
}

template <typename W>
using PanelProduct = void (*)(const float*, const W*, long, float*, long, bool, Fetch);

// The kernel for a number of rows between 1 and kMaxRows.
template <typename W>
static PanelProduct<W> panel_product_for(int rows) {
  static const PanelProduct<W> kernels[] = {
      panel_product<1>,  panel_product<2>,  panel_product<3>,  panel_product<4>,
#if defined(__AVX2__)
      panel_product<5>,  panel_product<6>,
#endif
#if defined(__AVX512F__)
      panel_product<7>,  panel_product<8>,  panel_product<9>,
      panel_product<10>, panel_product<11>, panel_product<12>,
#endif
  };
  return kernels[rows - 1];
}

// A narrow panel made float32, for when many groups of rows will use it: the same numbers, so the
// same sums.
static void widen_panel(const uint32_t* panel, long k, float* out) {
  for (long i = 0; i < k; i += 2, panel += kPanel, out += 2 * kPanel) {
    for (long j = 0; j < kPanel; j += kWidth) {
      Vec pairs = load((const float*)panel + j);
      store(out + j, even_of(pairs));
      store(out + kPanel + j, odd_of(pairs));
    }
  }
}

static void widen_panel(const int8_t* panel, long k, float* out) {
  for (long i = 0; i < k * kPanel; i += kWidth) store(out + i, load(panel + i));
}

static void widen_panel(const nibbles* panel, long k, float* out) {
  for (long i = 0; i < k; i += 8, panel += kPanel, out += 8 * kPanel) {
    for (long j = 0; j < kPanel; j += kWidth) {
      Vec words = load((const float*)panel + j);
#pragma GCC unroll 8
      for (int n = 0; n < 8; n++) store(out + n * kPanel + j, nibble_of(words, n));
    }
  }
}

#if defined(__AVX512BF16__)

// Both sides bfloat16, two elements of k to a word: a[k / 2][m] times panel[k / 2][0..kPanel).
template <int ROWS>
static void panel_dot(const uint32_t* a, const uint32_t* panel, long words, float* c, long ldc,
                      bool is_added, Fetch fetch) {
  Vec sums[ROWS][2];
  clear_sums<ROWS, 2>(sums);
  for (long i = 0; i < words; i++) {
    __m512bh left = (__m512bh)_mm512_loadu_si512(panel);
    __m512bh right = (__m512bh)_mm512_loadu_si512(panel + kWidth);
    fetch_more<uint32_t>(fetch);
#pragma GCC unroll 12
    for (int m = 0; m < ROWS; m++) {
      __m512bh value = (__m512bh)_mm512_set1_epi32((int)a[m]);
      sums[m][0] = _mm512_dpbf16_ps(sums[m][0], left, value);
      sums[m][1] = _mm512_dpbf16_ps(sums[m][1], right, value);
    }
    a += ROWS;
    panel += kPanel;
  }
  end_sums<ROWS, 2>(sums, c, ldc, is_added);
}

using PanelDot = void (*)(const uint32_t*, const uint32_t*, long, float*, long, bool, Fetch);

static PanelDot panel_dot_for(int rows) {
  static const PanelDot kernels[] = {
      panel_dot<1>, panel_dot<2>, panel_dot<3>, panel_dot<4>,  panel_dot<5>,  panel_dot<6>,
      panel_dot<7>, panel_dot<8>, panel_dot<9>, panel_dot<10>, panel_dot<11>, panel_dot<12>,
  };
  return kernels[rows - 1];
}

#endif

// dst[i][0..rows) = src row 0..rows at column i, for `count` columns: rows become columns.
// Whole vectors are stored in ascending order, each over the end of the one before, but for the last.
template <typename T>
PF_INLINE void interleave_rows(const T* src, long src_stride, int rows, long count, float* dst) {
  if (rows == 1) {
    for (long i = 0; i < count; i += kWidth) {
      long n = count - i;
      if (n >= kWidth) {
        store(dst + i, load(src + i));
      } else {
        store_part(dst + i, load_part(src + i, n), n);
      }
    }
    return;
  }
  Vec tile[kWidth];
  long num_whole = count - (kWidth - 1) / rows;
  for (long i = 0; i < count; i += kWidth) {
    long n = min_of(kWidth, count - i);
    for (int m = 0; m < kWidth; m++) {
      if (m >= rows) {
        tile[m] = zero();
      } else {
        const T* p = src + m * src_stride + i;
        tile[m] = n == kWidth ? load(p) : load_part(p, n);
      }
    }
    transpose(tile);
    for (long j = 0; j < n; j++) {
      float* target = dst + (i + j) * rows;
      if (i + j < num_whole) {
        store(target, tile[j]);
      } else {
        store_part(target, tile[j], rows);
      }
    }
  }
}

}  // namespace PF_ISA
}  // namespace pagefleet
