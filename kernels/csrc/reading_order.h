// In which order the keys and values of a context are read, and how they are fetched ahead of that.
#pragma once

#include "vec.h"

namespace pagefleet {
namespace PF_ISA {

constexpr long kTile = 128;
// A tile is read as so many strands of consecutive tokens side by side, a token of each in turn: a
// core fetches ahead in every page that it is reading from, so that several are on their way at once.
// On Zen 4 decoding from blocks in random order gains a tenth to a quarter by it.
constexpr long kStrands = 8;
constexpr long kStrandTokens = kTile / kStrands;

// The tokens of a tile as they are read. Values are summed in this order.
struct TileOrder {
  uint8_t tokens[kTile] = {};

  constexpr TileOrder() {
    for (long i = 0; i < kTile; i++) {
      tokens[i] = (uint8_t)(i % kStrands * kStrandTokens + i / kStrands);
    }
  }
};
constexpr TileOrder kWholeTile;

// Which tokens of a tile a row sees.
struct Seen {
  long begin, end;

  bool is_whole() const { return begin == 0 && end == kTile; }
};

// Some tokens of a tile, in the order of a whole one. `room` holds them where they are not all.
struct TokenOrder {
  const uint8_t* tokens;
  long count;

  static TokenOrder of(Seen seen, uint8_t room[kTile]) {
    if (seen.is_whole()) return {kWholeTile.tokens, kTile};
    long n = 0;
    for (long slot = 0; slot < kStrandTokens; slot++) {
      for (long token = slot; token < seen.end; token += kStrandTokens) {
        room[n] = (uint8_t)token;
        n += token >= seen.begin;
      }
    }
    return {room, n};
  }
};

// The rows of a tile: of K, then of V, in the order of their tokens.
struct TileRows {
  long begin, length;  // first token in the context; tokens
  TokenOrder order;
  const char* const* rows;

  const char* const* keys() const { return rows; }
  const char* const* values() const { return rows + order.count; }
};

// Walks over rows ahead of their use and fetches them, a few lines with each step of the arithmetic: a
// burst would fill the queue of misses and stall what follows it.
struct Ahead {
  const char *at, *end;  // of the current row
  const char* const *row, *const *last;
  long row_bytes;

  static Ahead over(const char* const* first, const char* const* last, long row_bytes) {
    first = first < last ? first : last;
    return {*first, *first + row_bytes, first, last, row_bytes};
  }
  PF_INLINE_MEMBER void fetch(long bytes) {
    for (long line = 0; line < bytes; line += 64) {
      prefetch_l2(at);
      at += 64;
      if (at < end) continue;
      row += row != last;
      at = *row;
      end = at + row_bytes;
    }
  }
};

// A piece of memory that is read as a whole.
struct Run {
  const char* begin;
  long bytes;
};

// Fetches runs a line at a time, and then nothing more.
struct Trickle {
  const Run *run, *end;
  long at;  // in the run

  PF_INLINE_MEMBER void fetch(long) {
    if (run == end) return;
    prefetch_l2(run->begin + at);
    at += 64;
    if (at < run->bytes) return;
    at = 0;
    run++;
  }
};

}  // namespace PF_ISA
}  // namespace pagefleet
