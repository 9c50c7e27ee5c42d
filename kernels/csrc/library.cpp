// The C interface of the library, and the choice of the instruction set.

#include <string.h>
#include <sys/mman.h>

#ifdef PF_HAVE_amx
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "kernels.h"
#include "layer_stack.h"

namespace pagefleet {

#define PF_DECLARE(isa)                  \
  namespace isa {                        \
  extern const KernelTable kernel_table; \
  }
PF_DECLARE(portable)
#ifdef PF_HAVE_avx2
PF_DECLARE(avx2)
#endif
#ifdef PF_HAVE_avx512
PF_DECLARE(avx512)
#endif
#ifdef PF_HAVE_avx512_bf16
PF_DECLARE(avx512_bf16)
#endif
#ifdef PF_HAVE_amx
PF_DECLARE(amx)
#endif

struct Candidate {
  const char* name;
  const KernelTable* table;
  bool (*supported)();
};

#if defined(__x86_64__)
static bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
static bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
static bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif

#ifdef PF_HAVE_amx
// Tile registers are large, so the system hands them out only to a process that asks for them.
static bool may_use_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

static bool has_amx() {
  unsigned a, b, c, d = 0;
  constexpr unsigned kBFloat16Tiles = 1u << 22, kTiles = 1u << 24;
  bool listed = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kBFloat16Tiles) && (d & kTiles);
  return listed && has_avx512_bf16() && may_use_tiles();
}
#endif

// Best first.
static const Candidate candidates[] = {
#ifdef PF_HAVE_amx
    {"amx", &amx::kernel_table, has_amx},
#endif
#ifdef PF_HAVE_avx512_bf16
    {"avx512_bf16", &avx512_bf16::kernel_table, has_avx512_bf16},
#endif
#ifdef PF_HAVE_avx512
    {"avx512", &avx512::kernel_table, has_avx512},
#endif
#ifdef PF_HAVE_avx2
    {"avx2", &avx2::kernel_table, has_avx2},
#endif
    {"portable", &portable::kernel_table, [] { return true; }},
};

static const Candidate* chosen = nullptr;

static const KernelTable& kernels() { return *chosen->table; }

template <typename Copy>
static void for_each_copy(int64_t count, int32_t threads, int64_t bytes, Copy copy) {
#pragma omp parallel for num_threads(threads) schedule(static) \
    if (threads > 1 && count * bytes > (1 << 20))
  for (int64_t i = 0; i < count; i++) copy(i);
}

}  // namespace pagefleet

using namespace pagefleet;

#define PF_EXPORT extern "C" __attribute__((visibility("default")))

// Chooses an instruction set by name, or the best one when name is null. Returns the name of the
// set in use, or null where this machine or this build lacks the one asked for. Weights packed
// under one set cannot be used under another.
PF_EXPORT const char* pf_select(const char* name) {
  for (const Candidate& candidate : candidates) {
    bool wanted = name == nullptr || strcmp(name, candidate.name) == 0;
    if (wanted && candidate.supported()) {
      chosen = &candidate;
      return candidate.name;
    }
  }
  return nullptr;
}

PF_EXPORT int64_t pf_packed_bytes(int64_t out_features, int64_t in_features, int32_t dtype) {
  return kernels().packed_bytes(out_features, in_features, dtype);
}

// Asks for huge pages under a buffer that will be read as one long stream; a hint, never an error.
PF_EXPORT void pf_advise_huge_pages(void* data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  const uintptr_t huge = 2u << 20;
  uintptr_t begin = ((uintptr_t)data + huge - 1) / huge * huge;
  uintptr_t end = ((uintptr_t)data + (uintptr_t)bytes) / huge * huge;
  if (end > begin) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#endif
}

// Whether every number is a bfloat16: the lower half of each is zero.
PF_EXPORT int32_t pf_fits_bfloat16(const uint32_t* numbers, int64_t count, int32_t threads) {
  constexpr int64_t kPiece = 1 << 14;
  uint32_t lost = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(| : lost) if (threads > 1)
  for (int64_t begin = 0; begin < count; begin += kPiece) {
    if (lost & 0xffff) continue;
    int64_t end = begin + kPiece < count ? begin + kPiece : count;
    for (int64_t i = begin; i < end; i++) lost |= numbers[i];
  }
  return (lost & 0xffff) == 0;
}

PF_EXPORT void pf_pack_linear(const PackArgs* args) { kernels().pack_linear(args); }

PF_EXPORT void pf_pack_codes(const CodesArgs* args) { kernels().pack_codes(args); }

// Columns that a packed weight is filled up to a multiple of.
PF_EXPORT int64_t pf_panel() { return kernels().panel; }

PF_EXPORT void pf_unpack_rows(const void* packed, const float* scale, int64_t in_features,
                              int32_t packed_dtype, const int64_t* rows, int64_t num_rows, void* out,
                              int32_t out_dtype, int32_t threads) {
  kernels().unpack_rows(packed, scale, in_features, packed_dtype, rows, num_rows, out, out_dtype,
                        threads);
}

PF_EXPORT void pf_linear(const LinearArgs* args) { kernels().linear(args); }
PF_EXPORT void pf_attention(const AttentionArgs* args) { kernels().attention(args); }
PF_EXPORT void pf_rope_and_cache(const RopeArgs* args) { kernels().rope_and_cache(args); }

