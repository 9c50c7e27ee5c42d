// Collectives between the ranks of one host through shared memory, with a plain C interface.
//
// Sums are taken in rank order, in float32, and rounded once, so they are bitwise equal on all ranks
// and equal to the same loop run by one process. Large tensors go through the slots in chunks; two
// slots per rank alternate, so a rank never waits for others to have read what it wrote last.

#include <string.h>

#include <new>

#include "rank_group.h"

#define PF_EXPORT extern "C" __attribute__((visibility("default")))

// Compiled for several instruction sets, chosen when the library loads.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define PF_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define PF_CLONES
#endif

using namespace pagefleet;

namespace {

enum Operation : int32_t { kBarrier = 1, kAllReduce = 2, kGather = 3 };
enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1 };

constexpr int64_t kTile = 2048;  // elements summed at a time: they stay in the first-level cache
constexpr int64_t kTwoPhaseBytes = 512 * 1024;  // read by one rank, from where on sharing pays

PF_CLONES void add_f32(float* sum, const float* part, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum[i] += part[i];
}

PF_CLONES void add_bf16(float* sum, const uint16_t* part, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits = (uint32_t)part[i] << 16;
    float value;
    memcpy(&value, &bits, 4);
    sum[i] += value;
  }
}

// Round to nearest, ties to even; a NaN stays a NaN.
PF_CLONES void round_bf16(const float* sum, uint16_t* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    memcpy(&bits, &sum[i], 4);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    out[i] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
  }
}

int64_t element_bytes(int32_t dtype) { return dtype == kFloat32 ? 4 : 2; }

// out[i] = part[0][i] + part[1][i] + …, elements [begin, end) of every rank's slot. `out` may be
// one of the parts: a tile is read from all of them before it is written.
void sum_slots(RankGroup* group, int parity, int32_t dtype, int64_t begin, int64_t end, void* out) {
  alignas(64) float sum[kTile];
  for (int64_t first = begin; first < end; first += kTile) {
    int64_t count = end - first < kTile ? end - first : kTile;
    // Starts from -0.0, the true zero of addition: a lone -0.0 stays what it is.
    for (int64_t i = 0; i < count; ++i) sum[i] = -0.0f;
    for (int rank = 0; rank < group->world_size; ++rank) {
      const char* part = group->slot(rank, parity) + first * element_bytes(dtype);
      if (dtype == kFloat32)
        add_f32(sum, (const float*)part, count);
      else
        add_bf16(sum, (const uint16_t*)part, count);
    }
    char* target = (char*)out + first * element_bytes(dtype);
    if (dtype == kFloat32)
      memcpy(target, sum, (size_t)count * 4);
    else
      round_bf16(sum, (uint16_t*)target, count);
  }
}

// Every rank sums everything: one meeting.
int32_t reduce_in_one_phase(RankGroup* group, int parity, char* data, int64_t count, int32_t dtype,
                            int32_t* culprit) {
  int32_t status = group->arrive(kAllReduce, dtype, count, culprit);
  if (status == kOk) status = group->meet(culprit);
  if (status == kOk) sum_slots(group, parity, dtype, 0, count, data);
  return status;
}

int64_t share_start(int64_t count, int rank, int world_size) {
  // In units of a cache line, so that no two ranks write into one.
  int64_t lines = (count + 31) / 32;
  int64_t start = lines * rank / world_size * 32;
  return start < count ? start : count;
}

// Each rank sums its share into its own slot, then all collect the shares: two meetings, less to
// read. Of every slot, share r is read by rank r alone, so rank r may write over its own.
int32_t reduce_in_two_phases(RankGroup* group, int parity, char* data, int64_t count, int32_t dtype,
                             int32_t* culprit) {
  int32_t status = group->arrive(kAllReduce, dtype, count, culprit);
  if (status == kOk) status = group->meet(culprit);
  if (status != kOk) return status;
  int world_size = group->world_size;
  int64_t begin = share_start(count, group->rank, world_size);
  int64_t end = share_start(count, group->rank + 1, world_size);
  sum_slots(group, parity, dtype, begin, end, group->slot(group->rank, parity));
  status = group->arrive(kAllReduce, dtype, count, culprit);
  if (status == kOk) status = group->meet(culprit);
  if (status != kOk) return status;
  for (int rank = 0; rank < world_size; ++rank) {
    int64_t first = share_start(count, rank, world_size) * element_bytes(dtype);
    int64_t last = share_start(count, rank + 1, world_size) * element_bytes(dtype);
    memcpy(data + first, group->slot(rank, parity) + first, (size_t)(last - first));
  }
  return kOk;
}

