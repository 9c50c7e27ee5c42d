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

// Fetches runs a line at a time, and then nothing more.
struct Trickle {
  const Run *run, *end;
  long at;  // in the run

  PF_INLINE_MEMBER void fetch(long) {
    if (run == end) return;
    prefetch_l2(run->begin + at);
    at += 64;
    if (at < run->bytes) return;
    at = 0;
    run++;
  }
};

// Running softmax of some rows: the largest score, the sum of weights, the weighted sum of V.
struct State {
  float *largest, *sum, *value;

  static long size(long rows, long width) { return rows * (width + 2); }
  State() = default;
  State(float* largest, float* sum, float* value) : largest(largest), sum(sum), value(value) {}
  State(float* memory, long rows, long width)
      : largest(memory + rows * width), sum(memory + rows * (width + 1)), value(memory) {}
  // Of the rows from `first` on.
  State from(long first, long width) const {
    return {largest + first, sum + first, value + first * width};
  }
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

// The order in which a score's products are summed: a float head in kChains chains, of every fourth
// element each, so that decoding needs no transposition; a bfloat16 head in one chain.
template <typename T>
struct Order {
  static constexpr bool kChained = sizeof(T) == 4;
  static long length(long dim) { return kChained ? ceil_div(dim, kChains) * kChains : dim; }
  // Where element i stands when the chains lie one after the other.
  static long place(long i, long dim) {
    return kChained ? i % kChains * ceil_div(dim, kChains) + i / kChains : i;
  }
};

constexpr int kRowsPerVec = kWidth / 4;  // query rows whose chains share a vector
constexpr long kKeysAtOnce = 8;          // rows of K that share the loads of the queries

PF_INLINE long padded_rows(long rows) { return ceil_div(rows, kRowsPerVec) * kRowsPerVec; }

// scores[m][0..KEYS) of as many keys, which lie `stride` floats apart, for up to VECS * kRowsPerVec
// rows. queries: [dim / 4][VECS * kRowsPerVec][4].
template <int VECS, int KEYS>
PF_INLINE void score_some_keys(const float* queries, const float* keys, long stride, long dim,
                               int rows, float* scores, Ahead& ahead) {
  Vec sums[VECS][KEYS];
#pragma GCC unroll 6
  for (int v = 0; v < VECS; v++) {
#pragma GCC unroll 8
    for (int t = 0; t < KEYS; t++) sums[v][t] = zero();
  }
  // Four rows by two strides: eight pointers would not leave a register to anything else.
  const float* quarters[] = {keys, keys + 4 * stride};
  long twice = 2 * stride, thrice = 3 * stride;
  PF_OPAQUE(twice);
  PF_OPAQUE(thrice);
  constexpr long kStep = 16;
  for (long i = 0; i < dim; i += kStep) {
    ahead.fetch(KEYS * kStep * 4);
    long left = min_of(kStep, dim - i);
#pragma GCC unroll 4
    for (long j = 0; j < kStep; j += 4) {
      if (j >= left) break;
      Vec q[VECS];
#pragma GCC unroll 6
      for (int v = 0; v < VECS; v++) q[v] = load(queries + v * kWidth);
#pragma GCC unroll 8
      for (int t = 0; t < KEYS; t++) {
        long offset = t % 4 == 0 ? 0 : t % 4 == 1 ? stride : t % 4 == 2 ? twice : thrice;
        Vec key = load_quad(quarters[t / 4] + offset + j);
#pragma GCC unroll 6
        for (int v = 0; v < VECS; v++) sums[v][t] = fma(q[v], key, sums[v][t]);
      }
      queries += VECS * kWidth;
    }
    quarters[0] += kStep;
    quarters[1] += kStep;
  }
#pragma GCC unroll 6
  for (int v = 0; v < VECS; v++) {
#pragma GCC unroll 2
    for (int t = 0; t < KEYS; t += 4) {
      Vec chains[kChains];
      turn_quads(sums[v] + t, chains);
      Vec total = add(add(add(chains[0], chains[1]), chains[2]), chains[3]);
      store_quads(scores + v * kRowsPerVec * kTile + t, kTile, total, rows - v * kRowsPerVec);
    }
  }
}

template <int VECS>
static void score_keys_of(const float* queries, const float* keys, long stride, long dim, int rows,
                          float* scores, Ahead& shared_ahead) {
  // As many sums as the registers hold.
  constexpr int kKeys = VECS * kKeysAtOnce <= 2 * kMaxRows ? kKeysAtOnce : 4;
  Ahead ahead = shared_ahead;
  for (long t = 0; t < kKeysAtOnce; t += kKeys) {
    score_some_keys<VECS, kKeys>(queries, keys + t * stride, stride, dim, rows, scores + t, ahead);
  }
  shared_ahead = ahead;
}

PF_INLINE void score_keys(const float* queries, const float* keys, long stride, long dim, int rows,
                          float* scores, Ahead& ahead) {
  using ScoreKeys = void (*)(const float*, const float*, long, long, int, float*, Ahead&);
  static const ScoreKeys kernels[] = {score_keys_of<1>, score_keys_of<2>, score_keys_of<3>};
  kernels[(rows - 1) / kRowsPerVec](queries, keys, stride, dim, rows, scores, ahead);
}

// The same for bfloat16: scores[m][0..kWidth), turned as they are read. queries: [dim][ROWS]; dim in
// whole quads of 32-bit words, which hold two elements.
template <int ROWS>
static void score_keys_of(const float* queries, const bf16* keys, long stride, long dim,
                          float* scores, Ahead& shared_ahead) {
  Ahead ahead = shared_ahead;
  const float* words = (const float*)keys;
  Vec sums[ROWS][1];
#pragma GCC unroll 12
  for (int m = 0; m < ROWS; m++) sums[m][0] = zero();
  for (long i = 0; i < dim / 2; i += 4) {
    ahead.fetch(kWidth * 16);
    Vec quad[4];
    load_turned(words + i, stride / 2, quad);
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
      Vec even[1] = {even_of(quad[c])}, odd[1] = {odd_of(quad[c])};
      multiply_add<ROWS, 1>(sums, queries + 2 * (i + c) * ROWS, even);
      multiply_add<ROWS, 1>(sums, queries + (2 * (i + c) + 1) * ROWS, odd);
    }
  }
  store_sums<ROWS, 1>(sums, scores, kTile);
  shared_ahead = ahead;
}

