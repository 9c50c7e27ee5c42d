// Linear layers over packed weights: one packed copy serves one row (memory-bound) and a thousand.

#include <omp.h>

#include "kernels.h"
#include "micro.h"
#include "packed_weight.h"
#if defined(__AMX_BF16__)
#include "tile_product.h"
#endif

namespace pagefleet {
namespace PF_ISA {

constexpr long kRowsPerBlock = 20 * kMaxRows;  // rows that share one pass over a weight panel
constexpr long kDepth = 256;                   // of k in one chain of sums; a panel part fits in L1
constexpr long kSerialInputs = 8192;           // inputs below which threads do not pay
constexpr long kWideGroups = 6;                // groups from which narrow weights are widened first

// How a group's inputs are laid out for the kernel, and the kernel itself.
template <typename T, typename W>
struct Inputs {
  static constexpr bool kWidens = sizeof(W) == 1 || Layout<W>::kPaired;  // narrower than float
  static long words(long depth) { return depth; }

  // `count` of the k inputs of some rows, filled up with zeros to `depth`.
  static void interleave(const T* x, int rows, long k, long count, long depth, float* target) {
    interleave_rows(x, k, rows, count, target);
    for (long i = count * rows; i < depth * rows; i++) target[i] = 0;
  }
  static void multiply(int rows, const float* a, const W* panel, long depth, float* sums,
                       bool is_added, Fetch fetch) {
    panel_product_for<W>(rows)(a, panel, depth, sums, kPanel, is_added, fetch);
  }
};

#if defined(__AVX512BF16__)
// bfloat16 on both sides: products of pairs, with no conversion at all.
template <>
struct Inputs<bf16, uint32_t> {
  static constexpr bool kWidens = false;
  static long words(long depth) { return depth / 2; }

  static void interleave(const bf16* x, int rows, long k, long count, long depth, float* target) {
    if (k % 2 == 0) {
      interleave_rows((const float*)x, k / 2, rows, count / 2, target);
      return;
    }
    for (int m = 0; m < rows; m++) {
      for (long i = 0; i < depth; i += 2) {
        uint32_t high = i + 1 < count ? x[m * k + i + 1].bits : 0;
        uint32_t word = high << 16 | x[m * k + i].bits;
        memcpy(target + i / 2 * rows + m, &word, 4);
      }
    }
  }
  static void multiply(int rows, const float* a, const uint32_t* panel, long depth, float* sums,
                       bool is_added, Fetch fetch) {
    panel_dot_for(rows)((const uint32_t*)a, panel, depth / 2, sums, kPanel, is_added, fetch);
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

  // From the `from`-th of a group's inputs on.
  float* inputs_of(const RowGroups& groups, long g, long from) const {
    return inputs + groups.begin(g) * Inputs<T, W>::words(depth) +
           groups.size(g) * Inputs<T, W>::words(from);
  }

  // A piece of kDepth inputs of a group.
  void interleave_piece(const RowGroups& groups, long task) const {
    long pieces = ceil_div(depth, kDepth), g = task / pieces, from = task % pieces * kDepth;
    Inputs<T, W>::interleave(x + groups.begin(g) * k + from, groups.size(g), k,
                             min_of(kDepth, k - from), min_of(kDepth, depth - from),
                             inputs_of(groups, g, from));
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

  // What the g-th of `count` groups fetches while it multiplies by a part of a panel: a little ahead
  // of itself if it is alone, else its share of the part that follows.
  static Fetch fetch_for(const W* part, long length, long g, long count, bool widened) {
    constexpr long kStepBytes = kPanel * (long)sizeof(W);
    if (count == 1) return {(const char*)part + kPrefetchBytes, kStepBytes};
    long bytes = Layout<W>::offset(length) * (long)sizeof(W);
    long steps = widened ? length : bytes / kStepBytes;
    return {(const char*)part + bytes + g * bytes / count, ceil_div(bytes, count * steps)};
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
        if (from + length == depth) fetch_output<T>(args, groups.begin(g), count, panel);
        Fetch fetch = fetch_for(part, length, g - group_begin, group_end - group_begin, widened);
        const float* a = inputs_of(groups, g, from);
        float* target = sums + (groups.begin(g) - first_row) * kPanel;
        float chain[kMaxRows * kPanel];  // to be scaled before it is added
        float* result = args.group > 0 ? chain : target;
        bool is_added = args.group == 0 && from > 0;
        if (widened) {
          panel_product_for<float>(count)(a, wide, length, result, kPanel, is_added, fetch);
        } else {
          Inputs<T, W>::multiply(count, a, part, length, result, is_added, fetch);
        }
        if (args.group > 0) {
          add_scaled(chain, groups.begin(g), count, from, panel, from == 0, target);
        }
      }
    }
    write_panel<T>(args, first_row, groups.begin(group_end) - first_row, panel, sums);
  }

  void run() {
    static thread_local Scratch input_scratch;
    RowGroups groups(rows);
    long num_totals = args.group > 0 ? rows * ceil_div(k, chunk) : 0;
    inputs = input_scratch.floats((size_t)(rows * depth + num_totals));
    totals = inputs + rows * depth;
    if (args.zero) add_inputs();
    long panels = ceil_div(n, kPanel);
    long groups_per_block = min_of(groups.count, kRowsPerBlock / kMaxRows);
    long blocks = ceil_div(groups.count, groups_per_block);
    bool parallel = args.threads > 1 && (double)rows * n * k > kSerialWork;
    bool parallel_inputs = parallel && rows * k > kSerialInputs;
    long pieces = groups.count * ceil_div(depth, kDepth);
    if (!parallel_inputs) {
      for (long i = 0; i < pieces; i++) interleave_piece(groups, i);
    }
#pragma omp parallel num_threads(args.threads) if (parallel)
    {
      static thread_local Scratch sums_scratch;
      long sums_size = groups_per_block * kMaxRows * kPanel;
      long wide_size = Inputs<T, W>::kWidens ? min_of(depth, max_of(chunk, kDepth)) * kPanel : 0;
      float* sums = sums_scratch.floats((size_t)(sums_size + wide_size));
      if (parallel_inputs) {
#pragma omp for schedule(dynamic, 1)
        for (long i = 0; i < pieces; i++) interleave_piece(groups, i);
      }
#pragma omp for schedule(guided, 1) nowait  // neighbours, as a panel fetches the next one's begin
      for (long task = 0; task < panels * blocks; task++) {
        long block = task / panels, panel = task % panels;
        long begin = block * groups.count / blocks, end = (block + 1) * groups.count / blocks;
        multiply_panel(groups, begin, end, panel, sums, sums + sums_size);
      }
    }
  }
};

// Over bfloat16 weights.
#if defined(__AMX_BF16__)
static void run_pairs(const LinearArgs& args, float) {
  if (args.is_exact) {
    TileProduct<float, 3>(args).run();
  } else {
    TileProduct<float, 2>(args).run();
  }
}
static void run_pairs(const LinearArgs& args, bf16) { TileProduct<bf16, 1>(args).run(); }
#else
template <typename T>
static void run_pairs(const LinearArgs& args, T) {
  Product<T, uint32_t>(args).run();
}
#endif

template <typename T>
static void linear_for(const LinearArgs& args) {
  if (args.packed_dtype == kFloat32) {
    Product<T, float>(args).run();
  } else if (args.packed_dtype == kBFloat16) {
    run_pairs(args, T{});
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
