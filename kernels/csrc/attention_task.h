// One task of attention: some query tokens of a sequence and some KV heads, over part of the context.
#pragma once

#include "attention_tile.h"
#include "kernels.h"

namespace pagefleet {
namespace PF_ISA {

constexpr long kSplit = 4 * kTile;
constexpr long kMostTiles = kSplit / kTile + 1;  // of a split and of what is fetched after it
constexpr long kValuesAtOnce = 2 * kStrands;     // rows of V of one head before the next head's
constexpr long kAheadBytes = 65536;              // between what is fetched and what is in work: L2 holds it
constexpr long kMaxHeads = 64;                   // KV heads of one task

struct Task {
  long sequence;
  long query_begin, query_end;  // tokens of the flat batch
  long head_begin, head_end;    // KV heads
  long split_begin, split_end;
  float* partial;  // where the splits leave their states; null: they are merged and written out
};

// Sequences begin..end-1 have the first `splits` splits in the same blocks. Tasks leave there the states
// of all their rows: [split][KV head][state].
struct Shared {
  long begin, end, splits;
  float* partials;
};

// Runs tasks; see attention.cpp for what they are.
template <typename T>
struct Attention {
  const AttentionArgs& args;
  const T *q, *kv;
  T* out;
  long group;       // query heads per KV head
  long dim, width;  // width: head_dim rounded up to whole vectors
  long depth;       // head_dim filled up to whole chains

  explicit Attention(const AttentionArgs& a)
      : args(a), q((const T*)a.q), kv((const T*)a.kv), out((T*)a.out),
        group(a.num_heads / a.num_kv_heads), dim(a.head_dim),
        width(ceil_div(a.head_dim, kWidth) * kWidth), depth(Order<T>::length(a.head_dim)) {}

  // Where in its sequence a token of the flat batch stands.
  long position_of(long s, long token) const {
    return args.context_lens[s] - args.query_starts[s + 1] + token;
  }
  // The first key that a query at `position` sees.
  long first_seen(long position) const {
    return args.window > 0 ? max_of(0, position + 1 - args.window) : 0;
  }

  long query_len(long s) const { return args.query_starts[s + 1] - args.query_starts[s]; }
  long rows_of(const Shared& some) const {
    return (args.query_starts[some.end] - args.query_starts[some.begin]) * group;
  }
  long state_size(const Shared& some) const { return State::size(rows_of(some), width); }

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

  // The tiles of begin..begin + count that have tokens from `first` on. rows: two for each token.
  long list_tiles(const Task& task, long begin, long count, long first, const char** rows,
                  TileRows* tiles, uint8_t (*room)[kTile]) const {
    long n = 0;
    for (long tile = begin; tile < begin + count; tile += kTile) {
      Seen seen = {max_of(0, first - tile), min_of(kTile, begin + count - tile)};
      if (seen.begin >= seen.end) continue;
      TokenOrder order = TokenOrder::of(seen, room[n]);
      list_rows(task, tile, seen.end, order, rows);
      tiles[n++] = {tile, seen.end, order, rows};
      rows += 2 * order.count;
    }
    return n;
  }

  void list_rows(const Task& task, long tile, long length, TokenOrder order, const char** rows) const {
    const char* keys[kTile];
    for_each_part(task.sequence, tile, length, [&](long first, long part, int64_t offset) {
      const T* key = kv + task.head_begin * args.head_stride + offset;
      for (long i = 0; i < part; i++) keys[first + i] = (const char*)(key + i * args.token_stride);
    });
    long to_value = args.value_offset * (long)sizeof(T);
    for (long i = 0; i < order.count; i++) {
      rows[i] = keys[order.tokens[i]];
      rows[order.count + i] = rows[i] + to_value;
    }
  }

