// Linear layers over packed weights: one packed copy serves one row (memory-bound) and a thousand.
//
// Packed layout: panels of kPanel output columns, each k-major, so that every product reads its
// weights as one stream:
//   float32   [panel][in][kPanel]            float
//   bfloat16  [panel][ceil(in / 2)][kPanel]  pairs of bfloat16 in 32-bit words
//   int8      [panel][in][kPanel]            int8, one float32 scale per output column, or
//             one scale and one zero point for each group of inputs: [panel][group][kPanel]
//   int4      [panel][ceil(in / 8)][kPanel]  eight signed nibbles in 32-bit words, by groups
// The last panel is filled with zeros.

#include <math.h>
#include <omp.h>

#include "kernels.h"
#include "micro.h"

namespace pagefleet {
namespace PF_ISA {

constexpr long kRowsPerBlock = 20 * kMaxRows;  // rows that share one pass over a weight panel
constexpr long kDepth = 256;                   // of k in one chain of sums; a panel part fits in L1
constexpr long kWideGroups = 6;                // groups from which narrow weights are widened first
constexpr double kSerialWork = 3e5;            // multiply-adds below which threads do not pay

template <typename W>
struct Layout {  // float and int8: one element of a column after the other
  static constexpr bool kPaired = false;
  static long depth(long k) { return k; }
  static long offset(long k) { return k * kPanel; }
};
template <>
struct Layout<uint32_t> {  // bfloat16: pairs; an odd k is filled up with a zero
  static constexpr bool kPaired = true;
  static long depth(long k) { return (k + 1) / 2 * 2; }
  static long offset(long k) { return k / 2 * kPanel; }
};

template <>
struct Layout<nibbles> {  // eight of k in a word
  static constexpr bool kPaired = true;
  static long depth(long k) { return ceil_div(k, 8) * 8; }
  static long offset(long k) { return k / 8 * kPanel; }
};

template <typename W>
static long panel_size(long k) {
  return Layout<W>::offset(Layout<W>::depth(k));
}

static int64_t packed_bytes(int64_t n, int64_t k, int32_t dtype) {
  long panels = ceil_div(n, kPanel);
  if (dtype == kFloat32) return panels * panel_size<float>(k) * 4;
  if (dtype == kBFloat16) return panels * panel_size<uint32_t>(k) * 4;
  if (dtype == kInt4) return panels * panel_size<nibbles>(k) * 4;
  return panels * panel_size<int8_t>(k);
}

template <typename T>
static void pack_panel(const T* rows, long count, long k, float* panel) {
  for (long i = 0; i < k; i++) {
    for (long j = 0; j < kPanel; j++) panel[i * kPanel + j] = j < count ? to_float(rows[j * k + i]) : 0;
  }
}

template <typename T>
static void pack_panel(const T* rows, long count, long k, uint32_t* panel) {
  for (long i = 0; i < k; i += 2) {
    for (long j = 0; j < kPanel; j++) {
      bf16 low = {0}, high = {0};
      if (j < count) from_float(to_float(rows[j * k + i]), &low);
      if (j < count && i + 1 < k) from_float(to_float(rows[j * k + i + 1]), &high);
      panel[i / 2 * kPanel + j] = (uint32_t)high.bits << 16 | low.bits;
    }
  }
}

template <typename T>
static void pack_panel_int8(const T* rows, long count, long k, int8_t* panel, float* scale) {
  memset(panel, 0, (size_t)(k * kPanel));
  for (long j = 0; j < count; j++) {
    float largest = 0;
    for (long i = 0; i < k; i++) largest = fmaxf(largest, fabsf(to_float(rows[j * k + i])));
    scale[j] = largest / 127.0f;
    float inverse = largest > 0 ? 127.0f / largest : 0.0f;
    for (long i = 0; i < k; i++) {
      panel[i * kPanel + j] = (int8_t)lrintf(to_float(rows[j * k + i]) * inverse);
    }
  }
}

template <typename T>
static void pack_all(const PackArgs& args) {
  const T* weight = (const T*)args.weight;
  long n = args.out_features, k = args.in_features;
  long panels = ceil_div(n, kPanel);
#pragma omp parallel for num_threads(args.threads) schedule(static) if (args.threads > 1)
  for (long p = 0; p < panels; p++) {
    const T* rows = weight + p * kPanel * k;
    long count = min_of(kPanel, n - p * kPanel);
    if (args.packed_dtype == kFloat32) {
      pack_panel(rows, count, k, (float*)args.packed + p * panel_size<float>(k));
    } else if (args.packed_dtype == kBFloat16) {
      pack_panel(rows, count, k, (uint32_t*)args.packed + p * panel_size<uint32_t>(k));
    } else {
      pack_panel_int8(rows, count, k, (int8_t*)args.packed + p * panel_size<int8_t>(k),
                      args.scale + p * kPanel);
    }
  }
}

static void pack_linear(const PackArgs* args) {
  if (args->weight_dtype == kFloat32) {
    pack_all<float>(*args);
  } else {
    pack_all<bf16>(*args);
  }
}

static void put_code(int8_t* panel, long i, long column, uint8_t code) {
  panel[i * kPanel + column] = (int8_t)(code - 128);
}

static void put_code(nibbles* panel, long i, long column, uint8_t code) {
  panel[i / 8 * kPanel + column].word |= (uint32_t)((code - 8) & 15) << (i % 8 * 4);
}

// Codes are stored less the middle of their range, and so are zero points: both are small then.
template <typename W>
static void pack_all_codes(const CodesArgs& args, float middle) {
  long n = args.out_features, k = args.in_features;
  long panels = ceil_div(n, kPanel), groups = ceil_div(k, args.group);
  memset(args.packed, 0, (size_t)(panels * panel_size<W>(k)) * sizeof(W));
  memset(args.packed_scale, 0, (size_t)(panels * groups * kPanel) * sizeof(float));
  memset(args.packed_zero, 0, (size_t)(panels * groups * kPanel) * sizeof(float));
#pragma omp parallel for num_threads(args.threads) schedule(static) if (args.threads > 1)
  for (long p = 0; p < panels; p++) {
    W* panel = (W*)args.packed + p * panel_size<W>(k);
    for (long j = 0; j < min_of(kPanel, n - p * kPanel); j++) {
      long row = p * kPanel + j;
      for (long i = 0; i < k; i++) put_code(panel, i, j, args.codes[row * k + i]);
      for (long g = 0; g < groups; g++) {
        args.packed_scale[(p * groups + g) * kPanel + j] = args.scale[row * groups + g];
        args.packed_zero[(p * groups + g) * kPanel + j] = args.zero[row * groups + g] - middle;
      }
    }
  }
}

static void pack_codes(const CodesArgs* args) {
  if (args->packed_dtype == kInt8) {
    pack_all_codes<int8_t>(*args, 128);
  } else {
    pack_all_codes<nibbles>(*args, 8);
  }
}

template <typename T>
static void unpack_row(const float* panel, float, long column, long k, T* out) {
  for (long i = 0; i < k; i++) from_float(panel[i * kPanel + column], out + i);
}

template <typename T>
static void unpack_row(const uint32_t* panel, float, long column, long k, T* out) {
  for (long i = 0; i < k; i++) {
    uint32_t word = panel[i / 2 * kPanel + column];
    from_float(bits_to_float(i % 2 ? word & 0xffff0000u : word << 16), out + i);
  }
}

template <typename T>
static void unpack_row(const int8_t* panel, float scale, long column, long k, T* out) {
  for (long i = 0; i < k; i++) from_float(to_float(panel[i * kPanel + column]) * scale, out + i);
}

template <typename T, typename W>
static void unpack_rows_of(const W* packed, const float* scale, long k, const int64_t* rows,
                           long num_rows, T* out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && num_rows > 8)
  for (long r = 0; r < num_rows; r++) {
    const W* panel = packed + rows[r] / kPanel * panel_size<W>(k);
    unpack_row(panel, scale != nullptr ? scale[rows[r]] : 1.0f, rows[r] % kPanel, k, out + r * k);
  }
}

template <typename T>
static void unpack_rows_as(const void* packed, const float* scale, long k, int32_t dtype,
                           const int64_t* rows, long num_rows, T* out, int threads) {
  if (dtype == kFloat32) {
    unpack_rows_of((const float*)packed, scale, k, rows, num_rows, out, threads);
  } else if (dtype == kBFloat16) {
    unpack_rows_of((const uint32_t*)packed, scale, k, rows, num_rows, out, threads);
  } else {
    unpack_rows_of((const int8_t*)packed, scale, k, rows, num_rows, out, threads);
  }
}

// Rows of the original weight, for an embedding that shares its table with the output layer.
static void unpack_rows(const void* packed, const float* scale, int64_t k, int32_t dtype,
                        const int64_t* rows, int64_t num_rows, void* out, int32_t out_dtype,
                        int32_t threads) {
  if (out_dtype == kFloat32) {
    unpack_rows_as(packed, scale, k, dtype, rows, num_rows, (float*)out, threads);
  } else {
    unpack_rows_as(packed, scale, k, dtype, rows, num_rows, (bf16*)out, threads);
  }
}

// How a group's inputs are laid out for the kernel, and the kernel itself.
template <typename T, typename W>
struct Inputs {
  static constexpr bool kWidens = sizeof(W) == 1 || Layout<W>::kPaired;  // narrower than float
  static long words(long depth) { return depth; }