PF_INLINE void score_keys(const float* queries, const bf16* keys, long stride, long dim, int rows,
                          float* scores, Ahead& ahead) {
  using ScoreKeys = void (*)(const float*, const bf16*, long, long, float*, Ahead&);
  static const ScoreKeys kernels[] = {
      score_keys_of<1>,  score_keys_of<2>,  score_keys_of<3>,  score_keys_of<4>,
#if defined(__AVX2__)
      score_keys_of<5>,  score_keys_of<6>,
#endif
#if defined(__AVX512F__)
      score_keys_of<7>,  score_keys_of<8>,  score_keys_of<9>,
      score_keys_of<10>, score_keys_of<11>, score_keys_of<12>,
#endif
  };
  kernels[rows - 1](queries, keys, stride, dim, scores, ahead);
}

template <typename T>
constexpr long keys_at_once() {
  return sizeof(T) == 4 ? kKeysAtOnce : kWidth;
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

// Which tokens of a tile a row sees.
struct Seen {
  long begin, end;
};

PF_INLINE Vec keep_range(Vec a, long begin, long end, Vec fill) {
  if (end < kWidth) a = keep_first(a, max_of(end, 0), fill);
  return begin > 0 ? keep_first(fill, min_of(begin, kWidth), a) : a;
}

// Within `all`: scores → exp(score - top) in place where seen, 0 elsewhere; returns their sum. Lanes
// are summed by their place in the tile, so the sum does not depend on `all`.
static float weigh(float* scores, Seen seen, Seen all, float top) {
  Vec total = zero(), offset = splat(top);
  for (long i = all.begin / kWidth * kWidth; i < all.end; i += kWidth) {
    Vec e = exp_of(sub(load(scores + i), offset));
    if (i < seen.begin || i + kWidth > seen.end) {
      e = keep_range(e, seen.begin - i, seen.end - i, zero());
    }
    store(scores + i, e);
    total = add(total, e);
  }
  return sum_of(total);
}

static float largest_of(const float* scores, Seen seen) {
  Vec top = splat(kLowest);
  for (long i = seen.begin / kWidth * kWidth; i < seen.end; i += kWidth) {
    Vec value = load(scores + i);
    if (i < seen.begin || i + kWidth > seen.end) {
      value = keep_range(value, seen.begin - i, seen.end - i, splat(kLowest));
    }
    top = larger(top, value);
  }
  return max_of(top);
}

// cap * tanh(score / cap), in place.
static void cap_scores(float* scores, Seen seen, float cap) {
  for (long i = seen.begin / kWidth * kWidth; i < seen.end; i += kWidth) {
    store(scores + i, mul(tanh_of(mul(load(scores + i), splat(1.0f / cap))), splat(cap)));
  }
}

}  // namespace PF_ISA
}  // namespace pagefleet