// Bytes that `room` of these arguments has to have.
PF_EXPORT int64_t pf_stack_room(const StackArgs* args) { return LayerStack::room_bytes(*args); }
PF_EXPORT void pf_run_stack(const StackArgs* args) { LayerStack(kernels(), *args).run(); }

PF_EXPORT void pf_rms_norm(const void* x, const void* weight, void* out, int64_t rows,
                           int64_t hidden, float eps, int32_t dtype, int32_t threads) {
  kernels().rms_norm(x, weight, out, rows, hidden, eps, dtype, threads);
}

PF_EXPORT void pf_add_rms_norm(const void* x, void* residual, const void* weight, void* out,
                               int64_t rows, int64_t hidden, float eps, int32_t dtype,
                               int32_t threads) {
  kernels().add_rms_norm(x, residual, weight, out, rows, hidden, eps, dtype, threads);
}

PF_EXPORT void pf_silu_and_mul(const void* gate_up, void* out, int64_t rows, int64_t ffn,
                               int32_t dtype, int32_t threads) {
  kernels().silu_and_mul(gate_up, out, rows, ffn, dtype, threads);
}

PF_EXPORT void pf_gelu_tanh_and_mul(const void* gate_up, void* out, int64_t rows, int64_t ffn,
                                    int32_t dtype, int32_t threads) {
  kernels().gelu_tanh_and_mul(gate_up, out, rows, ffn, dtype, threads);
}

PF_EXPORT void pf_filter_logits(const FilterArgs* args) { kernels().filter_logits(args); }

// Copies the first num_slots[i] slots of block sources[i] to block targets[i], over all layers.
// planes: layers * 2; the other sizes in bytes.
PF_EXPORT void pf_copy_slots(char* pool, const int64_t* sources, const int64_t* targets,
                             const int64_t* num_slots, int64_t count, int64_t planes,
                             int64_t plane_bytes, int64_t slot_bytes, int32_t threads) {
  int64_t block_bytes = planes * plane_bytes;
  for_each_copy(count * planes, threads, plane_bytes, [=](int64_t i) {
    int64_t copy = i / planes, at = i % planes * plane_bytes;
    memcpy(pool + targets[copy] * block_bytes + at, pool + sources[copy] * block_bytes + at,
           (size_t)(num_slots[copy] * slot_bytes));
  });
}

// Past the caches: what is swapped is not read again soon, and what the model needs stays in them.
// Nor is a line read before it is overwritten, which is a third of an ordinary copy's traffic.
// Four pages at a time: the processor's own prefetchers follow a stream only within its page, and
// one page after the other gave 0.7 of this on an Intel Xeon. All are read before one is written,
// or a read may have to wait for the write of another page that it looks like by its address.
static void stream(const char* source, char* target, int64_t bytes) {
  int64_t done = 0;
#ifdef __SSE2__
  constexpr int LINE = 64, AHEAD = 4 * LINE, PAGE = 4096, PAGES = 4, PARTS = 4;
  int64_t end = (uintptr_t)target % LINE == 0 ? bytes - bytes % (PAGES * PAGE) : 0;
  for (; done < end; done += PAGES * PAGE) {
    for (int64_t at = done; at < done + PAGE; at += LINE) {
      __m128i line[PAGES][PARTS];
      for (int page = 0; page < PAGES; page++) {
        const char* from = source + at + page * PAGE;
        _mm_prefetch(from + AHEAD, _MM_HINT_T0);  // never faults, so it may run past the end
        for (int i = 0; i < PARTS; i++) line[page][i] = _mm_loadu_si128((const __m128i*)from + i);
      }
      for (int page = 0; page < PAGES; page++) {
        __m128i* to = (__m128i*)(target + at + page * PAGE);
        for (int i = 0; i < PARTS; i++) _mm_stream_si128(to + i, line[page][i]);
      }
    }
  }
#endif
  memcpy(target + done, source + done, (size_t)(bytes - done));
}

// Whole blocks sources[i] of one pool to targets[i] of another, by the calling thread alone.
PF_EXPORT void pf_copy_blocks(const char* source_pool, const int32_t* sources, char* target_pool,
                              const int32_t* targets, int64_t count, int64_t block_bytes) {
  for (int64_t i = 0; i < count; i++) {
    stream(source_pool + sources[i] * block_bytes, target_pool + targets[i] * block_bytes,
           block_bytes);
  }
#ifdef __SSE2__
  _mm_sfence();  // streamed stores are ordered with nothing else
#endif
}

// Reads `count` blocks of `floats` floats each at base + offsets[i], as fast as memory gives them:
// the yardstick of kernels that are bound by memory. Returns their sum. Blocks one after the other
// the processor fetches by itself, and sooner than it is told to; others it has to be told of.
PF_EXPORT double pf_sum_blocks(const float* base, const int64_t* offsets, int64_t count,
                               int64_t floats, int32_t threads) {
  double total = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : total) if (threads > 1)
  for (int64_t i = 0; i < count; i++) {
    bool is_apart = i + 1 < count && offsets[i + 1] != offsets[i] + floats;
    const float* next = is_apart ? base + offsets[i + 1] : nullptr;
    total += kernels().sum(base + offsets[i], next, floats);
  }
  return total;
}
