// Products over bfloat16 weights by the CPU's matrix unit (AMX), whatever the number of rows.
//
// A tile register holds 16 rows of 64 bytes: 32 inputs of 16 rows, or as many inputs of 16 columns in
// pairs, which is how a packed panel lies in memory. The unit multiplies bfloat16 and sums in float32.
// A float32 input is therefore split in bfloat16 parts, one product each: two leave at most 2^-17 of x
// out, less than the rounding of the weights by 2^-9; where weights are exact, three leave nothing out.
//
// Each output is one chain of sums in the order of k, the high part of 32 inputs before the lower ones,
// so a row's result depends on nothing but the row: a decoded token takes the same path as a prompt.
#pragma once

#include "kernels.h"
#include "packed_weight.h"

namespace pagefleet {
namespace PF_ISA {

constexpr long kTileRows = 16;
constexpr long kTileDepth = 32;           // inputs of a tile
constexpr long kTileRowsPerBlock = 256;   // rows that share one pass over a weight panel
constexpr long kTileStepsPerPart = 16;    // tiles of a panel that the first cache holds
constexpr long kTileAheadBytes = 8192;    // of a panel, fetched ahead where it is read once
constexpr long kPairWords = kTileDepth / 2 * kPanel;  // of a panel in one step of kTileDepth

// The unit reads memory behind the compiler's back.
#define PF_MEMORY_WRITTEN() asm volatile("" ::: "memory")

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {0};
  uint16_t row_bytes[16] = {0};
  uint8_t rows[16] = {0};

  // Registers 0..3: sums, [row tile][columns]; 4 and 5: inputs; 6 and 7: weights.
  explicit TileConfig(long input_rows) {
    for (int i = 0; i < 8; i++) {
      row_bytes[i] = 64;
      rows[i] = (uint8_t)(i < 6 ? input_rows : kTileDepth / 2);
    }
  }
};

// The thread's tile registers while a product runs: in use they cost each switch of threads.
struct Tiles {
  explicit Tiles(const TileConfig& config) {
    PF_MEMORY_WRITTEN();
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
};

// Inputs as the unit takes them: [row tile][step][part][row][kTileDepth], zeros past the last row and
// the last input. Tiles are as even in rows as can be.
template <typename T, int PARTS>
struct TileInputs {
  long rows, k, steps, count, tile_rows;
  uint16_t* data = nullptr;

  TileInputs(long rows, long k)
      : rows(rows), k(k), steps(ceil_div(k, kTileDepth)), count(ceil_div(rows, kTileRows)),
        tile_rows(ceil_div(rows, count)) {}

  long part_size() const { return tile_rows * kTileDepth; }
  long tile_size() const { return steps * PARTS * part_size(); }
  long bytes() const { return count * tile_size() * 2; }
  const uint16_t* tile(long t, long step) const {
    return data + t * tile_size() + step * PARTS * part_size();
  }

  // 16 inputs of one row, to the place of the first part.
  void put_half(const float* source, long left, uint16_t* target) const {
    Vec rest = left >= kWidth ? load(source) : load_part(source, max_of(left, 0));
    for (int p = 0; p < PARTS; p++) {
      __m256i part = (__m256i)_mm512_cvtneps_pbh(rest);
      _mm256_storeu_si256((__m256i*)(target + p * part_size()), part);
      rest = sub(rest, widen(part));
    }
  }
  void put_half(const bf16* source, long left, uint16_t* target) const {
    uint16_t half[kWidth] = {0};
    memcpy(half, source, (size_t)min_of(max_of(left, 0), kWidth) * 2);
    memcpy(target, half, sizeof half);
  }