  static void interleave(const T* x, int rows, long k, long depth, float* target) {
    interleave_rows(x, k, rows, k, target);
    for (long i = k * rows; i < depth * rows; i++) target[i] = 0;
  }
  static void multiply(int rows, const float* a, const W* panel, long depth, float* sums) {
    panel_product_for<W>(rows)(a, panel, depth, sums, kPanel, false);
  }
};

#if defined(__AVX512BF16__)
// bfloat16 on both sides: products of pairs, with no conversion at all.
template <>
struct Inputs<bf16, uint32_t> {
  static constexpr bool kWidens = false;
  static long words(long depth) { return depth / 2; }

  static void interleave(const bf16* x, int rows, long k, long depth, float* target) {
    if (k % 2 == 0) {
      interleave_rows((const float*)x, k / 2, rows, k / 2, target);
      return;
    }
    for (int m = 0; m < rows; m++) {
      for (long i = 0; i < depth; i += 2) {
        uint32_t high = i + 1 < k ? x[m * k + i + 1].bits : 0;
        uint32_t word = high << 16 | x[m * k + i].bits;
        memcpy(target + i / 2 * rows + m, &word, 4);
      }
    }
  }
  static void multiply(int rows, const float* a, const uint32_t* panel, long depth, float* sums) {
    panel_dot_for(rows)((const uint32_t*)a, panel, depth / 2, sums, kPanel);
  }
};
#endif

template <typename T, typename W>
struct Product {
  const LinearArgs& args;
  const T* x;
  const W* packed;
  T* out;
  long rows, n, k, depth;
  long chunk;     // of k in one chain of sums
  float* inputs;  // groups of rows, interleaved: [group][depth][rows of the group]
  float* totals;  // of a row's inputs over each chunk: [chunk][rows]; by groups only

