// What may be drawn of a row of logits: weights after temperature, top-k, top-p and min-p.
//
// Weights are exp((logit - best) / temperature), so the best is 1 and all are from 0 to 1. The bits
// of such floats order as integers: a border among them is found digit by digit, with no sort.

#include "kernels.h"
#include "vec.h"

namespace pagefleet {
namespace PF_ISA {

constexpr float kGreatestExponent = 87.0f;  // past it, downwards, a weight is 0
constexpr float kColdest = 1e-6f, kHottest = 3.0e38f;
constexpr int kDigitBits = 11;
constexpr long kDigits = 1 << kDigitBits;

// Weights of a row into `out`; returns their sum.
static double weigh_logits(const float* logits, long vocab, float temperature, float* out) {
  Vec top = splat(-3.0e38f);
  long i = 0;
  for (; i + kWidth <= vocab; i += kWidth) top = larger(top, load(logits + i));
  float best = max_of(top);
  for (; i < vocab; i++) best = logits[i] > best ? logits[i] : best;
  float clamped = temperature < kColdest ? kColdest : temperature;
  float scale = 1.0f / (clamped > kHottest ? kHottest : clamped);
  double total = 0;
  for (i = 0; i < vocab; i += kWidth) {
    long n = min_of(kWidth, vocab - i);
    Vec logit = n == kWidth ? load(logits + i) : load_part(logits + i, n);
    Vec power = mul(sub(logit, splat(best)), splat(scale));
    Vec weight = where_small(power, kGreatestExponent, exp_of(power), zero());
    if (n == kWidth) {
      store(out + i, weight);
    } else {
      weight = keep_first(weight, n, zero());
      store_part(out + i, weight, n);
    }
    total += sum_of(weight);
  }
  return total;
}

// Where a row is cut: what is below `value` goes, and of its equals all but the first `num_equal`.
struct Border {
  float value;
  long num_equal;
};

// The largest value v of `values` for which reach(how many are >= v, their sum) is true.
template <typename Reach>
static Border find_border(const float* values, long count, Reach reach) {
  static thread_local Scratch scratch;
  double* mass = (double*)scratch.bytes(kDigits * (sizeof(double) + sizeof(int64_t)));
  int64_t* number = (int64_t*)(mass + kDigits);
  uint32_t prefix = 0;
  double mass_above = 0;
  long number_above = 0;
  // A float of at most 1 has 30 bits; the digits are of 8, 11 and 11.
  for (int shift = 2 * kDigitBits; shift >= 0; shift -= kDigitBits) {
    memset(mass, 0, kDigits * (sizeof(double) + sizeof(int64_t)));
    for (long i = 0; i < count; i++) {
      uint32_t bits = float_to_bits(values[i]);
      // Beyond the digits above, which are those of the prefix.
      if (((uint64_t)bits >> (shift + kDigitBits)) != ((uint64_t)prefix >> (shift + kDigitBits))) {
        continue;
      }
      uint32_t digit = bits >> shift & (kDigits - 1);
      mass[digit] += values[i];
      number[digit]++;
    }
    long digit = kDigits - 1, last = -1;
    for (; digit >= 0; digit--) {
      if (number[digit] == 0) continue;
      last = digit;
      if (reach(number_above + number[digit], mass_above + mass[digit])) break;
      number_above += number[digit];
      mass_above += mass[digit];
    }
    if (digit < 0) {  // never reached, by rounding: the smallest there is
      digit = last;
      number_above -= number[digit];
      mass_above -= mass[digit];
    }
    prefix |= (uint32_t)digit << shift;
  }
  float value = bits_to_float(prefix);
  long needed = 1;
  while (!reach(number_above + needed, mass_above + (double)needed * value) && needed < count) needed++;
  return {value, needed};
}

// Those of at least `least`, side by side; returns how many.
static long gather_from(const float* weights, long vocab, float least, float* out) {
  long count = 0;
  for (long i = 0; i < vocab; i += kWidth) {
    long n = min_of(kWidth, vocab - i);
    if (n == kWidth && max_of(load(weights + i)) < least) continue;
    for (long j = 0; j < n; j++) {
      out[count] = weights[i + j];
      count += weights[i + j] >= least;
    }
  }
  return count;
}

// Cuts a row and returns the sum of what stays.
static double cut_row(float* weights, long vocab, Border border) {
  double total = 0;
  for (long i = 0; i < vocab; i += kWidth) {
    long n = min_of(kWidth, vocab - i);
    if (n == kWidth && max_of(load(weights + i)) < border.value) {
      store(weights + i, zero());
      continue;
    }
    for (long j = i; j < i + n; j++) {
      bool stays = weights[j] > border.value;
      if (weights[j] == border.value) stays = border.num_equal-- > 0;
      weights[j] = stays ? weights[j] : 0.0f;
      total += weights[j];
    }
  }
  return total;
}

// The border is looked for among the large weights first: mostly it is there.
template <typename Reach>
static double keep_reached(float* weights, long vocab, float* candidates, Reach reach) {
  const float leasts[] = {1.0f / 64, 1.0f / 4096, 0.0f};
  for (float least : leasts) {
    long count = gather_from(weights, vocab, least, candidates);
    double mass = 0;
    for (long i = 0; i < count; i++) mass += candidates[i];
    if (least > 0 && !reach(count, mass)) continue;
    return cut_row(weights, vocab, find_border(candidates, count, reach));
  }
  return 0;
}

static void filter_row(const FilterArgs& args, long row) {
  static thread_local Scratch scratch;
  long vocab = args.vocab;
  float* candidates = scratch.floats((size_t)(vocab + kWidth));
  float* weights = args.weights + row * vocab;
  double total = weigh_logits(args.logits + row * args.logits_stride, vocab,
                              args.temperature[row], weights);
  int64_t top_k = args.top_k[row];
  if (top_k > 0 && top_k < vocab) {
    total = keep_reached(weights, vocab, candidates,
                         [=](long number, double) { return number >= top_k; });
  }
  if (args.top_p[row] < 1.0f) {
    double target = (double)args.top_p[row] * total;
    keep_reached(weights, vocab, candidates,
                 [=](long, double mass) { return mass >= target; });
  }
  if (args.min_p[row] > 0.0f) {
    float least = args.min_p[row] < 1.0f ? args.min_p[row] : 1.0f;
    cut_row(weights, vocab, {least, vocab});
  }
}

static void filter_logits(const FilterArgs* args) {
#pragma omp parallel for num_threads(args->threads) schedule(dynamic, 1) \
    if (args->threads > 1 && args->rows > 1)
  for (long row = 0; row < args->rows; row++) filter_row(*args, row);
}

}  // namespace PF_ISA
}  // namespace pagefleet
