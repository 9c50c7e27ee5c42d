// One task of attention: some query tokens of a sequence and some KV heads, over part of the context.
#pragma once

#include "attention_tile.h"
#include "kernels.h"

namespace pagefleet {
namespace PF_ISA {

constexpr long kSplit = 4 * kTile;
constexpr long kStreamTokens = 32;    // tokens of all heads that are read before the next ones
constexpr long kStreamBytes = 65536;  // as many tokens as that, or half, so that L2 holds them
constexpr long kAheadBytes = 8192;    // fetched ahead beyond the tokens in work
constexpr long kMaxHeads = 64;        // KV heads of one task

struct Task {
  long sequence;
  long query_begin, query_end;  // tokens of the flat batch
  long head_begin, head_end;    // KV heads
  long split_begin, split_end;
  float* partial;  // where the splits leave their states; null: they are merged and written out
};

// Runs tasks; see attention.cpp for what they are.
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

  long query_len(long s) const { return args.query_starts[s + 1] - args.query_starts[s]; }

  // Calls use(first token, count, offset of the first) for each part of begin..begin + count that lies
  // in one block.
  template <typename Use>
  void for_each_part(long sequence, long begin, long count, Use use) const {
    const int32_t* block = args.block_tables + sequence * args.table_stride + begin / args.block_size;
    long slot = begin % args.block_size;
    for (long i = 0; i < count; block++, slot = 0) {
      long length = min_of(args.block_size - slot, count - i);
      use(i, length, (int64_t)*block * args.block_stride + slot * args.token_stride);
      i += length;
    }
  }

  // Where the rows of a split are, for head 0, in the order of their use: for each tile all of K,
  // then all of V.
  void find_rows(long sequence, long begin, long count, int64_t* offsets) const {
    for (long tile = 0; tile < count; tile += kTile, offsets += 2 * kTile) {
      long length = min_of(kTile, count - tile);
      for_each_part(sequence, begin + tile, length, [&](long first, long part, int64_t offset) {
        for (long i = 0; i < part; i++) {
          int64_t key = offset + i * args.token_stride;
          offsets[first + i] = key;
          offsets[length + first + i] = key + args.value_offset;
        }
      });
    }
  }

  // The same as runs of memory: the tokens of a block in one piece if the task has all heads.
  long find_runs(const Task& task, long begin, long count, Run* runs) const {
    const T* base = kv + task.head_begin * args.head_stride;
    long row_bytes = (task.head_end - task.head_begin) * dim * (long)sizeof(T);
    bool whole = task.head_end - task.head_begin == args.num_kv_heads;
    long n = 0;
    for (long tile = 0; tile < count; tile += kTile) {
      const int64_t planes[] = {0, args.value_offset};
      for (int64_t plane : planes) {
        for_each_part(task.sequence, begin + tile, min_of(kTile, count - tile),
                      [&](long, long part, int64_t offset) {
          const T* start = base + offset + plane;
          if (whole) runs[n++] = {(const char*)start, part * row_bytes};
          for (long i = 0; i < part && !whole; i++) {
            runs[n++] = {(const char*)(start + i * args.token_stride), row_bytes};
          }
        });
      }
    }
    return n;
  }