// A rank's part has `rows` rows of row_bytes[rank] bytes; bytes [begin, end) of it go to their
// places in `out`, whose rows are the ranks' rows side by side.
void place_rows(char* out, const char* part, int64_t begin, int64_t end, int64_t part_row,
                int64_t offset, int64_t out_row) {
  while (begin < end) {
    int64_t row = begin / part_row, column = begin % part_row;
    int64_t length = part_row - column < end - begin ? part_row - column : end - begin;
    memcpy(out + row * out_row + offset + column, part, (size_t)length);
    part += length;
    begin += length;
  }
}

void collect_round(RankGroup* group, int parity, int64_t round, const int64_t* row_bytes,
                   int64_t rows, char* out) {
  int64_t out_row = 0, offset = 0, slot_bytes = group->segment->slot_bytes;
  for (int rank = 0; rank < group->world_size; ++rank) out_row += row_bytes[rank];
  for (int rank = 0; rank < group->world_size; offset += row_bytes[rank++]) {
    int64_t begin = round * slot_bytes, end = begin + slot_bytes;
    if (end > rows * row_bytes[rank]) end = rows * row_bytes[rank];
    place_rows(out, group->slot(rank, parity), begin, end, row_bytes[rank], offset, out_row);
  }
}

}  // namespace

PF_EXPORT int64_t pf_group_bytes(int32_t world_size, int64_t slot_bytes) {
  return segment_bytes(world_size, slot_bytes);
}

// Whether a living process holds the rank's byte of the file.
PF_EXPORT int32_t pf_group_is_held(int32_t fd, int32_t rank) { return is_held(fd, rank); }

