// Causal attention over the paged cache, for decode and prefill alike.
//
// A task is some query tokens of one sequence, times the query heads that share a KV head (its
// rows), against a range of the context. The context is cut into tiles of kTile tokens, and tiles
// into splits of kSplit, always at the same positions: inside a split the softmax runs online from
// tile to tile, then splits are merged in order. A row's result is therefore the same bit for bit
// whether its token was decoded alone or came in any chunk of a prompt, and on any number of threads.
//
//     context:  |<------------ split ----------->|<------------ split ----------->|<-- ...
//               | tile  | tile  | tile  | tile   | tile ...
//
// Long contexts of few query tokens are spread over the threads by split and merged at the end.

#include <math.h>
#include <omp.h>

#include "kernels.h"
#include "micro.h"

namespace pagefleet {
namespace PF_ISA {

constexpr long kTile = 128;
constexpr long kSplit = 4 * kTile;
constexpr long kRowsPerTask = 240;     // query rows that share one pass over K and V
constexpr long kPrefetchRows = 24;     // K or V rows ahead, when each is read only once
constexpr double kSerialReads = 65536;  // of K and V below which threads do not pay
constexpr float kLowest = -3.0e38f;

struct Task {
  long sequence;
  long query_begin, query_end;  // tokens of the flat batch
  long head_begin, head_end;    // KV heads
  long split_begin, split_end;
  float* partial;               // where a single split leaves its state; null: write the output
};

// Running softmax of some rows: the largest score, the sum of weights, the weighted sum of V.
struct State {
  float *largest, *sum, *value;