  explicit Product(const LinearArgs& a)
      : args(a), x((const T*)a.x), packed((const W*)a.packed), out((T*)a.out), rows(a.rows),
        n(a.out_features), k(a.in_features), depth(Layout<W>::depth(k)), chunk(chunk_of(a)),
        inputs(nullptr), totals(nullptr) {}

  // By groups: a part of a group, as large as a chain may be, in whole words.
  static long chunk_of(const LinearArgs& a) {
    if (a.group == 0) return kDepth;
    long parts = ceil_div(a.group, kDepth);
    while (a.group % parts != 0 || a.group / parts % 8 != 0) parts++;
    return a.group / parts;
  }

  // Interleaving writes up to a vector past a group's end, hence the room between groups.
  float* inputs_of(const RowGroups& groups, long g) const {
    return inputs + groups.begin(g) * Inputs<T, W>::words(depth) + g * kWidth;
  }

  void interleave_group(const RowGroups& groups, long g) const {
    Inputs<T, W>::interleave(x + groups.begin(g) * k, groups.size(g), k, depth,
                             inputs_of(groups, g));
  }

  void write_rows(long first_row, long count, long panel, const float* sums) const {
    long column = panel * kPanel;
    long width = min_of(kPanel, n - column);
    for (long m = 0; m < count; m++) {
      T* target = out + (first_row + m) * n + column;
      for (long v = 0; v < width; v += kWidth) {
        Vec value = load(sums + m * kPanel + v);
        long left = width - v;
        if (args.scale && !args.group) value = mul(value, load_part_or_all(args.scale + column + v, left));
        if (args.bias) value = add(value, load_part_or_all(args.bias + column + v, left));
        if (left >= kWidth) {
          store(target + v, value);
        } else {
          store_part(target + v, value, left);
        }
      }
    }
  }

  static void add_sums(const float* chain, int count, float* target) {
    for (long i = 0; i < count * kPanel; i += kWidth) {
      store(target + i, add(load(target + i), load(chain + i)));
    }
  }

  // sums (+)= scale * (chain - zero * sum of inputs), for `count` rows of a chunk that is part of
  // group `at`.
  void add_scaled(const float* chain, long first_row, int count, long from, long panel,
                  bool is_first, float* sums) const {
    long groups = ceil_div(k, args.group);
    const float* scale = args.scale + (panel * groups + from / args.group) * kPanel;
    const float* zero_point = args.zero + (panel * groups + from / args.group) * kPanel;
    const float* total = totals + from / chunk * rows + first_row;
    for (long m = 0; m < count; m++) {
      for (long v = 0; v < kPanel; v += kWidth) {
        Vec value = load(chain + m * kPanel + v);
        if (args.zero) value = fnma(load(zero_point + v), splat(total[m]), value);
        float* target = sums + m * kPanel + v;
        value = mul(value, load(scale + v));
        store(target, is_first ? value : add(load(target), value));
      }
    }
  }