// Map the file and take the rank's place in it; rank 0 does so before the file has its name, and
// lays it out. The descriptor belongs to the group from here on. Null: see errno.
PF_EXPORT void* pf_group_attach(int32_t fd, int32_t rank, int32_t world_size, int64_t slot_bytes,
                                int64_t timeout_ns, int32_t spins) {
  int64_t bytes = segment_bytes(world_size, slot_bytes);
  short kind;
  if (!lock_byte(fd, rank, F_OFD_SETLK, &kind)) return nullptr;
  void* memory = mmap(nullptr, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return nullptr;
  Segment* segment = (Segment*)memory;
  if (rank == 0) {
    segment->slot_bytes = slot_bytes;
    segment->world_size = world_size;
    segment->magic = kMagic;
  }
  if (segment->magic != kMagic || segment->world_size != world_size ||
      segment->slot_bytes != slot_bytes) {
    munmap(memory, (size_t)bytes);
    errno = EINVAL;
    return nullptr;
  }
  RankGroup* group = new (std::nothrow) RankGroup{};
  if (group == nullptr) return nullptr;
  group->segment = segment;
  group->slots = (char*)memory + header_bytes();
  group->bytes = bytes;
  group->fd = fd;
  group->rank = rank;
  group->world_size = world_size;
  group->spins = spins;
  group->timeout_ns = timeout_ns;
  segment->ranks[rank].presence.store(kAttached, std::memory_order_release);
  return group;
}

PF_EXPORT void pf_group_abort(RankGroup* group) { group->abort(); }

// Leave: who still waits for this rank fails at its next look.
PF_EXPORT void pf_group_close(RankGroup* group) {
  Segment* segment = group->segment;
  segment->ranks[group->rank].presence.store(kClosed, std::memory_order_seq_cst);
  munmap(segment, (size_t)group->bytes);
  close(group->fd);
  delete group;
}

// Is anyone gone, or has anyone given up? Sets `culprit` where so.
PF_EXPORT int32_t pf_group_check(RankGroup* group, int32_t* culprit) {
  int32_t failed = group->segment->failed_rank.load(std::memory_order_acquire);
  if (failed != 0) {
    *culprit = failed - 1;
    return kAborted;
  }
  for (int peer = 0; peer < group->world_size; ++peer)
    if (peer != group->rank && group->is_gone(peer)) return group->fail(kLost, peer, culprit);
  return kOk;
}

PF_EXPORT int32_t pf_group_barrier(RankGroup* group, int64_t timeout_ns, int32_t* culprit) {
  int64_t usual = group->timeout_ns;
  group->timeout_ns = timeout_ns;
  int32_t status = group->arrive(kBarrier, 0, 0, culprit);
  if (status == kOk) status = group->meet(culprit);
  group->timeout_ns = usual;
  return status;
}

// data: `count` elements, replaced by the sum over all ranks.
PF_EXPORT int32_t pf_group_all_reduce(RankGroup* group, void* data, int64_t count, int32_t dtype,
                                      int32_t* culprit) {
  int64_t element = element_bytes(dtype), largest = group->segment->slot_bytes / element;
  for (int64_t first = 0; first < count; first += largest) {
    int64_t part = count - first < largest ? count - first : largest;
    char* place = (char*)data + first * element;
    int parity;
    int32_t status = group->take_slot(&parity, culprit);
    if (status != kOk) return status;
    memcpy(group->slot(group->rank, parity), place, (size_t)(part * element));
    bool shares = group->world_size > 2 && part * element * group->world_size >= kTwoPhaseBytes;
    status = shares ? reduce_in_two_phases(group, parity, place, part, dtype, culprit)
                    : reduce_in_one_phase(group, parity, place, part, dtype, culprit);
    if (status != kOk) return status;
    group->give_slot(parity);
  }
  return kOk;
}

// data: `rows` rows of row_bytes[rank] bytes. out: rows of all ranks' bytes side by side, or null
// on a rank that only gives and does not wait for the others.
PF_EXPORT int32_t pf_group_gather(RankGroup* group, const void* data, int64_t rows,
                                  const int64_t* row_bytes, void* out, int32_t* culprit) {
  int64_t slot_bytes = group->segment->slot_bytes, longest = 0, total = 0;
  for (int rank = 0; rank < group->world_size; ++rank) {
    int64_t bytes = rows * row_bytes[rank];
    longest = bytes > longest ? bytes : longest;
    total += bytes;
  }
  int64_t mine = rows * row_bytes[group->rank];
  for (int64_t round = 0; round * slot_bytes < longest; ++round) {
    int parity;
    int32_t status = group->take_slot(&parity, culprit);
    if (status != kOk) return status;
    int64_t begin = round * slot_bytes;
    int64_t length = mine - begin < slot_bytes ? mine - begin : slot_bytes;
    if (length > 0)
      memcpy(group->slot(group->rank, parity), (const char*)data + begin, (size_t)length);
    status = group->arrive(kGather, 0, total, culprit);
    if (status == kOk && out != nullptr) status = group->meet(culprit);
    if (status != kOk) return status;
    if (out != nullptr) collect_round(group, parity, round, row_bytes, rows, (char*)out);
    group->give_slot(parity);
  }
  return kOk;
}

// Rank 0: pass a message on to all others. Returns when it stands in the channel, read or not.
PF_EXPORT int32_t pf_group_send(RankGroup* group, const void* message, int64_t size,
                                int32_t* culprit) {
  int64_t room = group->segment->slot_bytes - (int64_t)sizeof(int64_t), sent = 0;
  do {
    // The buffer two chunks back is written over: everybody must have read it.
    for (int peer = 1; peer < group->world_size; ++peer) {
      Word* word = &group->segment->ranks[peer].chunks_read;
      int32_t status = group->wait(
          word, group->chunks - 1, group->timeout_ns, culprit,
          [&] { return group->is_gone(peer) ? peer : -1; }, [&] { return peer; });
      if (status == kTimeout) group->abort();
      if (status != kOk) return status;
    }
    char* buffer = group->channel(group->chunks);
    int64_t length = size - sent < room ? size - sent : room;
    memcpy(buffer, &size, sizeof(size));
    memcpy(buffer + sizeof(size), (const char*)message + sent, (size_t)length);
    sent += length;
    group->chunks += 1;
    publish(&group->segment->chunks_sent, group->chunks);
  } while (sent < size);
  return kOk;
}

// Others: wait up to limit_ns for the next message (kTimeout harms nothing) and tell its size.
PF_EXPORT int32_t pf_group_await_message(RankGroup* group, int64_t limit_ns, int64_t* size,
                                         int32_t* culprit) {
  int32_t status = group->wait(
      &group->segment->chunks_sent, group->chunks + 1, limit_ns, culprit,
      [&] { return group->is_gone(0) ? 0 : -1; }, [] { return 0; });
  if (status == kOk) memcpy(size, group->channel(group->chunks), sizeof(*size));
  return status;
}

// Take the message that was awaited: `size` bytes.
PF_EXPORT int32_t pf_group_take_message(RankGroup* group, void* message, int64_t size,
                                        int32_t* culprit) {
  int64_t room = group->segment->slot_bytes - (int64_t)sizeof(int64_t), taken = 0;
  Word* mine = &group->segment->ranks[group->rank].chunks_read;
  do {
    int64_t ignored;
    int32_t status = pf_group_await_message(group, group->timeout_ns, &ignored, culprit);
    if (status != kOk) return status;
    int64_t length = size - taken < room ? size - taken : room;
    memcpy((char*)message + taken, group->channel(group->chunks) + sizeof(int64_t), (size_t)length);
    taken += length;
    group->chunks += 1;
    publish(mine, group->chunks);
  } while (taken < size);
  return kOk;
}