  // K of a tile, turned: panels of kPanel tokens, [panel][depth][kPanel]; zeros past `count` and
  // past head_dim.
  void turn_keys(const T* base, const int64_t* offsets, long count, float* keys) const {
    Vec tile[kWidth];
    for (long t = 0; t < ceil_div(count, kPanel) * kPanel; t += kWidth) {
      float* target = keys + t / kPanel * kPanel * depth + t % kPanel;
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
        for (long j = 0; j < length; j++) {
          store(target + Order<T>::place(i + j, dim) * kPanel, tile[j]);
        }
      }
      for (long i = dim; i < depth; i++) store(target + Order<T>::place(i, dim) * kPanel, zero());
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

  // One group of rows, scaled and interleaved for the panel product: [depth][rows of the group].
  void gather_group(const Task& task, long head, long first, int rows, float* target) const {
    Vec tile[kWidth], factor = splat(args.scale);
    const T* sources[kMaxRows];
    for (int m = 0; m < rows; m++) sources[m] = query_row(task, head, first + m);
    for (long i = 0; i < depth; i += kWidth) {
      long length = max_of(0, min_of(kWidth, dim - i));
      for (int m = 0; m < kWidth; m++) tile[m] = zero();
      for (int m = 0; m < rows && length > 0; m++) {
        Vec part = length == kWidth ? load(sources[m] + i) : load_part(sources[m] + i, length);
        tile[m] = mul(part, factor);
      }
      transpose(tile);
      for (long j = 0; j < min_of(kWidth, depth - i); j++) {
        store_part(target + Order<T>::place(i + j, dim) * rows, tile[j], rows);
      }
    }
  }

  // The same for keys that are read where they lie: [dim / 4][rows, padded][4] for float.
  void gather_streamed(const Task& task, long head, long rows, float* queries) const {
    if (!Order<T>::kChained) {
      gather_group(task, head, 0, (int)rows, queries);
      return;
    }
    long padded = padded_rows(rows);
    for (long m = 0; m < padded; m++) {
      const T* row = query_row(task, head, min_of(m, rows - 1));
      for (long i = 0; i < dim; i++) {
        queries[i / 4 * padded * 4 + m * 4 + i % 4] = m < rows ? to_float(row[i]) * args.scale : 0;
      }
    }
  }

  struct Workspace {
    float *queries, *keys, *values, *scores, *raw, *states;
    int64_t* offsets;
    const char** rows;  // that are read in turn
    Run* runs;
  };

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

  void write_rows(const Task& task, long head, long first, long count, const State& state) const {
    for (long r = first; r < first + count; r++) {
      write_row(task.query_begin + r / group, head * group + r % group, state.value + r * width,
                state.sum[r]);
    }
  }

  // After a split: its rows join the total of those before it, and after the last one are written.
  void finish_rows(const Task& task, long split, long head, long first, long count,
                   const Workspace& w, const State& state) const {
    if (task.partial != nullptr) return;
    long rows = (task.query_end - task.query_begin) * group;
    State total(w.states + 2 * (head - task.head_begin) * State::size(rows, width), rows, width);
    if (split > task.split_begin) total.from(first, width).merge(state.from(first, width), count, width);
    if (split + 1 == task.split_end) write_rows(task, head, first, count, total);
  }

  // Scores of a group of rows against a tile, made into weights. `all`: what any of them sees.
  void weigh_rows(int rows, const Seen* seen, Seen all, const State& state, float* scores,
                  float* decay) const {
    static_assert(kMaxRows <= kWidth, "the decays of a group are one vector");
    float tops[kWidth], fall[kWidth] = {0};
    for (int m = 0; m < rows; m++) {
      float* row = scores + m * kTile;
      if (args.soft_cap > 0) cap_scores(row, all, args.soft_cap);
      float top = largest_of(row, seen[m]);
      tops[m] = top < state.largest[m] ? state.largest[m] : top;
      fall[m] = state.largest[m] - tops[m];
    }
    store(fall, exp_of(load(fall)));
    for (int m = 0; m < rows; m++) {
      decay[m] = fall[m];
      state.sum[m] = state.sum[m] * decay[m] + weigh(scores + m * kTile, seen[m], all, tops[m]);
      state.largest[m] = tops[m];
    }
  }

  // What rows first.. of a task see of the tile that begins at `tile`; returns what any of them does.
  Seen find_seen(const Task& task, long first, int rows, long tile, long length, Seen* seen) const {
    long position = position_of(task.sequence, task.query_begin);
    Seen all = {length, 0};
    for (int m = 0; m < rows; m++) {
      long at = position + (first + m) / group;
      Seen row = {max_of(0, first_seen(at) - tile), min_of(length, at + 1 - tile)};
      if (row.begin >= row.end) row = {0, 0};  // nothing
      seen[m] = row;
      if (row.end == 0) continue;
      all = {min_of(all.begin, row.begin), max_of(all.end, row.end)};
    }
    return all;
  }

  Workspace workspace_for(long rows, long heads) const {
    static thread_local Scratch scratch, list_scratch;
    long scored = min_of(rows, kMaxRows);
    long sizes[] = {heads * padded_rows(rows) * depth, kTile * depth, kTile * width,
                    heads * scored * kTile, heads * RawScores::size(scored),
                    2 * heads * State::size(rows, width)};
    long total = 0;
    for (long& size : sizes) total += size = ceil_div(size, 16) * 16;
    float* p = scratch.floats((size_t)total);
    Workspace w;
    w.queries = p, p += sizes[0];
    w.keys = p, p += sizes[1];
    w.values = p, p += sizes[2];
    w.scores = p, p += sizes[3];
    w.raw = p, p += sizes[4];
    w.states = p;
    size_t list = 2 * (kSplit + kTile), runs = 2 * (kTile + kMaxRows);
    w.offsets = (int64_t*)list_scratch.bytes(list * (sizeof(int64_t) + sizeof(char*)) +
                                             runs * sizeof(Run));
    w.rows = (const char**)(w.offsets + list);
    w.runs = (Run*)(w.rows + list);
    return w;
  }

  void score_panel(int rows, const float* queries, const float* keys, float* scores) const {
    if (Order<T>::kChained) {
      for (int m = 0; m < rows; m += kChainedRows) {
        chained_product_for(min_of(kChainedRows, rows - m))(
            queries + m, rows, keys, depth / kChains, scores + m * kTile, kTile);
      }
    } else {
      panel_product_for<float>(rows)(queries, keys, depth, scores, kTile, false,
                                     {(const char*)keys, kPanel * (long)sizeof(float)});
    }
  }

  // What is needed next and not in the caches yet, to be fetched while a group of rows is in work: the
  // queries of the next group, where this group's output goes, a part of the next tile's rows of K
  // and V, of which there are `next`.
  Trickle find_next(const Task& task, long head, const RowGroups& groups, long g, const T* base,
                    const int64_t* offsets, long next, bool is_first, bool is_last, Run* runs) const {
    long bytes = dim * (long)sizeof(T), n = 0;
    if (is_first && g + 1 < groups.count) {
      for (long r = groups.begin(g + 1); r < groups.begin(g + 2); r++) {
        runs[n++] = {(const char*)query_row(task, head, r), bytes};
      }
    }
    if (is_last) {
      for (long r = groups.begin(g); r < groups.begin(g + 1); r++) {
        runs[n++] = {(const char*)(out + (query_row(task, head, r) - q)), bytes};
      }
    }
    for (long t = g * next / groups.count; t < (g + 1) * next / groups.count; t++) {
      runs[n++] = {(const char*)(base + offsets[t]), bytes};
    }
    return {runs, runs + n, 0};
  }

  // One split of the context for one KV head and many rows: K and V of a tile are copied once
  // into the layout that suits the products, then used by one group of rows after the other.
  // `more` tokens of the next split follow in the list of rows.
  void attend_split(const Task& task, long head, long split, long count, long more,
                    const RowGroups& groups, const Workspace& w, float* queries,
                    const State& state) const {
    long begin = split * kSplit;
    const T* base = kv + head * args.head_stride;
    const int64_t* offsets = w.offsets;
    for (long tile = 0; tile < count; tile += kTile) {
      long length = min_of(kTile, count - tile);
      bool is_first = begin + tile == task.split_begin * kSplit;
      // What no row sees was perhaps never written, but is masked before it is used.
      turn_keys(base, offsets, length, w.keys);
      gather_values(base, offsets + length, length, w.values);
      offsets += 2 * length;
      long next = min_of(kTile, count + more - tile - length);
      for (long g = 0; g < groups.count; g++) {
        int rows = groups.size(g);
        long first = groups.begin(g);
        Trickle ahead = find_next(task, head, groups, g, base, offsets, 2 * next, is_first, next == 0,
                                  w.runs);
        if (is_first) gather_group(task, head, first, rows, queries + first * depth);
        Seen seen[kMaxRows];
        Seen all = find_seen(task, first, rows, begin + tile, length, seen);
        if (all.begin < all.end) {
          for (long t = all.begin / kPanel * kPanel; t < all.end; t += kPanel) {
            score_panel(rows, queries + first * depth, w.keys + t * depth, w.scores + t);
          }
          State part = state.from(first, width);
          float decay[kMaxRows];
          weigh_rows(rows, seen, all, part, w.scores, decay);
          uint8_t room[kTile];
          TokenOrder order = TokenOrder::of(all, room);
          for (long i = 0; i < order.count; i++) {
            w.rows[i] = (const char*)(w.values + order.tokens[i] * width);
          }
          add_all_values<float>(rows, w.scores, w.rows, 0, order, decay, part.value, width, ahead);
        }
        if (tile + length == count) finish_rows(task, split, head, first, rows, w, state);
      }
    }
  }

  // Whether K and V are read where they lie, once: few rows, and whole vectors.
  bool streams(long rows) const { return rows <= kMaxRows && width == dim; }

  // One tile for few rows and all heads of the task, reading the cache in the order of the tokens.
  void stream_tile(const Task& task, const TileRows& tile, int rows, const Workspace& w,
                   const State* states, Ahead& ahead) const {
    long heads = task.head_end - task.head_begin;
    score_tile(heads, tile, rows, w, ahead);
    Seen seen[kMaxRows];
    Seen all = find_seen(task, 0, rows, tile.begin, tile.length, seen);
    float decays[kMaxHeads][kMaxRows], ones[kMaxRows];
    for (float& one : ones) one = 1.0f;
    for (long h = 0; h < heads; h++) {
      float* scores = w.scores + h * rows * kTile;
      place_scores(raw_scores(w, h, rows), tile.order, scores);
      weigh_rows(rows, seen, all, states[h], scores, decays[h]);
    }
    for (long i = 0; i < tile.order.count; i += kValuesAtOnce) {
      TokenOrder part = {tile.order.tokens + i, min_of(kValuesAtOnce, tile.order.count - i)};
      for (long h = 0; h < heads; h++) {
        add_all_values<T>(rows, w.scores + h * rows * kTile, tile.values() + i, h * head_bytes(), part,
                          i == 0 ? decays[h] : ones, states[h].value, width, ahead);
      }
    }
  }

  void score_tile(long heads, const TileRows& tile, long rows, const Workspace& w,
                  Ahead& ahead) const {
    constexpr long kCount = keys_at_once<T>();
    long query_size = padded_rows(rows) * depth, count = tile.order.count;
    for (long i = 0; i < count; i += kCount) {
      const char* const* keys = tile.keys() + i;
      const char* last[kCount];
      if (i + kCount > count) {
        for (long t = 0; t < kCount; t++) last[t] = keys[min_of(t, count - i - 1)];
        keys = last;
      }
      for (long h = 0; h < heads; h++) {
        score_keys<T>(w.queries + h * query_size, keys, h * head_bytes(), dim, raw_scores(w, h, rows),
                      i, ahead);
      }
    }
  }

  RawScores raw_scores(const Workspace& w, long h, long rows) const {
    return {w.raw + h * RawScores::size(rows), rows};
  }
  long head_bytes() const { return args.head_stride * (long)sizeof(T); }

  // One split for few rows. The list of rows holds `more` tokens of the next split, so that its
  // beginning is on the way when it is reached.
  void stream_split(const Task& task, long begin, long count, long more, int rows,
                    const Workspace& w, const State* states) const {
    TileRows tiles[kMostTiles];
    uint8_t room[kMostTiles][kTile];
    long first = first_seen(position_of(task.sequence, task.query_begin));
    long num_tiles = list_tiles(task, begin, count + more, first, w.rows, tiles, room);
    const TileRows& last = tiles[num_tiles - 1];
    const char* const* end = last.values() + last.order.count;
    long row_bytes = (task.head_end - task.head_begin) * dim * (long)sizeof(T);
    // All heads' rows of the tokens in work must be on their way before the first head begins.
    long lead = min_of(max_of(kAheadBytes / row_bytes, kValuesAtOnce), end - w.rows);
    bool is_first = begin == task.split_begin * kSplit;
    Ahead ahead = Ahead::over(w.rows + (is_first ? 0 : lead), end - 1, row_bytes);
    if (is_first) ahead.fetch(lead * row_bytes);
    for (const TileRows* tile = tiles; tile < tiles + num_tiles; tile++) {
      if (tile->begin < begin + count) stream_tile(task, *tile, rows, w, states, ahead);
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
    long context = position_of(task.sequence, task.query_end);
    long query_size = padded_rows(rows) * depth;
    for (long h = 0; h < heads && streams(rows); h++) {
      gather_streamed(task, task.head_begin + h, rows, w.queries + h * query_size);
    }
    for (long split = task.split_begin; split < task.split_end; split++) {
      long begin = split * kSplit, count = min_of(kSplit, context - begin);
      long more = split + 1 < task.split_end ? min_of(kTile, context - begin - count) : 0;
      State states[kMaxHeads];
      for (long h = 0; h < heads; h++) states[h] = start_split(task, split, h, rows, w);
      if (streams(rows)) {
        stream_split(task, begin, count, more, (int)rows, w, states);
        for (long h = 0; h < heads; h++) {
          finish_rows(task, split, task.head_begin + h, 0, rows, w, states[h]);
        }
      } else {
        find_rows(task.sequence, begin, count + more, w.offsets);
        for (long h = 0; h < heads; h++) {
          attend_split(task, task.head_begin + h, split, count, more, groups, w,
                       w.queries + h * query_size, states[h]);
        }
      }
    }
  }

  // Merges the splits that tasks left apart, in the order in which run_task merges them: those that
  // the sequence shares, or null, then `splits` of its own. partials: [split][KV head][state].
  void merge_sequence(long s, const Shared* shared, long splits, float* partials) const {
    long rows = query_len(s) * group, size = State::size(rows, width);
    long num_shared = shared ? shared->splits : 0;
    Task task = {s, args.query_starts[s], args.query_starts[s + 1], 0, 0, 0, 0, nullptr};
    for (long head = 0; head < args.num_kv_heads; head++) {
      State total;
      for (long split = 0; split < num_shared + splits; split++) {
        long own = split - num_shared;
        State state = own < 0 ? shared_state(*shared, s, split, head)
                              : State(partials + (own * args.num_kv_heads + head) * size, rows, width);
        if (split == 0) {
          total = state;
        } else {
          total.merge(state, rows, width);
        }
      }
      write_rows(task, head, 0, rows, total);
    }
  }

  // Of the rows of one of the sequences.
  State shared_state(const Shared& shared, long s, long split, long head) const {
    float* memory = shared.partials + (split * args.num_kv_heads + head) * state_size(shared);
    long first = (args.query_starts[s] - args.query_starts[shared.begin]) * group;
    return State(memory, rows_of(shared), width).from(first, width);
  }
};

}  // namespace PF_ISA
}  // namespace pagefleet
