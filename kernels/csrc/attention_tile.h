// The arithmetic of attention on one tile of the context: scores, softmax weights, weighted sums.
#pragma once

#include "micro.h"

namespace pagefleet {
namespace PF_ISA {

constexpr long kTile = 128;
constexpr float kLowest = -3.0e38f;

// A piece of the cache that is read as a whole: K or V of one block.
struct Run {
  const char* begin;
  long bytes;
};

// Walks over runs some way ahead of their use and fetches them, a few lines with each step of the
// arithmetic: a burst would fill the queue of misses and stall what follows it.
struct Ahead {
  const char *at, *end;  // of the current run
  const Run *run, *last;

  static Ahead over(const Run* runs, long count) {
    return {runs->begin, runs->begin + runs->bytes, runs, runs + count - 1};
  }
  PF_INLINE_MEMBER void fetch(long bytes) {
    for (long i = 0; i < bytes; i += 64) prefetch_l2(at + i);
    skip(bytes);
  }
  PF_INLINE_MEMBER void skip(long bytes) {
    at += bytes;
    while (at >= end && run != last) {
      long over = at - end;
      run++;
      at = run->begin + over;
      end = run->begin + run->bytes;
    }
  }
};

struct NothingAhead {
  PF_INLINE_MEMBER void fetch(long) {}
};

// Running softmax of some rows: the largest score, the sum of weights, the weighted sum of V.
struct State {
  float *largest, *sum, *value;

