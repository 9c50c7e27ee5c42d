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
// Few long contexts with few query tokens are spread over the threads by split, merged at the end.
// Splits that neighbours in the batch have in the same blocks, as prompts that begin alike do, are read
// once for the query tokens of all, and merged with what each has after them.

#include "attention_task.h"

namespace pagefleet {
namespace PF_ISA {

constexpr long kRowsPerTask = 480;      // query rows that share one pass over K and V
constexpr double kSerialReads = 65536;  // elements of K and V below which threads do not pay

// Cuts a batch into tasks. A sequence with few query tokens is one task, or several by split and
// KV head where there are too few sequences to keep the threads busy; a longer one goes in chunks of
// query tokens. What sequences with few query tokens share are tasks of their own.
template <typename T>
struct Plan {
  const Attention<T>& attention;
  const AttentionArgs& args;
  Shared* shared;            // room for as many as sequences
  const Shared** shared_of;  // by sequence; null: it shares nothing
  long num_shared = 0;
  long heads_per_task, splits_per_task;
  long num_tasks = 0, partial_floats = 0;

  Plan(const Attention<T>& a, Scratch& scratch) : attention(a), args(a.args) {
    long n = args.num_sequences;
    shared = (Shared*)scratch.bytes((size_t)n * (sizeof(Shared) + sizeof(Shared*)));
    shared_of = (const Shared**)(shared + n);
    find_shared();
    long short_sequences = 0, splits = 0;
    for (long s = 0; s < args.num_sequences; s++) {
      if (!is_short(s)) continue;
      short_sequences++;
      splits += num_splits(s);
    }
    bool spread = args.threads > 1 && short_sequences < 4 * args.threads;
    splits_per_task = spread ? ceil_div(splits, 4 * args.threads) : splits;
    heads_per_task = spread && splits < args.threads ? 1 : args.num_kv_heads;
    if (heads_per_task > kMaxHeads) heads_per_task = 1;
    for (long s = 0; s < args.num_sequences; s++) {
      num_tasks += tasks_of(s);
      partial_floats += partial_floats_of(s);
    }
    for (long i = 0; i < num_shared; i++) {
      num_tasks += shared[i].splits * ceil_div(args.num_kv_heads, heads_for(shared[i]));
      partial_floats += floats_of(shared[i]);
    }
  }

  // Whole splits that two sequences have in the same blocks and all their query tokens see.
  long common_splits(long s, long t) const {
    if (args.window > 0 || kSplit % args.block_size != 0) return 0;
    long blocks = kSplit / args.block_size, n = 0;
    long most = min_of(args.context_lens[s] - attention.query_len(s),
                       args.context_lens[t] - attention.query_len(t)) / kSplit;
    const int32_t* left = args.block_tables + s * args.table_stride;
    const int32_t* right = args.block_tables + t * args.table_stride;
    while (n < most && memcmp(left + n * blocks, right + n * blocks, (size_t)blocks * 4) == 0) n++;
    return n;
  }

  // Neighbours join while more reads are saved with the next one than without.
  void find_shared() {
    for (long s = 0, end = 1; s < args.num_sequences; s = end, end = s + 1) {
      long splits = 0, saved = 0;
      for (; is_short(s) && end < args.num_sequences && is_short(end); end++) {
        if (args.query_starts[end + 1] - args.query_starts[s] > queries_per_task()) break;
        long common = common_splits(s, end);
        if (end > s + 1) common = min_of(common, splits);
        if (common * (end - s) <= saved) break;
        splits = common, saved = common * (end - s);
      }
      if (splits > 0) shared[num_shared] = {s, end, splits, nullptr};
      for (long t = s; t < end; t++) shared_of[t] = splits > 0 ? shared + num_shared : nullptr;
      num_shared += splits > 0;
    }
  }

  long heads_for(const Shared& some) const {
    bool streams = attention.streams(attention.rows_of(some)) && args.num_kv_heads <= kMaxHeads;
    return streams ? args.num_kv_heads : 1;
  }

  long queries_per_task() const { return max_of(1, kRowsPerTask / attention.group); }
  static long splits_of(long context) { return ceil_div(context, kSplit); }
  // Of those that the first query token of a sequence sees, and that it does not share.
  long first_split(long s) const {
    return shared_of[s] ? shared_of[s]->splits : first_split(s, args.query_starts[s]);
  }
  long first_split(long s, long query_begin) const {
    return attention.first_seen(attention.position_of(s, query_begin)) / kSplit;
  }
  long num_splits(long s) const { return splits_of(args.context_lens[s]) - first_split(s); }
  bool is_short(long s) const {
    return attention.query_len(s) > 0 && attention.query_len(s) <= queries_per_task();
  }
  bool has_partials(long s) const {
    return is_short(s) && (shared_of[s] || num_splits(s) > splits_per_task);
  }

