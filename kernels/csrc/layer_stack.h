// Decoder layers one after the other in one call. The kernels are the same, and in the same order for
// every row, as when each is called by itself: a small step is saved the interpreter between them, and
// a prompt goes through all but attention by blocks of rows, so that what one kernel writes is still in
// the caches when the next reads it.
#pragma once

#include "kernels.h"

namespace pagefleet {

// norm, attention, norm, gated MLP; null: the layer has no such norm.
struct LayerArgs {
  const LinearArgs *qkv, *output, *gate_up, *down;
  const void *input_norm, *q_norm, *k_norm, *mlp_norm;
  const float* cos_sin;
  int64_t rotary_dim, window;
};

struct StackArgs {
  const LayerArgs* layers;
  void* const* kv;  // one layer's K and V each
  void *residual, *x;  // [tokens, hidden]: embedded tokens, updated; what is still to be added to it
  char* room;       // room_bytes() of it
  RopeArgs rope;            // all but q, k, v, q_out, kv and the table
  AttentionArgs attention;  // all but q, kv, out and window
  int64_t num_layers, hidden, ffn, q_norm_width, k_norm_width;
  float eps;
  int32_t is_gelu;
};

class LayerStack {
 public:
  LayerStack(const KernelTable& kernels, const StackArgs& args)
      : kernels_(kernels), args_(args), rows_(args.rope.num_tokens), at_once_(rows_at_once(args)),
        dtype_(args.rope.dtype), threads_(args.rope.threads),
        q_size_(args.rope.num_heads * args.rope.head_dim),
        kv_size_(args.rope.num_kv_heads * args.rope.head_dim) {
    char** places[] = {&q_, &attended_, &fused_, &normed_, &gate_up_, &activated_};
    char* place = args.room;
    for (int i = 0; i < kParts; i++) {
      *places[i] = place;
      place += part_bytes(args, i);
    }
  }

  // What `room` has to hold.
  static int64_t room_bytes(const StackArgs& args) {
    int64_t bytes = 0;
    for (int i = 0; i < kParts; i++) bytes += part_bytes(args, i);
    return bytes;
  }

  void run() const {
    for (int64_t i = 0; i < args_.num_layers; i++) run_layer(args_.layers[i], args_.kv[i], i == 0);
  }

 private:
  static constexpr int64_t kFewRows = 32;  // whose heads are normalized sooner than threads are there
  static constexpr int kParts = 6, kWhole = 2;  // parts, and how many of them hold all rows
  static constexpr int64_t kRowsAtOnce = 240;  // as many as share a pass over a weight panel

  // Some rows of the step.
  struct Rows {
    int64_t begin, count;
  };

  // More where many threads share the columns of a product.
  static int64_t rows_at_once(const StackArgs& args) {
    int64_t pairs = (args.rope.threads + 1) / 2;
    return args.rope.num_tokens < kRowsAtOnce * pairs ? args.rope.num_tokens : kRowsAtOnce * pairs;
  }

  // Of what is written between two kernels: q, attended, q with k and v, normed, gate with up, activated.
  static int64_t part_bytes(const StackArgs& args, int part) {
    int64_t q_size = args.rope.num_heads * args.rope.head_dim;
    int64_t kv_size = args.rope.num_kv_heads * args.rope.head_dim;
    int64_t widths[kParts] = {q_size, q_size, q_size + 2 * kv_size, args.hidden, 2 * args.ffn, args.ffn};
    int64_t rows = part < kWhole ? args.rope.num_tokens : rows_at_once(args);
    int64_t element = args.rope.dtype == kFloat32 ? 4 : 2;
    return (rows * widths[part] * element + 63) / 64 * 64;
  }

  // The place of an element.
  char* at(void* data, int64_t index) const {
    return (char*)data + index * (dtype_ == kFloat32 ? 4 : 2);
  }

  // Blocks as even as can be: each streams all weights.
  template <typename Work>
  void by_blocks(Work work) const {
    int64_t count = at_once_ > 0 ? (rows_ + at_once_ - 1) / at_once_ : 0;
    for (int64_t i = 0; i < count; i++) {
      int64_t begin = i * rows_ / count;
      work(Rows{begin, (i + 1) * rows_ / count - begin});
    }
  }

