#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace microtome {
namespace {

// Tokens are put into bins by how far below the largest logit they are, in units of temperature / kBinsPerUnit. A bin's
// tokens are all likelier than those of the next, and equally likely ones share a bin: only bins in which something is
// decided are ever put in order. The last bin takes what is further below than all others.
constexpr int kBinsPerUnit = 32;
constexpr int kBins = 40 * kBinsPerUnit + 1;
constexpr int64_t kBlock = 512;  // tokens whose mass is added up at a time, where they stay in the order of their ids

struct Scratch {
  std::vector<float> logits;
  std::vector<double> weights;  // exp((logit - largest) / temperature)
  std::vector<int32_t> bins;
  std::vector<int32_t> found;  // tokens of one bin
  double mass[kBins];
  int64_t count[kBins];
};

// e^x for x <= 0, within two units in the last place; 0 below -708. Written out so that loops over it run in vectors.
inline double exponential(double x) {
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: adding it leaves an integer in the low bits
  const double clamped = x < -708.0 ? -708.0 : x;
  const double shifted = clamped * 1.4426950408889634074 + kRound;
  const double n = shifted - kRound;
  const double r = (clamped - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  int64_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 1023) << 52;
  double scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return x < -708.0 ? 0.0 : p * scale;
}

const float* widened(const void* logits, Type type, int64_t vocabulary, Scratch& s) {
  if (type == Type::F32) return static_cast<const float*>(logits);
  const auto* narrow = static_cast<const uint16_t*>(logits);
  s.logits.resize(vocabulary);
  for (int64_t i = 0; i < vocabulary; ++i) {
    const uint32_t bits = static_cast<uint32_t>(narrow[i]) << 16;
    std::memcpy(&s.logits[i], &bits, sizeof bits);
  }
  return s.logits.data();
}

float largest_of(const float* logits, int64_t vocabulary) {
  constexpr int kLanes = 16;
  float lanes[kLanes];
  std::fill(lanes, lanes + kLanes, -INFINITY);
  int64_t i = 0;
  for (; i + kLanes <= vocabulary; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = logits[i + lane] > lanes[lane] ? logits[i + lane] : lanes[lane];
  float largest = -INFINITY;
  for (float lane : lanes) largest = lane > largest ? lane : largest;
  for (; i < vocabulary; ++i) largest = logits[i] > largest ? logits[i] : largest;
  return largest;
}

void weigh(const float* logits, float largest, double temperature, int64_t vocabulary, Scratch& s) {
  s.weights.resize(vocabulary);
  double* weights = s.weights.data();
  const double top = largest;
  for (int64_t i = 0; i < vocabulary; ++i) weights[i] = exponential((logits[i] - top) / temperature);
}

double sum_of(const double* values, int64_t count) {
  constexpr int kLanes = 8;
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += values[i + lane];
  double sum = 0;
  for (double lane : lanes) sum += lane;
  for (; i < count; ++i) sum += values[i];
  return sum;
}

// The first token, by id, whose running mass exceeds the coin's share; the last with any mass where rounding leaves none.
int64_t draw_by_id(const Row& row, int64_t vocabulary, Scratch& s) {
  const double* weights = s.weights.data();
  const int64_t blocks = (vocabulary + kBlock - 1) / kBlock;
  double total = 0;
  std::vector<double> before(blocks);
  for (int64_t block = 0; block < blocks; ++block) {
    before[block] = total;
    total += sum_of(weights + block * kBlock, std::min(kBlock, vocabulary - block * kBlock));
  }
  const double target = row.coin * total;
  int64_t block = std::upper_bound(before.begin(), before.end(), target) - before.begin() - 1;
  for (block = std::max<int64_t>(block, 0); block < blocks; ++block) {
    double running = before[block];
    const int64_t end = std::min((block + 1) * kBlock, vocabulary);
    for (int64_t token = block * kBlock; token < end; ++token) {
      running += weights[token];
      if (running > target) return token;
    }
  }
  double running = 0;
  int64_t last = 0;
  for (int64_t token = 0; token < vocabulary; ++token) {
    if (running + weights[token] > running) last = token;
    running += weights[token];
  }
  return last;
}

void bin(const float* logits, float largest, const Row& row, int64_t vocabulary, Scratch& s) {
  s.bins.resize(vocabulary);
  std::fill(s.mass, s.mass + kBins, 0.0);
  std::fill(s.count, s.count + kBins, int64_t{0});
  int32_t* bins = s.bins.data();
  const double top = largest, unit = kBinsPerUnit / row.temperature;
  for (int64_t i = 0; i < vocabulary; ++i) {
    const double below = (top - logits[i]) * unit;
    bins[i] = below < kBins - 1 ? static_cast<int32_t>(below) : kBins - 1;  // a NaN goes last, too
  }
  for (int64_t i = 0; i < vocabulary; ++i) {
    s.mass[bins[i]] += s.weights[i];
    ++s.count[bins[i]];
  }
}

// The tokens of one bin in their order: the likelier first, then the lower id.
const std::vector<int32_t>& ordered(const float* logits, int wanted, int64_t vocabulary, Scratch& s) {
  s.found.clear();
  const int32_t* bins = s.bins.data();
  for (int64_t begin = 0; begin < vocabulary; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, vocabulary);
    int some = 0;
    for (int64_t i = begin; i < end; ++i) some |= bins[i] == wanted;
    if (!some) continue;
    for (int64_t i = begin; i < end; ++i)
      if (bins[i] == wanted) s.found.push_back(static_cast<int32_t>(i));
  }
  std::sort(s.found.begin(), s.found.end(), [logits](int32_t a, int32_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  });
  return s.found;
}

// The first token, in order of the logits, whose running mass exceeds the coin's share of the mass of those kept.
int64_t draw_by_rank(const float* logits, float largest, const Row& row, int64_t vocabulary, Scratch& s) {
  bin(logits, largest, row, vocabulary, s);
  const double limit = row.top_p * sum_of(s.weights.data(), vocabulary);
  // Which tokens are kept: whole bins, then the head of one.
  int64_t kept = 0;
  double mass = 0;
  int cut = 0;
  int64_t kept_of_cut = 0;
  for (;; ++cut) {
    if (cut == kBins) break;
    if (!s.count[cut]) continue;
    const double least = exponential(-(cut + 1.001) / kBinsPerUnit);  // below the weight of any token in the bin
    const bool whole = kept + s.count[cut] <= row.top_k && mass + s.mass[cut] <= limit &&
                       (row.min_p <= 0 || (cut < kBins - 1 && least > row.min_p));
    if (whole) {
      kept += s.count[cut];
      mass += s.mass[cut];
      continue;
    }
    kept_of_cut = 0;
    for (const int32_t token : ordered(logits, cut, vocabulary, s)) {
      const double weight = s.weights[token];
      const bool first = kept == 0;  // one is kept, whatever the policy
      if (!first && (kept >= row.top_k || mass > limit || weight < row.min_p)) break;
      ++kept, ++kept_of_cut;
      mass += weight;
    }
    if (kept_of_cut < s.count[cut]) break;
  }
  const double target = row.coin * mass;
  double running = 0;
  int64_t last = 0;
  for (int at = 0; at <= std::min(cut, kBins - 1); ++at) {
    const int64_t count = at == cut ? kept_of_cut : s.count[at];
    if (!count) continue;
    if (at < cut && running + s.mass[at] <= target) {
      running += s.mass[at];
      continue;
    }
    const std::vector<int32_t>& tokens = ordered(logits, at, vocabulary, s);
    for (int64_t i = 0; i < count; ++i) {
      running += s.weights[tokens[i]];
      if (running > target) return tokens[i];
    }
    last = tokens[count - 1];
  }
  if (cut < kBins && kept_of_cut) return last;
  // Rounding has left none, and the last that is kept ends a whole bin.
  for (int at = std::min(cut, kBins) - 1; at >= 0; --at)
    if (s.count[at]) return ordered(logits, at, vocabulary, s).back();
  return last;
}

// The likeliest tokens, best first; `found` holds as many as are wanted.
void find_likeliest(const float* logits, int64_t vocabulary, std::vector<int32_t>& found, size_t wanted) {
  constexpr int64_t kLook = 64;
  found.clear();
  if (!wanted) return;
  const auto place = [&](int32_t token) {
    auto at = found.end();
    while (at != found.begin() && logits[*(at - 1)] < logits[token]) --at;
    found.insert(at, token);
    if (found.size() > wanted) found.pop_back();
  };
  for (int64_t begin = 0; begin < vocabulary; begin += kLook) {
    const int64_t end = std::min(begin + kLook, vocabulary);
    if (found.size() == wanted) {
      const float least = logits[found.back()];
      int some = 0;
      for (int64_t i = begin; i < end; ++i) some |= logits[i] > least;
      if (!some) continue;  // as in nearly every piece
    }
    for (int64_t i = begin; i < end; ++i)
      if (found.size() < wanted || logits[i] > logits[found.back()]) place(static_cast<int32_t>(i));
  }
}

double rounded(double value) { return static_cast<double>(static_cast<float>(value)); }

}  // namespace