  long tasks_of(long s) const {
    if (!is_short(s)) return ceil_div(attention.query_len(s), queries_per_task()) * args.num_kv_heads;
    long parts = ceil_div(num_splits(s), splits_per_task);
    return parts * (args.num_kv_heads / heads_per_task);
  }

  long partial_floats_of(long s) const {
    if (!has_partials(s)) return 0;
    return num_splits(s) * args.num_kv_heads *
           State::size(attention.query_len(s) * attention.group, attention.width);
  }

  // The last chunk of query tokens sees the longest context and goes first.
  long add_chunks(long s, Task* tasks) const {
    long step = queries_per_task(), length = attention.query_len(s), n = 0;
    int32_t start = args.query_starts[s];
    long prefix = args.context_lens[s] - length;
    for (long chunk = ceil_div(length, step) - 1; chunk >= 0; chunk--) {
      long begin = chunk * step, end = min_of(begin + step, length);
      for (long head = 0; head < args.num_kv_heads; head++) {
        tasks[n++] = {s, start + begin, start + end, head, head + 1,
                      first_split(s, start + begin), splits_of(prefix + end), nullptr};
      }
    }
    return n;
  }

  long add_short(long s, float* partials, Task* tasks) const {
    long first = first_split(s), splits = splits_of(args.context_lens[s]), n = 0;
    long size = State::size(attention.query_len(s) * attention.group, attention.width);
    for (long split = first; split < splits; split += splits_per_task) {
      for (long head = 0; head < args.num_kv_heads; head += heads_per_task) {
        float* partial = partials + ((split - first) * args.num_kv_heads + head) * size;
        tasks[n++] = {s, args.query_starts[s], args.query_starts[s + 1], head,
                      head + heads_per_task, split, min_of(split + splits_per_task, splits),
                      has_partials(s) ? partial : nullptr};
      }
    }
    return n;
  }

  // Of what its tasks leave.
  long floats_of(const Shared& some) const {
    return some.splits * args.num_kv_heads * attention.state_size(some);
  }

  long add_shared(const Shared& some, Task* tasks) const {
    long n = 0, heads = heads_for(some), size = attention.state_size(some);
    for (long split = 0; split < some.splits; split++) {
      for (long head = 0; head < args.num_kv_heads; head += heads) {
        float* partial = some.partials + (split * args.num_kv_heads + head) * size;
        tasks[n++] = {some.begin, args.query_starts[some.begin], args.query_starts[some.end], head,
                      head + heads, split, split + 1, partial};
      }
    }
    return n;
  }

  // Chunks first: they are the largest.
  void fill(float* partials, Task* tasks) const {
    for (long s = 0; s < args.num_sequences; s++) {
      if (attention.query_len(s) > 0 && !is_short(s)) tasks += add_chunks(s, tasks);
    }
    for (long i = 0; i < num_shared; i++) {
      shared[i].partials = partials;
      tasks += add_shared(shared[i], tasks);
      partials += floats_of(shared[i]);
    }
    for (long s = 0; s < args.num_sequences; s++) {
      if (is_short(s)) tasks += add_short(s, partials, tasks);
      partials += partial_floats_of(s);
    }
  }

  void merge(float* partials) const {
    for (long i = 0; i < num_shared; i++) {
      partials += floats_of(shared[i]);
    }
    for (long s = 0; s < args.num_sequences; s++) {
      if (!has_partials(s)) continue;
      attention.merge_sequence(s, shared_of[s], num_splits(s), partials);
      partials += partial_floats_of(s);
    }
  }
};

template <typename T>
static void attend(const AttentionArgs& args) {
  static thread_local Scratch plan_scratch, task_scratch, partial_scratch;
  Attention<T> kernel(args);
  Plan<T> plan(kernel, plan_scratch);
  Task* tasks = (Task*)task_scratch.bytes((size_t)plan.num_tasks * sizeof(Task));
  float* partials = partial_scratch.floats((size_t)plan.partial_floats);
  plan.fill(partials, tasks);
  double reads = 0;
  for (long s = 0; s < args.num_sequences; s++) {
    long seen = args.context_lens[s] - plan.first_split(s) * kSplit;
    reads += 2.0 * seen * args.head_dim * args.num_kv_heads *
             ceil_div(kernel.query_len(s), kMaxRows);
  }
#pragma omp parallel for num_threads(args.threads) schedule(dynamic, 1) \
    if (args.threads > 1 && reads > kSerialReads && plan.num_tasks > 1)
  for (long i = 0; i < plan.num_tasks; i++) kernel.run_task(tasks[i]);
  plan.merge(partials);
}

static void attention(const AttentionArgs* args) {
  if (args->dtype == kFloat32) {
    attend<float>(*args);
  } else {
    attend<bf16>(*args);
  }
}

}  // namespace PF_ISA
}  // namespace pagefleet
