// The arithmetic of attention on one tile of the context: scores, softmax weights, weighted sums.
#pragma once

#include "micro.h"
#include "reading_order.h"

namespace pagefleet {
namespace PF_ISA {

constexpr float kLowest = -3.0e38f;

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
static_assert(kStrands == 8, "eight rows of K share the loads of the queries");

PF_INLINE long padded_rows(long rows) { return ceil_div(rows, kRowsPerVec) * kRowsPerVec; }

// Scores as they are computed: [kStrands tokens, in the order of reading][row][kStrands].
struct RawScores {
  float* memory;
  long rows;

  static long size(long rows) { return rows * kTile + kWidth; }
  float* of(long i) const { return memory + i / kStrands * kStrands * rows + i % kStrands; }
};

// raw[m][0..KEYS) of as many keys, `head` bytes into rows of K, for up to VECS * kRowsPerVec rows.
// queries: [dim / 4][VECS * kRowsPerVec][4].
template <int VECS, int KEYS>
PF_INLINE void score_some_keys(const float* queries, const char* const* keys, long head, long dim,
                               int rows, float* raw, Ahead& ahead) {
  Vec sums[VECS][KEYS];
#pragma GCC unroll 6
  for (int v = 0; v < VECS; v++) {
#pragma GCC unroll 8
    for (int t = 0; t < KEYS; t++) sums[v][t] = zero();
  }
  constexpr long kStep = 16;
  for (long i = 0; i < dim; i += kStep) {
    ahead.fetch(KEYS * kStep * 4);
    long left = min_of(kStep, dim - i);
    Vec q[kStep / 4][VECS];
#pragma GCC unroll 4
    for (long j = 0; j < kStep; j += 4) {
      if (j >= left) break;
#pragma GCC unroll 6
      for (int v = 0; v < VECS; v++) q[j / 4][v] = load(queries + (j / 4 * VECS + v) * kWidth);
    }
    queries += kStep / 4 * VECS * kWidth;
#pragma GCC unroll 8
    for (int t = 0; t < KEYS; t++) {
      const float* key = (const float*)(keys[t] + head) + i;
#pragma GCC unroll 4
      for (long j = 0; j < kStep; j += 4) {
        if (j >= left) break;
        Vec quad = load_quad(key + j);
#pragma GCC unroll 6
        for (int v = 0; v < VECS; v++) sums[v][t] = fma(q[j / 4][v], quad, sums[v][t]);
      }
    }
  }
#pragma GCC unroll 6
  for (int v = 0; v < VECS; v++) {
#pragma GCC unroll 2
    for (int t = 0; t < KEYS; t += 4) {
      Vec chains[kChains];
      turn_quads(sums[v] + t, chains);
      Vec total = add(add(add(chains[0], chains[1]), chains[2]), chains[3]);
      store_quads(raw + v * kRowsPerVec * kStrands + t, kStrands, total, rows - v * kRowsPerVec);
    }
  }
}

template <int VECS>
static void score_keys_of(const float* queries, const char* const* keys, long head, long dim,
                          int rows, float* raw, Ahead& shared_ahead) {
  // As many sums as the registers hold.
  constexpr int kKeys = VECS * kStrands <= 2 * kMaxRows ? kStrands : 4;
  Ahead ahead = shared_ahead;
  for (long t = 0; t < kStrands; t += kKeys) {
    score_some_keys<VECS, kKeys>(queries, keys + t, head, dim, rows, raw + t, ahead);
  }
  shared_ahead = ahead;
}

template <typename T>
constexpr long keys_at_once() {
  return sizeof(T) == 4 ? kStrands : kWidth;
}

// The same for kWidth keys of bfloat16, turned as they are read. queries: [dim][ROWS]; dim in whole
// quads of 32-bit words, which hold two elements.
template <int ROWS>
static void score_narrow_keys_of(const float* queries, const char* const* keys, long head, long dim,
                                 RawScores raw, long first, Ahead& shared_ahead) {
  Ahead ahead = shared_ahead;
  const float* words[kWidth];
  for (int t = 0; t < kWidth; t++) words[t] = (const float*)(keys[t] + head);
  Vec sums[ROWS][1];
#pragma GCC unroll 12
  for (int m = 0; m < ROWS; m++) sums[m][0] = zero();
  for (long i = 0; i < dim / 2; i += 4) {
    ahead.fetch(kWidth * 16);
    Vec quad[4];
    load_turned(words, i, quad);
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
      Vec even[1] = {even_of(quad[c])}, odd[1] = {odd_of(quad[c])};
      multiply_add<ROWS, 1>(sums, queries + 2 * (i + c) * ROWS, even);
      multiply_add<ROWS, 1>(sums, queries + (2 * (i + c) + 1) * ROWS, odd);
    }
  }
  float lanes[kWidth];
#pragma GCC unroll 12
  for (int m = 0; m < ROWS; m++) {
    store(lanes, sums[m][0]);
    for (long t = 0; t < kWidth; t += kStrands) {
      memcpy(raw.of(first + t) + m * kStrands, lanes + t, kStrands * sizeof(float));
    }
  }
  shared_ahead = ahead;
}

// Of the i-th token in the order of reading and those after it: keys_at_once<T>() of them.
template <typename T>
PF_INLINE void score_keys(const float* queries, const char* const* keys, long head, long dim,
                          RawScores raw, long i, Ahead& ahead) {
  if constexpr (sizeof(T) == 4) {
    using ScoreKeys = void (*)(const float*, const char* const*, long, long, int, float*, Ahead&);
    static const ScoreKeys kernels[] = {score_keys_of<1>, score_keys_of<2>, score_keys_of<3>};
    kernels[(raw.rows - 1) / kRowsPerVec](queries, keys, head, dim, (int)raw.rows, raw.of(i), ahead);
  } else {
    using ScoreKeys =
        void (*)(const float*, const char* const*, long, long, RawScores, long, Ahead&);
    static const ScoreKeys kernels[] = {
        score_narrow_keys_of<1>,  score_narrow_keys_of<2>,  score_narrow_keys_of<3>,
        score_narrow_keys_of<4>,
#if defined(__AVX2__)
        score_narrow_keys_of<5>,  score_narrow_keys_of<6>,
#endif
#if defined(__AVX512F__)
        score_narrow_keys_of<7>,  score_narrow_keys_of<8>,  score_narrow_keys_of<9>,
        score_narrow_keys_of<10>, score_narrow_keys_of<11>, score_narrow_keys_of<12>,
#endif
    };
    kernels[raw.rows - 1](queries, keys, head, dim, raw, i, ahead);
  }
}

// scores[m][kTile], by token, from how they were computed.
static void place_scores(RawScores raw, TokenOrder order, float* scores) {
  static_assert(kStrandTokens % kWidth == 0, "a strand is turned in whole vectors");
  if (order.count < kTile) {
    for (long i = 0; i < order.count; i++) {
      for (long m = 0; m < raw.rows; m++) {
        scores[m * kTile + order.tokens[i]] = raw.of(i)[m * kStrands];
      }
    }
    return;
  }
  Vec tile[kWidth];
  for (long slot = 0; slot < kStrandTokens; slot += kWidth) {
    for (long column = 0; column < raw.rows * kStrands; column += kWidth) {
      for (long j = 0; j < kWidth; j++) tile[j] = load(raw.of((slot + j) * kStrands) + column);
      transpose(tile);
      for (long j = 0; j < min_of(kWidth, raw.rows * kStrands - column); j++) {
        long m = (column + j) / kStrands, strand = (column + j) % kStrands;
        store(scores + m * kTile + strand * kStrandTokens + slot, tile[j]);
      }
    }
  }
}

// value[m][0..VECS vectors) = value * decay[m] + sum over the tokens t, in their order, of
// weights[m][t] * what is `at` bytes into its row. rows: in the order of the tokens.
template <int ROWS, int VECS, typename T, typename A>
static void add_values(const float* weights, const char* const* rows, long at, TokenOrder order,
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
  for (long i = 0; i < order.count; i++) {
    long t = order.tokens[i];
    const T* row = (const T*)(rows[i] + at);
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
using AddValues = void (*)(const float*, const char* const*, long, TokenOrder, const float*, float*,
                           long, A&);

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
static void add_all_values(int num_rows, const float* weights, const char* const* rows, long at,
                           TokenOrder order, const float* decay, float* value, long width,
                           A& ahead) {
  for (long i = 0; i < width;) {
    long vectors = (width - i) / kWidth;
    int taken = vectors >= 4 && num_rows * 4 <= kMaxRows * 2 ? 4 : vectors >= 2 ? 2 : 1;
    AddValues<T, A> kernel = taken == 4   ? add_values_for<4, T, A>(num_rows)
                             : taken == 2 ? add_values_for<2, T, A>(num_rows)
                                          : add_values_for<1, T, A>(num_rows);
    kernel(weights, rows, at + i * (long)sizeof(T), order, decay, value + i, width, ahead);
    i += taken * kWidth;
  }
}

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
