// Decoder layers one after the other in one call. The kernels are the same, in the same order, as when
// each is called by itself: only the interpreter between them is saved, which a small step feels.
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
      : kernels_(kernels), args_(args), rows_(args.rope.num_tokens), dtype_(args.rope.dtype),
        threads_(args.rope.threads), q_size_(args.rope.num_heads * args.rope.head_dim),
        kv_size_(args.rope.num_kv_heads * args.rope.head_dim) {
    char** places[] = {&fused_, &q_, &attended_, &normed_, &gate_up_, &activated_};
    int64_t at = 0;
    for (int i = 0; i < kParts; i++) {
      *places[i] = args.room + at;
      at += part_bytes(args, i);
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
  static constexpr int kParts = 6;

  // Of what is written between two kernels: q with k and v, q, attended, normed, gate with up, activated.
  static int64_t part_bytes(const StackArgs& args, int part) {
    int64_t q_size = args.rope.num_heads * args.rope.head_dim;
    int64_t kv_size = args.rope.num_kv_heads * args.rope.head_dim;
    int64_t widths[kParts] = {q_size + 2 * kv_size, q_size, q_size, args.hidden, 2 * args.ffn, args.ffn};
    int64_t element = args.rope.dtype == kFloat32 ? 4 : 2;
    return (args.rope.num_tokens * widths[part] * element + 63) / 64 * 64;
  }

  int64_t element() const { return dtype_ == kFloat32 ? 4 : 2; }

  void run_layer(const LayerArgs& layer, void* kv, bool is_first) const {
    add_and_norm(is_first ? nullptr : args_.x, layer.input_norm);
    multiply(*layer.qkv, normed_, fused_);
    normalize_heads(layer.q_norm, 0, q_size_, args_.q_norm_width);
    normalize_heads(layer.k_norm, q_size_, kv_size_, args_.k_norm_width);
    write_cache(layer, kv);
    AttentionArgs attention = args_.attention;
    attention.q = q_, attention.kv = kv, attention.out = attended_, attention.window = layer.window;
    kernels_.attention(&attention);
    multiply(*layer.output, attended_, args_.x);
    add_and_norm(args_.x, layer.mlp_norm);
    multiply(*layer.gate_up, normed_, gate_up_);
    auto activate = args_.is_gelu ? kernels_.gelu_tanh_and_mul : kernels_.silu_and_mul;
    activate(gate_up_, activated_, rows_, args_.ffn, dtype_, threads_);
    multiply(*layer.down, activated_, args_.x);
  }

  // residual += x, and its norm.
  void add_and_norm(const void* x, const void* weight) const {
    if (x == nullptr) {
      kernels_.rms_norm(args_.residual, weight, normed_, rows_, args_.hidden, args_.eps, dtype_,
                        threads_);
    } else {
      kernels_.add_rms_norm(x, args_.residual, weight, normed_, rows_, args_.hidden, args_.eps,
                            dtype_, threads_);
    }
  }

  void multiply(LinearArgs linear, const void* x, void* out) const {
    linear.x = x, linear.out = out, linear.rows = rows_, linear.x_dtype = dtype_;
    kernels_.linear(&linear);
  }

  // `size` elements of each token from `begin` on, in runs as long as the weight.
  void normalize_heads(const void* weight, int64_t begin, int64_t size, int64_t width) const {
    if (weight == nullptr) return;
    for (int64_t t = 0; t < rows_; t++) {
      char* heads = fused_ + (t * (q_size_ + 2 * kv_size_) + begin) * element();
      kernels_.rms_norm(heads, weight, heads, size / width, width, args_.eps, dtype_, threads_);
    }
  }

  void write_cache(const LayerArgs& layer, void* kv) const {
    RopeArgs rope = args_.rope;
    rope.q = fused_;
    rope.k = fused_ + q_size_ * element();
    rope.v = fused_ + (q_size_ + kv_size_) * element();
    rope.q_stride = rope.k_stride = rope.v_stride = q_size_ + 2 * kv_size_;
    rope.q_out = q_, rope.kv = kv, rope.cos_sin = layer.cos_sin, rope.rotary_dim = layer.rotary_dim;
    kernels_.rope_and_cache(&rope);
  }

  const KernelTable& kernels_;
  const StackArgs& args_;
  int64_t rows_;
  int32_t dtype_, threads_;
  int64_t q_size_, kv_size_;
  char *fused_, *q_, *attended_, *normed_, *gate_up_, *activated_;
};

}  // namespace pagefleet
