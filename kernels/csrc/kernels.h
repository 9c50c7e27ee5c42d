// What one instruction set offers: a table of kernels, and the arguments of the larger ones.
//
// Everything crosses this border as plain pointers, strides (in elements) and integers.
#pragma once

#include <stdint.h>

namespace pagefleet {

enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2, kInt4 = 3 };

struct PackArgs {
  const void* weight;  // [out, in], contiguous, float32 or bfloat16
  void* packed;        // packed_bytes() of room
  float* scale;        // [out], written for int8 only
  int64_t out_features, in_features;
  int32_t weight_dtype, packed_dtype, threads;
};

// Weights that come as small integers: weight[n][k] = (code[n][k] - zero[n][g]) * scale[n][g] with
// g = k / group.
struct CodesArgs {
  const uint8_t* codes;  // [out, in], contiguous
  const float *scale, *zero;  // [out, groups], contiguous
  void* packed;               // packed_bytes() of room
  float *packed_scale, *packed_zero;  // [panels][groups][panel]
  int64_t out_features, in_features, group;
  int32_t packed_dtype, threads;
};

struct LinearArgs {
  const void* x;       // [rows, in], contiguous
  const void* packed;
  const float* scale;  // [out], int8 only; by groups: as packed
  const float* zero;   // by groups only; null: all are the middle of the codes
  const float* bias;   // [out] or null
  void* out;           // [rows, out], contiguous, dtype of x
  int64_t rows, out_features, in_features;
  int64_t group;       // inputs that share a scale; 0 = one scale per output, or none
  int32_t x_dtype, packed_dtype, threads;
  int32_t is_exact;    // packing lost nothing, so neither may the product
};

struct AttentionArgs {
  const void* q;    // [tokens, heads, head_dim], contiguous
  const void* kv;   // one layer's K and V, strided
  void* out;        // like q
  const int32_t* query_starts;  // [sequences + 1]
  const int32_t* context_lens;  // [sequences]
  const int32_t* block_tables;  // [sequences, table_stride]
  int64_t table_stride, block_stride, value_offset, token_stride, head_stride;
  int64_t num_sequences, num_heads, num_kv_heads, head_dim, block_size;
  int64_t window;   // how many keys a query sees, its own included; 0 = all before it
  float scale;
  float soft_cap;   // scores become soft_cap * tanh(score / soft_cap); 0 = they stay
  int32_t dtype, threads;
};

struct FilterArgs {
  const float* logits;  // [rows, vocab], rows logits_stride apart
  float* weights;       // [rows, vocab], contiguous
  const float* temperature;
  const int64_t* top_k;  // 0 = off
  const float *top_p, *min_p;  // 1 and 0 = off
  int64_t rows, vocab, logits_stride;
  int32_t threads;
};

struct RopeArgs {
  const void *q, *k, *v;  // token strides below, heads contiguous
  void* q_out;            // [tokens, heads, head_dim], contiguous
  void* kv;
  const float* cos_sin;   // [positions, rotary_dim]
  const int64_t *positions, *slots;
  int64_t q_stride, k_stride, v_stride;
  int64_t block_stride, value_offset, token_stride, head_stride;
  int64_t num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, block_size;
  int32_t dtype, threads;
};

struct KernelTable {
  int64_t (*packed_bytes)(int64_t out_features, int64_t in_features, int32_t packed_dtype);
  void (*pack_linear)(const PackArgs*);
  void (*pack_codes)(const CodesArgs*);
  void (*unpack_rows)(const void* packed, const float* scale, int64_t in_features,
                      int32_t packed_dtype, const int64_t* rows, int64_t num_rows, void* out,
                      int32_t out_dtype, int32_t threads);
  void (*linear)(const LinearArgs*);
  void (*attention)(const AttentionArgs*);
  void (*rope_and_cache)(const RopeArgs*);
  void (*rms_norm)(const void* x, const void* weight, void* out, int64_t rows, int64_t hidden,
                   float eps, int32_t dtype, int32_t threads);
  void (*add_rms_norm)(const void* x, void* residual, const void* weight, void* out, int64_t rows,
                       int64_t hidden, float eps, int32_t dtype, int32_t threads);
  void (*silu_and_mul)(const void* gate_up, void* out, int64_t rows, int64_t ffn, int32_t dtype,
                       int32_t threads);
  void (*gelu_tanh_and_mul)(const void* gate_up, void* out, int64_t rows, int64_t ffn,
                            int32_t dtype, int32_t threads);
  void (*filter_logits)(const FilterArgs*);
  float (*sum)(const float* x, const float* next, int64_t count);
  int64_t panel;  // columns of a panel
};

}  // namespace pagefleet
