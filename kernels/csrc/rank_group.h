// The memory that the ranks of one host share: who is there, how far each has come, and how one
// waits for another. Knows nothing of what is exchanged.
//
//   Segment header │ slots [rank][2][slot_bytes] │ channel [2][slot_bytes]
//
// A rank is alive while it holds the lock on its own byte of the file. The kernel drops the lock
// when the process ends in whatever way, a zombie's too, so a reused pid deceives nobody.
//
// A collective passes one or two phases. `arrivals` counts ranks over all phases; whoever completes
// a phase raises `generation` and wakes the rest: one wake-up, however many ranks.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>

namespace pagefleet {

constexpr int kMaxRanks = 64;
constexpr uint64_t kMagic = 0x70666c7472616e6bULL;
// Between two looks at whether the peers live: at first, and after a long wait (an idle replica).
constexpr int64_t kFirstLookNs = 20'000'000;
constexpr int64_t kIdleLookNs = 200'000'000;

enum Status : int32_t {
  kOk = 0,
  kTimeout = 1,   // a rank did not come
  kLost = 2,      // a rank's process ended, or it closed the group
  kAborted = 3,   // a rank gave up, for one of the other reasons or by its own wish
  kMismatch = 4,  // a rank entered another collective than this one
};

enum Presence : uint32_t { kAbsent = 0, kAttached = 1, kClosed = 2 };

// A counter that others wait for. `waiters` spares the wake-up call where nobody sleeps.
struct alignas(64) Word {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> waiters;
};

// What a rank has entered; `phase` counts from 1, so that zeroed memory means "nothing".
struct Entry {
  std::atomic<uint32_t> phase;
  int32_t operation;
  int32_t dtype;
  int32_t padding;
  int64_t size;
};

struct alignas(64) RankState {
  std::atomic<uint32_t> presence;
  Entry entries[2];  // by parity of the phase
  Word chunks_read;
};

struct Segment {
  uint64_t magic;
  int64_t slot_bytes;
  int32_t world_size;
  std::atomic<int32_t> failed_rank;  // 1 + the rank that gave up first, 0 = none
  alignas(64) std::atomic<uint32_t> arrivals;
  Word generation;   // phases that all ranks have reached
  Word chunks_sent;  // by rank 0, into the channel
  RankState ranks[kMaxRanks];
};

// Counters wrap: only their difference means something.
inline bool has_reached(uint32_t value, uint32_t target) { return (int32_t)(value - target) >= 0; }

inline int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

inline void futex_wait(std::atomic<uint32_t>* word, uint32_t seen, int64_t ns) {
  timespec limit{ns / 1'000'000'000, ns % 1'000'000'000};
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

inline void wake_all(Word* word) {
  syscall(SYS_futex, &word->value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Sequentially consistent on both sides: either the writer sees the waiter or the waiter the value.
inline void publish(Word* word, uint32_t value) {
  word->value.store(value, std::memory_order_seq_cst);
  if (word->waiters.load(std::memory_order_seq_cst) != 0) wake_all(word);
}

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline int64_t header_bytes() { return ((int64_t)sizeof(Segment) + 4095) / 4096 * 4096; }

inline int64_t segment_bytes(int world_size, int64_t slot_bytes) {
  return header_bytes() + 2 * (world_size + 1) * slot_bytes;
}

inline bool lock_byte(int fd, int rank, int command, short* kind) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  bool ok = fcntl(fd, command, &lock) == 0;
  *kind = lock.l_type;
  return ok;
}

inline bool is_held(int fd, int rank) {
  short kind;
  return !lock_byte(fd, rank, F_OFD_GETLK, &kind) || kind != F_UNLCK;
}

// One rank's view of the segment. One thread at a time, `abort` and `check` apart.
struct RankGroup {
  Segment* segment;
  char* slots;
  int64_t bytes;
  int fd, rank, world_size, spins;
  int64_t timeout_ns;
  uint32_t phase = 0;               // phases entered so far
  uint32_t operations = 0;          // slots written so far: their parity is the slot
  uint32_t reusable_at[2] = {0, 0};  // generation from which nobody reads that slot any more
  uint32_t chunks = 0;              // sent or received over the channel

  char* slot(int owner, int parity) {
    return slots + (2 * (int64_t)owner + parity) * segment->slot_bytes;
  }
  char* channel(uint32_t chunk) { return slot(world_size, (int)(chunk & 1)); }

  bool is_gone(int peer) {
    uint32_t presence = segment->ranks[peer].presence.load(std::memory_order_acquire);
    return presence == kClosed || (presence == kAttached && !is_held(fd, peer));
  }

  bool has_arrived(int peer, uint32_t target) {
    Entry& entry = segment->ranks[peer].entries[(target - 1) & 1];
    return entry.phase.load(std::memory_order_acquire) == target;
  }

  void abort() {
    int32_t none = 0;
    segment->failed_rank.compare_exchange_strong(none, rank + 1);
    wake_all(&segment->generation);
    wake_all(&segment->chunks_sent);
    for (int peer = 0; peer < world_size; ++peer) wake_all(&segment->ranks[peer].chunks_read);
  }

  int32_t fail(int32_t status, int peer, int32_t* culprit) {
    *culprit = peer;
    abort();
    return status;
  }

  // `lost` looks for a peer without which the value cannot come; `missing` names one that is late.
  template <typename Lost, typename Missing>
  int32_t wait(Word* word, uint32_t target, int64_t limit_ns, int32_t* culprit, Lost lost,
               Missing missing) {
    for (int spin = 0; spin <= spins; ++spin) {
      if (has_reached(word->value.load(std::memory_order_acquire), target)) return kOk;
      pause_briefly();
    }
    int64_t deadline = limit_ns < 0 ? INT64_MAX : now_ns() + limit_ns;
    word->waiters.fetch_add(1, std::memory_order_seq_cst);
    int32_t status = sleep(word, target, deadline, culprit, lost);
    word->waiters.fetch_sub(1, std::memory_order_seq_cst);
    if (status == kTimeout) *culprit = missing();
    return status;
  }

  template <typename Lost>
  int32_t sleep(Word* word, uint32_t target, int64_t deadline, int32_t* culprit, Lost lost) {
    int64_t interval = kFirstLookNs, next_look = now_ns() + interval;
    for (;;) {
      uint32_t seen = word->value.load(std::memory_order_seq_cst);
      if (has_reached(seen, target)) return kOk;
      int32_t failed = segment->failed_rank.load(std::memory_order_seq_cst);
      if (failed != 0) {
        *culprit = failed - 1;
        return kAborted;
      }
      int64_t now = now_ns();
      if (now >= next_look) {
        int gone = lost();
        // It may have done its part and left between the look at the value and the look at it.
        if (has_reached(word->value.load(std::memory_order_seq_cst), target)) return kOk;
        if (gone >= 0) return fail(kLost, gone, culprit);
        interval = interval * 2 < kIdleLookNs ? interval * 2 : kIdleLookNs;
        next_look = now + interval;
      }
      if (now >= deadline) return kTimeout;
      int64_t until = next_look < deadline ? next_look : deadline;
      futex_wait(&word->value, seen, until > now ? until - now : 1);
    }
  }

  int32_t wait_generation(uint32_t target, int32_t* culprit) {
    auto lost = [&] {
      for (int peer = 0; peer < world_size; ++peer) {
        if (peer != rank && !has_arrived(peer, target) && is_gone(peer)) return peer;
        if (peer != rank && !is_held_if_attached(peer)) return peer;
      }
      return -1;
    };
    auto missing = [&] {
      for (int peer = 0; peer < world_size; ++peer)
        if (!has_arrived(peer, target)) return peer;
      return rank;
    };
    int32_t status =
        wait(&segment->generation, target, timeout_ns, culprit, lost, missing);
    if (status == kTimeout) abort();
    return status;
  }

  // A rank that closed had its turn; one that was killed may have died halfway through arriving.
  bool is_held_if_attached(int peer) {
    uint32_t presence = segment->ranks[peer].presence.load(std::memory_order_acquire);
    return presence != kAttached || is_held(fd, peer);
  }

  // Enter the next phase. What this rank wrote before is seen by whoever waits for the phase.
  int32_t arrive(int32_t operation, int32_t dtype, int64_t size, int32_t* culprit) {
    int32_t failed = segment->failed_rank.load(std::memory_order_relaxed);
    if (failed != 0) {
      *culprit = failed - 1;
      return kAborted;
    }
    int32_t status = wait_generation(phase, culprit);
    if (status != kOk) return status;
    phase += 1;
    Entry& entry = segment->ranks[rank].entries[(phase - 1) & 1];
    entry.operation = operation;
    entry.dtype = dtype;
    entry.size = size;
    entry.phase.store(phase, std::memory_order_release);
    uint32_t arrived = segment->arrivals.fetch_add(1, std::memory_order_acq_rel) + 1;
    if (arrived == phase * (uint32_t)world_size) publish(&segment->generation, phase);
    return kOk;
  }

  // Wait until all ranks are in the phase that this one entered last, and in the same collective.
  int32_t meet(int32_t* culprit) {
    int32_t status = wait_generation(phase, culprit);
    if (status != kOk) return status;
    const Entry& mine = segment->ranks[rank].entries[(phase - 1) & 1];
    for (int peer = 0; peer < world_size; ++peer) {
      const Entry& other = segment->ranks[peer].entries[(phase - 1) & 1];
      if (other.operation != mine.operation || other.dtype != mine.dtype || other.size != mine.size)
        return fail(kMismatch, peer, culprit);
    }
    return kOk;
  }

  // The slot of the next collective, once nobody reads what it held.
  int32_t take_slot(int* parity, int32_t* culprit) {
    *parity = (int)(operations++ & 1);
    return wait_generation(reusable_at[*parity], culprit);
  }

  // The slot is free as soon as everyone has entered the phase after this collective's last.
  void give_slot(int parity) { reusable_at[parity] = phase + 1; }
};

}  // namespace pagefleet