  // In one order for every row.
  void add_inputs() const {
    for (long c = 0; c * chunk < k; c++) {
      for (long r = 0; r < rows; r++) {
        const T* part = x + r * k + c * chunk;
        long length = min_of(chunk, k - c * chunk);
        Vec sum = zero();
        for (long i = 0; i < length; i += kWidth) {
          sum = add(sum, length - i >= kWidth ? load(part + i) : load_part(part + i, length - i));
        }
        totals[c * rows + r] = sum_of(sum);
      }
    }
  }

  static Vec load_part_or_all(const float* p, long left) {
    return left >= kWidth ? load(p) : load_part(p, left);
  }

  // One panel of columns for one block of row groups. Long sums are sums of chains of kDepth: a
  // chain's rounding error grows with its length, and the same cuts for all keep rows alike.
  void multiply_panel(const RowGroups& groups, long group_begin, long group_end, long panel,
                      float* sums, float* wide) const {
    const W* weights = packed + panel * panel_size<W>(k);
    long first_row = groups.begin(group_begin);
    for (long from = 0; from < depth; from += chunk) {
      long length = min_of(chunk, depth - from);
      const W* part = weights + Layout<W>::offset(from);
      bool widened = Inputs<T, W>::kWidens && group_end - group_begin >= kWideGroups;
      if constexpr (Inputs<T, W>::kWidens) {
        if (widened) widen_panel(part, length, wide);
      }
      for (long g = group_begin; g < group_end; g++) {
        int count = groups.size(g);
        const float* a = inputs_of(groups, g) + Inputs<T, W>::words(from) * count;
        float* target = sums + (groups.begin(g) - first_row) * kPanel;
        float chain[kMaxRows * kPanel];
        bool is_apart = from > 0 || args.group > 0;
        float* result = is_apart ? chain : target;
        if (widened) {
          panel_product_for<float>(count)(a, wide, length, result, kPanel, false);
        } else {
          Inputs<T, W>::multiply(count, a, part, length, result);
        }
        if (args.group > 0) {
          add_scaled(chain, groups.begin(g), count, from, panel, from == 0, target);
        } else if (is_apart) {
          add_sums(chain, count, target);
        }
      }
    }
    write_rows(first_row, groups.begin(group_end) - first_row, panel, sums);
  }

  void run() {
    static thread_local Scratch input_scratch;
    RowGroups groups(rows);
    long num_totals = args.group > 0 ? rows * ceil_div(k, chunk) : 0;
    inputs = input_scratch.floats((size_t)(rows * depth + groups.count * kWidth + num_totals));
    totals = inputs + rows * depth + groups.count * kWidth;
    if (args.zero) add_inputs();
    long panels = ceil_div(n, kPanel);
    long groups_per_block = min_of(groups.count, kRowsPerBlock / kMaxRows);
    long blocks = ceil_div(groups.count, groups_per_block);
    bool parallel = args.threads > 1 && (double)rows * n * k > kSerialWork;
    bool parallel_inputs = parallel && rows > 64;
    if (!parallel_inputs) {
      for (long g = 0; g < groups.count; g++) interleave_group(groups, g);
    }
#pragma omp parallel num_threads(args.threads) if (parallel)
    {
      static thread_local Scratch sums_scratch;
      long sums_size = groups_per_block * kMaxRows * kPanel;
      long wide_size = Inputs<T, W>::kWidens ? min_of(depth, max_of(chunk, kDepth)) * kPanel : 0;
      float* sums = sums_scratch.floats((size_t)(sums_size + wide_size));
      if (parallel_inputs) {
#pragma omp for schedule(dynamic, 1)
        for (long g = 0; g < groups.count; g++) interleave_group(groups, g);
      }
      long chunk = max_of(1, min_of(16, panels * blocks / (8 * args.threads)));
#pragma omp for schedule(dynamic, chunk) nowait
      for (long task = 0; task < panels * blocks; task++) {
        long block = task / panels, panel = task % panels;
        long begin = block * groups.count / blocks, end = (block + 1) * groups.count / blocks;
        multiply_panel(groups, begin, end, panel, sums, sums + sums_size);
      }
    }
  }
};

template <typename T>
static void linear_for(const LinearArgs& args) {
  if (args.packed_dtype == kFloat32) {
    Product<T, float>(args).run();
  } else if (args.packed_dtype == kBFloat16) {
    Product<T, uint32_t>(args).run();
  } else if (args.packed_dtype == kInt4) {
    Product<T, nibbles>(args).run();
  } else {
    Product<T, int8_t>(args).run();
  }
}

static void linear(const LinearArgs* args) {
  if (args->rows == 0) return;
  if (args->x_dtype == kFloat32) {
    linear_for<float>(*args);
  } else {
    linear_for<bf16>(*args);
  }
}

}  // namespace PF_ISA
}  // namespace pagefleet