  // K of a tile, turned: panels of kPanel tokens, [panel][dim][kPanel]; zeros past `count`.
  void turn_keys(const T* base, const int64_t* offsets, long count, float* keys) const {
    Vec tile[kWidth];
    for (long t = 0; t < ceil_div(count, kPanel) * kPanel; t += kWidth) {
      float* target = keys + t / kPanel * kPanel * dim + t % kPanel;
      for (long i = 0; i < dim; i += kWidth) {
        long length = min_of(kWidth, dim - i);
        if (t + kWidth <= count && length == kWidth) {
          for (int j = 0; j < kWidth; j++) tile[j] = load(base + offsets[t + j] + i);
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

  // Scores of a group of rows against a tile, made into weights; limits[m] is how many tokens of
  // the tile row m may see, `seen` the largest of them.
  void weigh_rows(int rows, const long* limits, long seen, const State& state, float* scores,
                  float* decay) const {
    for (int m = 0; m < rows; m++) {
      float* row = scores + m * kTile;
      float top = largest_of(row, limits[m]);
      if (top < state.largest[m]) top = state.largest[m];
      decay[m] = exp_of(state.largest[m] - top);
      state.sum[m] = state.sum[m] * decay[m] + weigh(row, limits[m], seen, top);
      state.largest[m] = top;
    }
  }

  // Fills limits for rows first.. of a task against the tile that begins at `tile`.
  long find_limits(const Task& task, long first, int rows, long tile, long length,
                   long* limits) const {
    long position = args.context_lens[task.sequence] - args.query_starts[task.sequence + 1] +
                    task.query_begin;  // of the task's first query token
    long seen = 0;
    for (int m = 0; m < rows; m++) {
      limits[m] = max_of(0, min_of(length, position + (first + m) / group + 1 - tile));
      seen = max_of(seen, limits[m]);
    }
    return seen;
  }

  struct Workspace {
    float *queries, *keys, *values, *scores, *states;
    int64_t *offsets, *steps;
    Run* runs;
  };

  Workspace workspace_for(long rows, long heads) const {
    static thread_local Scratch scratch, list_scratch;
    long sizes[] = {heads * rows * dim, kTile * dim, kTile * width,
                    heads * min_of(rows, kMaxRows) * kTile, 2 * heads * State::size(rows, width)};
    long total = 0;
    for (long& size : sizes) total += size = ceil_div(size, 16) * 16;
    float* p = scratch.floats((size_t)total);
    Workspace w;
    w.queries = p, p += sizes[0];
    w.keys = p, p += sizes[1];
    w.values = p, p += sizes[2];
    w.scores = p, p += sizes[3];
    w.states = p;
    size_t list = 2 * (kSplit + kTile);
    w.offsets = (int64_t*)list_scratch.bytes((list + kTile) * sizeof(int64_t) + list * sizeof(Run));
    w.steps = w.offsets + list;
    w.runs = (Run*)(w.steps + kTile);
    for (long t = 0; t < kTile; t++) w.steps[t] = t * width;
    return w;
  }

  // One split of the context for one KV head and many rows: K and V of a tile are copied once
  // into the layout that suits the products, then used by one group of rows after the other.
  void attend_split(const Task& task, long head, long begin, long count, const RowGroups& groups,
                    const Workspace& w, const float* queries, const State& state) const {
    const T* base = kv + head * args.head_stride;
    const int64_t* offsets = w.offsets;
    NothingAhead nothing_ahead;
    for (long tile = 0; tile < count; tile += kTile) {
      long length = min_of(kTile, count - tile);
      turn_keys(base, offsets, length, w.keys);
      gather_values(base, offsets + length, length, w.values);
      for (long g = 0; g < groups.count; g++) {
        int rows = groups.size(g);
        long first = groups.begin(g);
        long limits[kMaxRows];
        long seen = find_limits(task, first, rows, begin + tile, length, limits);
        if (seen == 0) continue;
        PanelProduct<float> product = panel_product_for<float>(rows);
        for (long t = 0; t < seen; t += kPanel) {
          product(queries + first * dim, w.keys + t * dim, dim, w.scores + t, kTile, false);
        }
        State part = {state.largest + first, state.sum + first, state.value + first * width};
        float decay[kMaxRows];
        weigh_rows(rows, limits, seen, part, w.scores, decay);
        add_all_values<float>(rows, w.scores, w.values, w.steps, seen, decay, part.value, width,
                              nothing_ahead);
      }
      offsets += 2 * length;
    }
  }

  // Whether K and V are read where they lie, once: few rows, and whole vectors.
  bool streams(long rows) const { return rows <= kMaxRows && width == dim; }

  // Scores of the tokens from..to of a tile; writes up to a whole vector past them.
  void score_tokens(int rows, const float* queries, const T* base, const int64_t* offsets, long from,
                    long to, float* copy, float* scores, Ahead& ahead) const {
    constexpr int kGroups = kMaxRows >= 12 ? 2 : 1;
    bool even = args.block_size % (kGroups * kWidth) == 0;
    ScoreKeys<T> score_both = score_keys_for<kGroups, T>(rows), score = score_keys_for<1, T>(rows);
    long t = from;
    for (; even && t + kGroups * kWidth <= to; t += kGroups * kWidth) {
      score_both(queries, base + offsets[t], args.token_stride, dim, scores + t, ahead);
    }
    for (; t < to; t += kWidth) {
      if (args.block_size % kWidth == 0 && t + kWidth <= to) {
        score(queries, base + offsets[t], args.token_stride, dim, scores + t, ahead);
        continue;
      }
      T* keys = (T*)copy;  // rows that are not evenly spaced are put side by side first
      for (long j = 0; j < kWidth; j++) {
        memcpy(keys + j * dim, base + offsets[min_of(t + j, to - 1)], (size_t)dim * sizeof(T));
      }
      score(queries, keys, dim, dim, scores + t, ahead);
    }
  }

  // One tile for few rows and all heads of the task, reading the cache in the order of memory.
  void stream_tile(const Task& task, long tile, long length, int rows, const int64_t* offsets,
                   const Workspace& w, const State* states, long step, Ahead& ahead) const {
    long heads = task.head_end - task.head_begin;
    const T* base = kv + task.head_begin * args.head_stride;
    long limits[kMaxRows];
    find_limits(task, 0, rows, tile, length, limits);
    for (long from = 0; from < length; from += step) {
      long to = min_of(from + step, length);
      for (long h = 0; h < heads; h++) {
        score_tokens(rows, w.queries + h * rows * dim, base + h * args.head_stride, offsets, from,
                     to, w.keys, w.scores + h * rows * kTile, ahead);
      }
    }
    float decays[kMaxRows], ones[kMaxRows];
    for (long from = 0; from < length; from += step) {
      long to = min_of(from + step, length);
      for (long h = 0; h < heads; h++) {
        float* scores = w.scores + h * rows * kTile;
        for (int m = 0; m < rows; m++) ones[m] = 1.0f;
        if (from == 0) weigh_rows(rows, limits, length, states[h], scores, decays);
        add_all_values<T>(rows, scores + from, base + h * args.head_stride, offsets + length + from,
                          to - from, from == 0 ? decays : ones, states[h].value, width, ahead);
      }
    }
  }

  // One split for few rows. The list of rows holds `more` tokens of the next split, so that its
  // beginning is on the way when it is reached.
  void stream_split(const Task& task, long begin, long count, long more, int rows,
                    const Workspace& w, const State* states) const {
    // A head's rows are used in turn while memory is fetched in order: all heads' rows of the tokens
    // in work must be on their way before the first head begins.
    long token_bytes = (task.head_end - task.head_begin) * dim * (long)sizeof(T);
    long step = kStreamTokens * token_bytes > kStreamBytes ? kStreamTokens / 2 : kStreamTokens;
    long lead = step * token_bytes + kAheadBytes;
    Ahead ahead = Ahead::over(w.runs, find_runs(task, begin, count + more, w.runs));
    if (begin == task.split_begin * kSplit) {
      for (long i = 0; i < lead; i += 64) ahead.fetch(64);
    } else {
      ahead.skip(lead);
    }
    for (long tile = 0; tile < count; tile += kTile) {
      stream_tile(task, begin + tile, min_of(kTile, count - tile), rows, w.offsets + 2 * tile, w,
                  states, step, ahead);
    }
  }

  // A split starts from nothing: in a place of its own, or in the running total if it is first.
  State start_split(const Task& task, long split, long h, long rows, const Workspace& w) const {
    long size = State::size(rows, width);
    float* memory = w.states + (2 * h + (split > task.split_begin)) * size;
    if (task.partial != nullptr) {
      memory = task.partial + ((split - task.split_begin) * args.num_kv_heads + h) * size;
    }
    State state(memory, rows, width);
    state.clear(rows, width);
    return state;
  }

  void run_task(const Task& task) const {
    long rows = (task.query_end - task.query_begin) * group;
    long heads = task.head_end - task.head_begin;
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
      long more = split + 1 < task.split_end ? min_of(kTile, context - begin - count) : 0;
      find_rows(task.sequence, begin, count + more, w.offsets);
      State states[kMaxHeads];
      for (long h = 0; h < heads; h++) states[h] = start_split(task, split, h, rows, w);
      if (streams(rows)) {
        stream_split(task, begin, count, more, (int)rows, w, states);
      } else {
        for (long h = 0; h < heads; h++) {
          attend_split(task, task.head_begin + h, begin, count, groups, w,
                       w.queries + h * rows * dim, states[h]);
        }
      }
      for (long h = 0; h < heads && task.partial == nullptr; h++) {
        State total(w.states + 2 * h * State::size(rows, width), rows, width);
        if (split > task.split_begin) total.merge(states[h], rows, width);
        if (split + 1 == task.split_end) write_output(task, task.head_begin + h, total);
      }
    }
  }

  // Merges the splits that tasks left apart, in the order in which run_task merges them.
  // partials: [split][KV head][state].
  void merge_sequence(long s, long splits, float* partials) const {
    long rows = query_len(s) * group, size = State::size(rows, width);
    Task task = {s, args.query_starts[s], args.query_starts[s + 1], 0, 0, 0, 0, nullptr};
    for (long head = 0; head < args.num_kv_heads; head++) {
      State total(partials + head * size, rows, width);
      for (long split = 1; split < splits; split++) {
        float* memory = partials + (split * args.num_kv_heads + head) * size;
        total.merge(State(memory, rows, width), rows, width);
      }
      write_output(task, head, total);
    }
  }
};

}  // namespace PF_ISA
}  // namespace pagefleet