  static long size(long rows, long width) { return rows * (width + 2); }
  State() = default;
  State(float* largest, float* sum, float* value) : largest(largest), sum(sum), value(value) {}
  State(float* memory, long rows, long width)
      : largest(memory + rows * width), sum(memory + rows * (width + 1)), value(memory) {}
  void clear(long rows, long width) const {
    for (long r = 0; r < rows; r++) {
      largest[r] = kLowest;
      sum[r] = 0;
    }
    memset(value, 0, (size_t)(rows * width) * sizeof(float));
  }
  void merge(const State& other, long rows, long width) const {
    for (long r = 0; r < rows; r++) {
      float top = other.largest[r] > largest[r] ? other.largest[r] : largest[r];
      float mine = exp_of(largest[r] - top), theirs = exp_of(other.largest[r] - top);
      for (long i = 0; i < width; i += kWidth) {
        Vec scaled = mul(load(other.value + r * width + i), splat(theirs));
        store(value + r * width + i, fma(load(value + r * width + i), splat(mine), scaled));
      }
      sum[r] = sum[r] * mine + other.sum[r] * theirs;
      largest[r] = top;
    }
  }
};

template <int ROWS, int GROUPS, typename T>
PF_INLINE void add_scores(const Vec quads[GROUPS][4], const float* queries,
                          Vec sums[ROWS][GROUPS]) {
  Vec columns[GROUPS];
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    if (sizeof(T) == 4) {
      for (int g = 0; g < GROUPS; g++) columns[g] = quads[g][c];
      multiply_add<ROWS, GROUPS>(sums, queries + c * ROWS, columns);
    } else {
      for (int g = 0; g < GROUPS; g++) columns[g] = even_of(quads[g][c]);
      multiply_add<ROWS, GROUPS>(sums, queries + 2 * c * ROWS, columns);
      for (int g = 0; g < GROUPS; g++) columns[g] = odd_of(quads[g][c]);
      multiply_add<ROWS, GROUPS>(sums, queries + (2 * c + 1) * ROWS, columns);
    }
  }
}

// scores[m][0..GROUPS * kWidth) of as many keys, which lie `stride` elements apart; the order of the
// sums is that of panel_product. queries: [dim][ROWS]; dim in whole quads of 32-bit words.
template <int ROWS, int GROUPS, typename T>
static void score_keys(const float* queries, const T* keys, long stride, long dim, float* scores,
                       Ahead& shared_ahead) {
  Ahead ahead = shared_ahead;
  const float* words = (const float*)keys;
  long per_word = 4 / (long)sizeof(T);
  Vec sums[ROWS][GROUPS];
#pragma GCC unroll 12
  for (int m = 0; m < ROWS; m++) {
#pragma GCC unroll 2
    for (int g = 0; g < GROUPS; g++) sums[m][g] = zero();
  }
  long i = 0;
  if (GROUPS == 1 && kWidth == 16) {
    for (; i + kWidth <= dim / per_word; i += kWidth) {
      Vec tile[kWidth];
#pragma GCC unroll 16
      for (int j = 0; j < kWidth; j++) tile[j] = load(words + j * (stride / per_word) + i);
      transpose(tile);
#pragma GCC unroll 4
      for (int j = 0; j < kWidth; j += 4) {
        ahead.fetch(4 * 64);
        Vec quads[GROUPS][4] = {{tile[j], tile[j + 1], tile[j + 2], tile[j + 3]}};
        add_scores<ROWS, GROUPS, T>(quads, queries + (i + j) * per_word * ROWS, sums);
      }
    }
  }
  for (; i < dim / per_word; i += 4) {
    ahead.fetch(GROUPS * kWidth * 16);
    Vec quads[GROUPS][4];
#pragma GCC unroll 2
    for (int g = 0; g < GROUPS; g++) {
      load_turned(words + g * kWidth * (stride / per_word) + i, stride / per_word, quads[g]);
    }
    add_scores<ROWS, GROUPS, T>(quads, queries + i * per_word * ROWS, sums);
  }
  store_sums<ROWS, GROUPS>(sums, scores, kTile);
  shared_ahead = ahead;
}

template <typename T>
using ScoreKeys = void (*)(const float*, const T*, long, long, float*, Ahead&);

template <int GROUPS, typename T>
static ScoreKeys<T> score_keys_for(int rows) {
  static const ScoreKeys<T> kernels[] = {
      score_keys<1, GROUPS, T>,  score_keys<2, GROUPS, T>,  score_keys<3, GROUPS, T>,
      score_keys<4, GROUPS, T>,
#if defined(__AVX2__)
      score_keys<5, GROUPS, T>,  score_keys<6, GROUPS, T>,
#endif
#if defined(__AVX512F__)
      score_keys<7, GROUPS, T>,  score_keys<8, GROUPS, T>,  score_keys<9, GROUPS, T>,
      score_keys<10, GROUPS, T>, score_keys<11, GROUPS, T>, score_keys<12, GROUPS, T>,
#endif
  };
  return kernels[rows - 1];
}

// value[m][0..VECS vectors) = value * decay[m] + sum over t of weights[m][t] * rows(t).
template <int ROWS, int VECS, typename T, typename A>
static void add_values(const float* weights, const T* base, const int64_t* offsets, long count,
                       const float* decay, float* value, long width, A& shared_ahead) {
  A ahead = shared_ahead;
  Vec sums[ROWS][VECS];
#pragma GCC unroll 12
  for (int m = 0; m < ROWS; m++) {
#pragma GCC unroll 4
    for (int v = 0; v < VECS; v++) {
      sums[m][v] = mul(load(value + m * width + v * kWidth), splat(decay[m]));
    }
  }
  for (long t = 0; t < count; t++) {
    const T* row = base + offsets[t];
    ahead.fetch(VECS * kWidth * (long)sizeof(T));
    Vec b[VECS];
#pragma GCC unroll 4
    for (int v = 0; v < VECS; v++) b[v] = load(row + v * kWidth);
#pragma GCC unroll 12
    for (int m = 0; m < ROWS; m++) {
      Vec weight = splat(weights[m * kTile + t]);
#pragma GCC unroll 4
      for (int v = 0; v < VECS; v++) sums[m][v] = fma(weight, b[v], sums[m][v]);
    }
  }
  store_sums<ROWS, VECS>(sums, value, width);
  shared_ahead = ahead;
}

template <typename T, typename A>
using AddValues = void (*)(const float*, const T*, const int64_t*, long, const float*, float*, long,
                           A&);

template <int VECS, typename T, typename A>
static AddValues<T, A> add_values_for(int rows) {
  static const AddValues<T, A> kernels[] = {
      add_values<1, VECS, T, A>,  add_values<2, VECS, T, A>,  add_values<3, VECS, T, A>,
      add_values<4, VECS, T, A>,
#if defined(__AVX2__)
      add_values<5, VECS, T, A>,  add_values<6, VECS, T, A>,
#endif
#if defined(__AVX512F__)
      add_values<7, VECS, T, A>,  add_values<8, VECS, T, A>,  add_values<9, VECS, T, A>,
      add_values<10, VECS, T, A>, add_values<11, VECS, T, A>, add_values<12, VECS, T, A>,
#endif
  };
  return kernels[rows - 1];
}

// All of a row of V, as many vectors at once as the registers take for a number of rows.
template <typename T, typename A>
static void add_all_values(int rows, const float* weights, const T* base, const int64_t* offsets,
                           long count, const float* decay, float* value, long width, A& ahead) {
  for (long i = 0; i < width;) {
    long vectors = (width - i) / kWidth;
    int taken = vectors >= 4 && rows * 4 <= kMaxRows * 2 ? 4 : vectors >= 2 ? 2 : 1;
    AddValues<T, A> kernel = taken == 4   ? add_values_for<4, T, A>(rows)
                             : taken == 2 ? add_values_for<2, T, A>(rows)
                                          : add_values_for<1, T, A>(rows);
    kernel(weights, base + i, offsets, count, decay, value + i, width, ahead);
    i += taken * kWidth;
  }
}

// scores[0..count) → exp(score - top) in place, zeros up to `padded`; returns their sum.
static float weigh(float* scores, long count, long padded, float top) {
  Vec total = zero(), offset = splat(top);
  long i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    Vec e = exp_of(sub(load(scores + i), offset));
    store(scores + i, e);
    total = add(total, e);
  }
  if (i < count) {
    Vec e = keep_first(exp_of(sub(load(scores + i), offset)), count - i, zero());
    store(scores + i, e);
    total = add(total, e);
    i += kWidth;
  }
  for (; i < padded; i += kWidth) store(scores + i, zero());
  return sum_of(total);
}

static float largest_of(const float* scores, long count) {
  Vec top = splat(kLowest);
  long i = 0;
  for (; i + kWidth <= count; i += kWidth) top = larger(top, load(scores + i));
  if (i < count) top = larger(top, keep_first(load(scores + i), count - i, splat(kLowest)));
  return max_of(top);
}

}  // namespace PF_ISA
}  // namespace pagefleet