  void fill_tile(const T* x, long t) const {
    for (long m = 0; m < tile_rows; m++) {
      long row = t * tile_rows + m;
      uint16_t* target = data + t * tile_size() + m * kTileDepth;
      for (long s = 0; s < steps; s++, target += PARTS * part_size()) {
        for (long i = 0; i < kTileDepth; i += kWidth) {
          long at = s * kTileDepth + i;
          put_half(x + row * k + at, row < rows ? k - at : 0, target + i);
        }
      }
    }
  }
};

// sums (+)= inputs * weights over `steps` steps, for one or two tiles of rows and a panel of columns.
template <int PARTS, int ROW_TILES>
static void multiply_tiles(const uint16_t* inputs, long part_size, long tile_size,
                           const uint32_t* panel, long steps, Fetch fetch, float* sums,
                           long tile_rows, bool accumulate) {
  constexpr long kRowBytes = kPanel * 4;
  float* second = sums + tile_rows * kPanel;
  PF_MEMORY_WRITTEN();
  if (accumulate) {
    _tile_loadd(0, sums, kRowBytes);
    _tile_loadd(1, sums + kWidth, kRowBytes);
    if (ROW_TILES == 2) _tile_loadd(2, second, kRowBytes);
    if (ROW_TILES == 2) _tile_loadd(3, second + kWidth, kRowBytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if (ROW_TILES == 2) _tile_zero(2);
    if (ROW_TILES == 2) _tile_zero(3);
  }
  for (long s = 0; s < steps; s++, panel += kPairWords) {
    for (long i = 0; i < fetch.step; i += 64) prefetch(fetch.at + i);
    fetch.at += fetch.step;
    _tile_loadd(6, panel, kRowBytes);
    _tile_loadd(7, panel + kWidth, kRowBytes);
#pragma GCC unroll 3
    for (int p = 0; p < PARTS; p++, inputs += part_size) {
      _tile_loadd(4, inputs, kTileDepth * 2);
      if (ROW_TILES == 2) _tile_loadd(5, inputs + tile_size, kTileDepth * 2);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (ROW_TILES == 2) _tile_dpbf16ps(2, 5, 6);
      if (ROW_TILES == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, kRowBytes);
  _tile_stored(1, sums + kWidth, kRowBytes);
  if (ROW_TILES == 2) _tile_stored(2, second, kRowBytes);
  if (ROW_TILES == 2) _tile_stored(3, second + kWidth, kRowBytes);
}

template <typename T, int PARTS>
struct TileProduct {
  const LinearArgs& args;
  long k;
  TileInputs<T, PARTS> inputs;

  explicit TileProduct(const LinearArgs& a)
      : args(a), k(a.in_features), inputs(a.rows, a.in_features) {}

  // What is multiplied at once: tiles begin..end of rows, `steps` steps of a panel from `step` on.
  struct Part {
    long begin, end, panel_index, step, steps;
    const uint32_t* panel;
    bool is_once;  // whether the panel is read only once
  };

  // What tiles t and t + 1 fetch meanwhile: a little ahead of themselves if they alone use the part,
  // else their share of the part that follows, in whole lines.
  static Fetch fetch_for(const Part& part, long t) {
    constexpr long kStepBytes = kPairWords * 4;
    if (part.is_once) return {(const char*)part.panel + kTileAheadBytes, kStepBytes};
    long count = ceil_div(part.end - part.begin, 2), bytes = part.steps * kStepBytes;
    long step = ceil_div(kStepBytes, count * 64) * 64;
    return {(const char*)part.panel + bytes + (t - part.begin) / 2 * step * part.steps, step};
  }

  void multiply_part(const Part& part, float* sums) const {
    bool is_last = part.step + part.steps == inputs.steps;
    for (long t = part.begin; t < part.end; t += 2, sums += 2 * inputs.tile_rows * kPanel) {
      long tiles = min_of(2, part.end - t), first = t * inputs.tile_rows;
      long rows = min_of(tiles * inputs.tile_rows, args.rows - first);
      if (is_last) fetch_output<T>(args, first, rows, part.panel_index);
      auto kernel = tiles == 2 ? multiply_tiles<PARTS, 2> : multiply_tiles<PARTS, 1>;
      kernel(inputs.tile(t, part.step), inputs.part_size(), inputs.tile_size(), part.panel,
             part.steps, fetch_for(part, t), sums, inputs.tile_rows, part.step > 0);
      if (is_last) write_panel<T>(args, first, rows, part.panel_index, sums);
    }
  }

  // One panel of columns for tiles begin..end of rows. Where several tiles share it, part by part.
  void multiply_panel(long begin, long end, long index, float* sums) const {
    const uint32_t* panel = (const uint32_t*)args.packed + index * panel_size<uint32_t>(k);
    bool is_once = end - begin <= 2;
    long whole = k / kTileDepth, at_once = is_once ? max_of(whole, 1) : kTileStepsPerPart;
    for (long step = 0; step < whole; step += at_once) {
      long steps = min_of(at_once, whole - step);
      multiply_part({begin, end, index, step, steps, panel + step * kPairWords, is_once}, sums);
    }
    if (whole < inputs.steps) {
      alignas(64) uint32_t last[kPairWords] = {0};  // the rest of the inputs, filled up with zeros
      long begun = whole * kPairWords;
      memcpy(last, panel + begun, (size_t)(panel_size<uint32_t>(k) - begun) * 4);
      multiply_part({begin, end, index, whole, 1, last, false}, sums);
    }
  }

  void run() {
    static thread_local Scratch input_scratch;
    inputs.data = (uint16_t*)input_scratch.bytes((size_t)inputs.bytes());
    long panels = ceil_div(args.out_features, kPanel);
    long tiles_per_block = min_of(inputs.count, kTileRowsPerBlock / kTileRows);
    long blocks = ceil_div(inputs.count, tiles_per_block);
    bool parallel = args.threads > 1 && (double)args.rows * args.out_features * k > kSerialWork;
    TileConfig config(inputs.tile_rows);
    bool parallel_inputs = parallel && inputs.count > 1;  // one tile is filled before threads are there
    if (!parallel_inputs) {
      for (long t = 0; t < inputs.count; t++) inputs.fill_tile((const T*)args.x, t);
    }
#pragma omp parallel num_threads(args.threads) if (parallel)
    {
      static thread_local Scratch sums_scratch;
      float* sums = sums_scratch.floats((size_t)(tiles_per_block * kTileRows * kPanel));
      Tiles tiles(config);
      if (parallel_inputs) {
#pragma omp for schedule(dynamic, 1)
        for (long t = 0; t < inputs.count; t++) inputs.fill_tile((const T*)args.x, t);
      }
#pragma omp for schedule(guided, 1) nowait  // neighbours, as a panel fetches the next one's begin
      for (long task = 0; task < panels * blocks; task++) {
        long block = task / panels, panel = task % panels;
        long begin = block * inputs.count / blocks, end = (block + 1) * inputs.count / blocks;
        multiply_panel(begin, end, panel, sums);
      }
    }
  }
};

}  // namespace PF_ISA
}  // namespace pagefleet