  static long size(long rows, long width) { return rows * (width + 2); }
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

// value[m][0..VECS vectors) = value * decay[m] + sum over t of weights[m][t] * rows(t).
template <int ROWS, int VECS, typename T, bool PREFETCH>
static void add_values(const float* weights, const T* base, const int64_t* offsets, long count,
                       const float* decay, float* value, long width) {
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
    if (PREFETCH) {
      const char* ahead = (const char*)(base + offsets[t + kPrefetchRows]);
      for (int at = 0; at < VECS * kWidth * (int)sizeof(T); at += 64) prefetch(ahead + at);
    }
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
}

template <typename T>
using AddValues = void (*)(const float*, const T*, const int64_t*, long, const float*, float*, long);

template <typename T, int VECS, bool PREFETCH>
static AddValues<T> add_values_for(int rows) {
  static const AddValues<T> kernels[] = {
      add_values<1, VECS, T, PREFETCH>,  add_values<2, VECS, T, PREFETCH>,
      add_values<3, VECS, T, PREFETCH>,  add_values<4, VECS, T, PREFETCH>,
#if defined(__AVX2__)
      add_values<5, VECS, T, PREFETCH>,  add_values<6, VECS, T, PREFETCH>,
#endif
#if defined(__AVX512F__)
      add_values<7, VECS, T, PREFETCH>,  add_values<8, VECS, T, PREFETCH>,
      add_values<9, VECS, T, PREFETCH>,  add_values<10, VECS, T, PREFETCH>,
      add_values<11, VECS, T, PREFETCH>, add_values<12, VECS, T, PREFETCH>,
#endif
  };
  return kernels[rows - 1];
}

// Vectors of V to hold at once for a number of rows: as many as the registers take.
PF_INLINE bool takes_four(int rows) { return rows * 4 <= kMaxRows * 2; }

template <typename T, bool PREFETCH>
static void add_all_values(int rows, const float* weights, const T* base, const int64_t* offsets,
                           long count, const float* decay, float* value, long width) {
  for (long i = 0; i < width;) {
    long vectors = (width - i) / kWidth;
    if (vectors >= 4 && takes_four(rows)) {
      add_values_for<T, 4, PREFETCH>(rows)(weights, base + i, offsets, count, decay, value + i, width);
      i += 4 * kWidth;
    } else if (vectors >= 2) {
      add_values_for<T, 2, PREFETCH>(rows)(weights, base + i, offsets, count, decay, value + i, width);
      i += 2 * kWidth;
    } else {
      add_values_for<T, 1, PREFETCH>(rows)(weights, base + i, offsets, count, decay, value + i, width);
      i += kWidth;
    }
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

// The rows of a task, in groups of at most kMaxRows.
struct RowGroups {
  long rows, count;

  explicit RowGroups(long rows) : rows(rows), count(ceil_div(rows, kMaxRows)) {}
  long begin(long g) const { return g * rows / count; }
  int size(long g) const { return (int)(begin(g + 1) - begin(g)); }
};

template <typename T>
struct Attention {
  const AttentionArgs& args;
  const T *q, *kv;
  T* out;
  long group;       // query heads per KV head
  long dim, width;  // width: head_dim rounded up to whole vectors

  explicit Attention(const AttentionArgs& a)
      : args(a), q((const T*)a.q), kv((const T*)a.kv), out((T*)a.out),
        group(a.num_heads / a.num_kv_heads), dim(a.head_dim),
        width(ceil_div(a.head_dim, kWidth) * kWidth) {}

  // Where the rows of a split are, for head 0, in the order of their use: for each tile all of K,
  // then all of V. The list runs on into the next head's rows, so that prefetching looks ahead
  // without a test.
  void find_rows(long sequence, long begin, long count, int64_t* offsets) const {
    const int32_t* table = args.block_tables + sequence * args.table_stride;
    long block = begin / args.block_size, slot = begin % args.block_size;
    int64_t* keys = offsets;
    for (long tile = 0; tile < count; tile += kTile) {
      long length = min_of(kTile, count - tile);
      for (long i = 0; i < length; i++) {
        if (slot == args.block_size) block++, slot = 0;
        keys[i] = (int64_t)table[block] * args.block_stride + slot++ * args.token_stride;
        keys[length + i] = keys[i] + args.value_offset;
      }
      keys += 2 * length;
    }
    int64_t step = args.num_kv_heads > 1 ? args.head_stride : 0;
    for (long i = 0; i < kPrefetchRows; i++) keys[i] = offsets[min_of(i, count - 1)] + step;
  }

  // K of a tile, turned: panels of kPanel tokens, [panel][dim][kPanel]; zeros past `count`.
  void turn_keys(const T* base, const int64_t* offsets, long count, bool once, float* keys) const {
    Vec tile[kWidth];
    for (long t = 0; t < ceil_div(count, kPanel) * kPanel; t += kWidth) {
      float* target = keys + t / kPanel * kPanel * dim + t % kPanel;
      for (long i = 0; i < dim; i += kWidth) {
        long length = min_of(kWidth, dim - i);
        if (t + kWidth <= count && length == kWidth) {
#pragma GCC unroll 16
          for (int j = 0; j < kWidth; j++) {
            if (once) prefetch(base + offsets[t + j + kPrefetchRows] + i);
            tile[j] = load(base + offsets[t + j] + i);
          }
        } else {
          for (long j = 0; j < kWidth; j++) {
            tile[j] = t + j < count ? load_part(base + offsets[t + j] + i, length) : zero();
          }
        }
        transpose(tile);
        for (long j = 0; j < length; j++) store(target + (i + j) * kPanel, tile[j]);
      }
    }
  }

  void gather_values(const T* base, const int64_t* offsets, long count, float* values) const {
    for (long t = 0; t < count; t++) {
      const T* row = base + offsets[t];
      for (long i = 0; i < dim; i += kWidth) {
        long left = dim - i;
        store(values + t * width + i, left >= kWidth ? load(row + i) : load_part(row + i, left));
      }
    }
  }

  // Row r of a task is query token r / group and the query head r % group of the KV head.
  const T* query_row(const Task& task, long head, long r) const {
    return q + ((task.query_begin + r / group) * args.num_heads + head * group + r % group) * dim;
  }

  // Scaled and interleaved for the panel product: [group of rows][dim][rows of the group].
  void gather_queries(const Task& task, long head, const RowGroups& groups, float* queries) const {
    for (long g = 0; g < groups.count; g++) {
      int count = groups.size(g);
      float* target = queries + groups.begin(g) * dim;
      for (int m = 0; m < count; m++) {
        const T* row = query_row(task, head, groups.begin(g) + m);
        for (long i = 0; i < dim; i++) target[i * count + m] = to_float(row[i]) * args.scale;
      }
    }
  }

  void write_row(long token, long head, const float* value, float sum) const {
    T* row = out + (token * args.num_heads + head) * dim;
    Vec inverse = splat(1.0f / sum);
    for (long i = 0; i < dim; i += kWidth) {
      Vec scaled = mul(load(value + i), inverse);
      if (dim - i >= kWidth) {
        store(row + i, scaled);
      } else {
        store_part(row + i, scaled, dim - i);
      }
    }
  }

  void write_output(const Task& task, long head, const State& state) const {
    long rows = (task.query_end - task.query_begin) * group;
    for (long r = 0; r < rows; r++) {
      write_row(task.query_begin + r / group, head * group + r % group, state.value + r * width,
                state.sum[r]);
    }
  }

  // Scores of a group of rows against a turned tile, made into weights; limits[m] is how many
  // tokens of the tile row m may see. Returns how many tokens the group sees.
  long weigh_tile(int rows, const float* queries, const float* keys, const long* limits,
                  const State& state, float* scores, float* decay) const {
    long seen = 0;
    for (int m = 0; m < rows; m++) seen = max_of(seen, limits[m]);
    PanelProduct<float> product = panel_product_for<float>(rows);
    for (long t = 0; t < seen; t += kPanel) {
      product(queries, keys + t * dim, dim, scores + t, kTile, false);
    }
    for (int m = 0; m < rows && seen > 0; m++) {
      float* row = scores + m * kTile;
      float top = largest_of(row, limits[m]);
      if (top < state.largest[m]) top = state.largest[m];
      decay[m] = exp_of(state.largest[m] - top);
      state.sum[m] = state.sum[m] * decay[m] + weigh(row, limits[m], seen, top);
      state.largest[m] = top;
    }
    return seen;
  }

  struct Workspace {
    float *queries, *keys, *values, *scores, *states;
    int64_t *offsets, *steps;
  };

  Workspace workspace_for(long rows, long heads) const {
    static thread_local Scratch scratch, list_scratch;
    long sizes[] = {heads * rows * dim, kTile * dim, kTile * width, kMaxRows * kTile,
                    2 * heads * State::size(rows, width)};
    long total = 0;
    for (long& size : sizes) total += size = ceil_div(size, 16) * 16;
    float* p = scratch.floats((size_t)total);
    Workspace w;
    w.queries = p, p += sizes[0];
    w.keys = p, p += sizes[1];
    w.values = p, p += sizes[2];
    w.scores = p, p += sizes[3];
    w.states = p;
    w.offsets = (int64_t*)list_scratch.bytes((2 * kSplit + kPrefetchRows + kTile) * sizeof(int64_t));
    w.steps = w.offsets + 2 * kSplit + kPrefetchRows;
    for (long t = 0; t < kTile; t++) w.steps[t] = t * width;
    return w;
  }

  // One split of the context for one KV head: `state` runs on over its tiles.
  void attend_split(const Task& task, long head, long begin, long count, const RowGroups& groups,
                    const Workspace& w, const float* queries, const State& state) const {
    const T* base = kv + head * args.head_stride;
    // How many tokens of the context the first query token of the task sees, less one.
    long first_position = args.context_lens[task.sequence] -
                          args.query_starts[task.sequence + 1] + task.query_begin;
    bool once = groups.count == 1;
    bool direct = once && width == dim;  // V is read where it lies; else it is copied first
    const int64_t* offsets = w.offsets;
    for (long tile = 0; tile < count; tile += kTile) {
      long length = min_of(kTile, count - tile);
      turn_keys(base, offsets, length, once, w.keys);
      if (!direct) gather_values(base, offsets + length, length, w.values);
      for (long g = 0; g < groups.count; g++) {
        int rows = groups.size(g);
        long first = groups.begin(g);
        long limits[kMaxRows];
        float decay[kMaxRows];
        for (int m = 0; m < rows; m++) {
          long visible = first_position + (first + m) / group + 1 - (begin + tile);
          limits[m] = max_of(0, min_of(length, visible));
        }
        State part = {state.largest + first, state.sum + first, state.value + first * width};
        long seen = weigh_tile(rows, queries + first * dim, w.keys, limits, part, w.scores, decay);
        if (seen == 0) continue;
        if (direct) {
          add_all_values<T, true>(rows, w.scores, base, offsets + length, seen, decay, part.value,
                                  width);
        } else {
          add_all_values<float, false>(rows, w.scores, w.values, w.steps, seen, decay, part.value,
                                       width);
        }
      }
      offsets += 2 * length;
    }
  }

  void run_task(const Task& task) const {
    long rows = (task.query_end - task.query_begin) * group;
    long heads = task.head_end - task.head_begin;
    long state_size = State::size(rows, width);
    RowGroups groups(rows);
    Workspace w = workspace_for(rows, heads);
    // No row of the task sees anything past its last query token.
    long context = args.context_lens[task.sequence] -
                   (args.query_starts[task.sequence + 1] - task.query_end);
    for (long h = 0; h < heads; h++) {
      gather_queries(task, task.head_begin + h, groups, w.queries + h * rows * dim);
    }
    for (long split = task.split_begin; split < task.split_end; split++) {
      long begin = split * kSplit, count = min_of(kSplit, context - begin);
      find_rows(task.sequence, begin, count, w.offsets);
      for (long h = 0; h < heads; h++) {
        State total(w.states + 2 * h * state_size, rows, width);
        State fresh(w.states + (2 * h + 1) * state_size, rows, width);
        State target = fresh;
        if (task.partial != nullptr) {
          target = State(task.partial + h * state_size, rows, width);
        } else if (split == 0) {
          target = total;
        }
        target.clear(rows, width);
        attend_split(task, task.head_begin + h, begin, count, groups, w, w.queries + h * rows * dim,
                     target);
        if (target.value == fresh.value) total.merge(fresh, rows, width);
        if (task.partial == nullptr && split + 1 == task.split_end) {
          write_output(task, task.head_begin + h, total);
        }
      }
    }
  }

  // Merges the splits of one (sequence, KV head), in the order in which run_task merges them.
  void merge_splits(const Task& task, long head, long splits, float* partials, long stride) const {
    long rows = (task.query_end - task.query_begin) * group;
    State total(partials, rows, width);
    for (long split = 1; split < splits; split++) {
      total.merge(State(partials + split * stride, rows, width), rows, width);
    }
    write_output(task, head, total);
  }

  long queries_per_task() const { return max_of(1, kRowsPerTask / group); }
  long splits_of(long context) const { return ceil_div(context, kSplit); }
  long query_len(long s) const { return args.query_starts[s + 1] - args.query_starts[s]; }
  bool is_short(long s) const { return query_len(s) > 0 && query_len(s) <= queries_per_task(); }

  // A short sequence's splits are tasks of their own; the others go in chunks of query tokens.
  struct Plan {
    long tasks = 0, short_tasks = 0, partial_floats = 0;
    double elements = 0;
  };

  Plan count_tasks(long heads_per_task) const {
    Plan plan;
    long head_tasks = args.num_kv_heads / heads_per_task;
    for (long s = 0; s < args.num_sequences; s++) {
      long context = args.context_lens[s];
      if (query_len(s) == 0) continue;
      plan.elements += 2.0 * (double)context * dim * args.num_kv_heads * query_len(s);
      if (is_short(s)) {
        plan.tasks += splits_of(context) * head_tasks;
        plan.short_tasks += splits_of(context) * head_tasks;
        if (splits_of(context) > 1) {
          plan.partial_floats += splits_of(context) * args.num_kv_heads *
                                 State::size(query_len(s) * group, width);
        }
      } else {
        plan.tasks += ceil_div(query_len(s), queries_per_task()) * args.num_kv_heads;
      }
    }
    return plan;
  }

  long add_short_tasks(long s, long heads_per_task, Task* tasks, float** partials) const {
    long splits = splits_of(args.context_lens[s]), n = 0;
    long state_size = State::size(query_len(s) * group, width);
    for (long split = 0; split < splits; split++) {
      for (long head = 0; head < args.num_kv_heads; head += heads_per_task) {
        float* partial = splits > 1 ? *partials : nullptr;
        tasks[n++] = {s, args.query_starts[s], args.query_starts[s + 1], head,
                      head + heads_per_task, split, split + 1, partial};
        if (splits > 1) *partials += heads_per_task * state_size;
      }
    }
    return n;
  }

  // The last chunk sees the longest context and goes first.
  long add_chunk_tasks(long s, Task* tasks) const {
    long step = queries_per_task(), n = 0;
    long prefix = args.context_lens[s] - query_len(s);
    for (long chunk = ceil_div(query_len(s), step) - 1; chunk >= 0; chunk--) {
      long begin = chunk * step, end = min_of(begin + step, query_len(s));
      for (long head = 0; head < args.num_kv_heads; head++) {
        tasks[n++] = {s, args.query_starts[s] + begin, args.query_starts[s] + end, head, head + 1, 0,
                      splits_of(prefix + end), nullptr};
      }
    }
    return n;
  }

  void merge_sequence(long s, float* partials) const {
    long splits = splits_of(args.context_lens[s]);
    long state_size = State::size(query_len(s) * group, width);
    Task task = {s, args.query_starts[s], args.query_starts[s + 1], 0, 0, 0, splits, nullptr};
    for (long head = 0; head < args.num_kv_heads; head++) {
      merge_splits(task, head, splits, partials + head * state_size,
                   args.num_kv_heads * state_size);
    }
  }

  void merge_sequences(float* partials) const {
    for (long s = 0; s < args.num_sequences; s++) {
      long splits = splits_of(args.context_lens[s]);
      if (!is_short(s) || splits < 2) continue;
      merge_sequence(s, partials);
      partials += splits * args.num_kv_heads * State::size(query_len(s) * group, width);
    }
  }

  void run() const {
    static thread_local Scratch task_scratch, partial_scratch;
    // All heads in one task read whole blocks in order; one head each when there are few tasks.
    long heads_per_task = args.num_kv_heads;
    Plan plan = count_tasks(heads_per_task);
    if (args.threads > 1 && plan.short_tasks < 4 * args.threads) {
      heads_per_task = 1;
      plan = count_tasks(heads_per_task);
    }
    bool parallel = args.threads > 1 && plan.elements > kSerialReads && plan.tasks > 1;
    Task* tasks = (Task*)task_scratch.bytes((size_t)plan.tasks * sizeof(Task));
    float* partials = partial_scratch.floats((size_t)plan.partial_floats);
    float* next_partial = partials;
    long n = 0;
    for (long s = 0; s < args.num_sequences; s++) {
      if (query_len(s) > 0 && !is_short(s)) n += add_chunk_tasks(s, tasks + n);
    }
    for (long s = 0; s < args.num_sequences; s++) {
      if (is_short(s)) n += add_short_tasks(s, heads_per_task, tasks + n, &next_partial);
    }
#pragma omp parallel for num_threads(args.threads) schedule(dynamic, 1) if (parallel)
    for (long i = 0; i < n; i++) run_task(tasks[i]);
    if (plan.partial_floats > 0) merge_sequences(partials);
  }
};

static void attention(const AttentionArgs* args) {
  if (args->dtype == kFloat32) {
    Attention<float>(*args).run();
  } else {
    Attention<bf16>(*args).run();
  }
}

}  // namespace PF_ISA
}  // namespace pagefleet