void likelihoods(const Asked* rows, int64_t count, int64_t vocabulary, int64_t top, int threads, double* table) {
#pragma omp parallel num_threads(threads)
  {
    Scratch scratch;
#pragma omp for schedule(dynamic, 1)
    for (int64_t r = 0; r < count; ++r) {
      const float* logits = widened(rows[r].logits, rows[r].type, vocabulary, scratch);
      const float largest = largest_of(logits, vocabulary);
      weigh(logits, largest, 1.0, vocabulary, scratch);
      const double total = largest + std::log(sum_of(scratch.weights.data(), vocabulary));
      double* line = table + r * (1 + 2 * top);
      line[0] = rounded(logits[rows[r].token] - total);
      find_likeliest(logits, vocabulary, scratch.found, static_cast<size_t>(top));
      for (int64_t i = 0; i < top; ++i) {
        line[1 + i] = scratch.found[i];
        line[1 + top + i] = rounded(logits[scratch.found[i]] - total);
      }
    }
  }
}

void draw(const Row* rows, int64_t count, int64_t vocabulary, int threads, int64_t* tokens) {
#pragma omp parallel num_threads(threads)
  {
    Scratch scratch;
#pragma omp for schedule(dynamic, 1)
    for (int64_t r = 0; r < count; ++r) {
      const Row& row = rows[r];
      const float* logits = widened(row.logits, row.type, vocabulary, scratch);
      const float largest = largest_of(logits, vocabulary);
      weigh(logits, largest, row.temperature, vocabulary, scratch);
      const bool restricted = row.top_k < vocabulary || row.min_p > 0 || std::isfinite(row.top_p);
      tokens[r] = restricted ? draw_by_rank(logits, largest, row, vocabulary, scratch)
                             : draw_by_id(row, vocabulary, scratch);
    }
  }
}

}  // namespace microtome
