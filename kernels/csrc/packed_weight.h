// How weights lie in memory once they are packed, and the way in and out of that layout.
//
// Panels of kPanel output columns, each k-major, so that every product reads its weights as one
// stream:
//   float32   [panel][in][kPanel]            float
//   bfloat16  [panel][ceil(in / 2)][kPanel]  pairs of bfloat16 in 32-bit words
//   int8      [panel][in][kPanel]            int8, one float32 scale per output column, or
//             one scale and one zero point for each group of inputs: [panel][group][kPanel]
//   int4      [panel][ceil(in / 8)][kPanel]  eight signed nibbles in 32-bit words, by groups
// The last panel is filled with zeros.
#pragma once

#include <math.h>

#include "kernels.h"
#include "micro.h"

namespace pagefleet {
namespace PF_ISA {

constexpr double kSerialWork = 3e5;  // multiply-adds of a product below which threads do not pay

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

static Vec load_part_or_all(const float* p, long left) {
  return left >= kWidth ? load(p) : load_part(p, left);
}

// Fetched before a product, rows of its output cost nothing to write after it; they are far apart.
template <typename T>
static void fetch_output(const LinearArgs& args, long first_row, long count, long panel) {
  long n = args.out_features, column = panel * kPanel;
  long bytes = min_of(kPanel, n - column) * (long)sizeof(T);
  for (long m = 0; m < count; m++) {
    const char* row = (const char*)((T*)args.out + (first_row + m) * n + column);
    for (long i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 1);
  }
}

// The end of a product: `count` rows of sums of one panel, [row][kPanel], to where they belong.
template <typename T>
static void write_panel(const LinearArgs& args, long first_row, long count, long panel,
                        const float* sums) {
  long column = panel * kPanel, n = args.out_features;
  long width = min_of(kPanel, n - column);
  for (long m = 0; m < count; m++) {
    T* target = (T*)args.out + (first_row + m) * n + column;
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

}  // namespace PF_ISA
}  // namespace pagefleet