  void run_layer(const LayerArgs& layer, void* kv, bool is_first) const {
    by_blocks([&](Rows rows) { project(layer, kv, rows, is_first); });
    AttentionArgs attention = args_.attention;
    attention.q = q_, attention.kv = kv, attention.out = attended_, attention.window = layer.window;
    kernels_.attention(&attention);
    by_blocks([&](Rows rows) { feed_forward(layer, rows); });
  }

  // From the residual to q and to K and V in the cache.
  void project(const LayerArgs& layer, void* kv, Rows rows, bool is_first) const {
    add_and_norm(is_first ? nullptr : args_.x, layer.input_norm, rows);
    multiply(*layer.qkv, normed_, fused_, rows.count);
    normalize_heads(layer.q_norm, 0, q_size_, args_.q_norm_width, rows.count);
    normalize_heads(layer.k_norm, q_size_, kv_size_, args_.k_norm_width, rows.count);
    write_cache(layer, kv, rows);
  }

  // From attention to what is still to be added to the residual.
  void feed_forward(const LayerArgs& layer, Rows rows) const {
    char* x = at(args_.x, rows.begin * args_.hidden);
    multiply(*layer.output, at(attended_, rows.begin * q_size_), x, rows.count);
    add_and_norm(args_.x, layer.mlp_norm, rows);
    multiply(*layer.gate_up, normed_, gate_up_, rows.count);
    auto activate = args_.is_gelu ? kernels_.gelu_tanh_and_mul : kernels_.silu_and_mul;
    activate(gate_up_, activated_, rows.count, args_.ffn, dtype_, threads_);
    multiply(*layer.down, activated_, x, rows.count);
  }

  // residual += x, and its norm.
  void add_and_norm(void* x, const void* weight, Rows rows) const {
    char* residual = at(args_.residual, rows.begin * args_.hidden);
    if (x == nullptr) {
      kernels_.rms_norm(residual, weight, normed_, rows.count, args_.hidden, args_.eps, dtype_,
                        threads_);
    } else {
      kernels_.add_rms_norm(at(x, rows.begin * args_.hidden), residual, weight, normed_, rows.count,
                            args_.hidden, args_.eps, dtype_, threads_);
    }
  }

  void multiply(LinearArgs linear, const void* x, void* out, int64_t count) const {
    linear.x = x, linear.out = out, linear.rows = count, linear.x_dtype = dtype_;
    kernels_.linear(&linear);
  }

  // `size` elements of each token from `begin` on, in runs as long as the weight.
  void normalize_heads(const void* weight, int64_t begin, int64_t size, int64_t width,
                       int64_t count) const {
    if (weight == nullptr) return;
#pragma omp parallel for num_threads(threads_) schedule(static) if (threads_ > 1 && count > kFewRows)
    for (int64_t t = 0; t < count; t++) {
      char* heads = at(fused_, t * (q_size_ + 2 * kv_size_) + begin);
      kernels_.rms_norm(heads, weight, heads, size / width, width, args_.eps, dtype_, 1);
    }
  }

  void write_cache(const LayerArgs& layer, void* kv, Rows rows) const {
    RopeArgs rope = args_.rope;
    rope.q = fused_;
    rope.k = at(fused_, q_size_);
    rope.v = at(fused_, q_size_ + kv_size_);
    rope.q_stride = rope.k_stride = rope.v_stride = q_size_ + 2 * kv_size_;
    rope.positions += rows.begin, rope.slots += rows.begin, rope.num_tokens = rows.count;
    rope.q_out = at(q_, rows.begin * q_size_), rope.kv = kv;
    rope.cos_sin = layer.cos_sin, rope.rotary_dim = layer.rotary_dim;
    kernels_.rope_and_cache(&rope);
  }

  const KernelTable& kernels_;
  const StackArgs& args_;
  int64_t rows_, at_once_;
  int32_t dtype_, threads_;
  int64_t q_size_, kv_size_;
  char *q_, *attended_, *fused_, *normed_, *gate_up_, *activated_;
};

}  // namespace pagefleet
