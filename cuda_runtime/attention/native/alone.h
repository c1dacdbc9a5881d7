// Tokens that stand alone in their row, one by one: dot products along the head size, every query head of a group
// while the cell is in registers.
//
// A token is summed in chunks of kChunk positions, merged in order, by however many threads: its result does not depend
// on the batch around it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels.h"
#include "tokens.h"
#include "vectors.h"

namespace microtome {
namespace {

constexpr int kChunk = 256;  // positions that are weighed at once

// Sum the lanes of kLanes vectors: lane i of the result is the sum of part[i].
INLINE Vec sum_each(Vec* part) {
#if defined(__AVX512F__)
  constexpr int kCount = 16;
  for (int i = 0; i < kCount / 2; ++i) {
    Vec a = part[i], b = part[i + 8];
    part[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
              __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
  for (int i = 0; i < 4; ++i) {
    Vec a = part[i], b = part[i + 4];
    part[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
              __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  }
  for (int i = 0; i < 2; ++i) {
    Vec a = part[i], b = part[i + 2];
    part[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
              __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  Vec a = part[0], b = part[1];
  return __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
         __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
#else
  Vec sums;
  for (int i = 0; i < kLanes; ++i) sums[i] = total(part[i]);
  return sums;
#endif
}

template <typename Cell>
INLINE void prefetch(const Cell* from, int64_t size) {
  const char* bytes = reinterpret_cast<const char*>(from);
  for (int64_t at = 0; at < size * int64_t(sizeof(Cell)); at += 64) __builtin_prefetch(bytes + at);
}

template <typename Cell>
INLINE void prefetch_far(const Cell* from, int64_t size) {  // into the second-level cache
  const char* bytes = reinterpret_cast<const char*>(from);
  for (int64_t at = 0; at < size * int64_t(sizeof(Cell)); at += 64) __builtin_prefetch(bytes + at, 0, 2);
}

// logits[h][j] = q[h] . K[cells[j]], for kHeads heads and j in [0, count); the tail up to a whole vector is unset.
template <typename Cell, int kHeads, int kSize>
void dot_cells(const float* q, const Cell* k, const Cell* v, int64_t stride, const int32_t* cells, int count,
               int64_t any_size, float* logits) {
  const int64_t size = kSize ? kSize : any_size;
  alignas(64) Vec part[kHeads][kLanes];
  for (int from = 0; from < count; from += kLanes) {
    const int here = std::min(kLanes, count - from);
    for (int j = 0; j < here; ++j) {
      const Cell* row = k + cells[from + j] * stride;
      if (from + j + kLanes < count) prefetch(k + cells[from + j + kLanes] * stride, size);
      prefetch_far(v + cells[from + j] * stride, size);
      Vec sum[kHeads] = {};
      for (int64_t d = 0; d < size; d += kLanes) {
        Vec x = load(row + d);
        for (int h = 0; h < kHeads; ++h) sum[h] += x * load(q + h * size + d);
      }
      for (int h = 0; h < kHeads; ++h) part[h][j] = sum[h];
    }
    for (int j = here; j < kLanes; ++j) {
      for (int h = 0; h < kHeads; ++h) part[h][j] = Vec{};
    }
    for (int h = 0; h < kHeads; ++h) store(logits + h * kChunk + from, sum_each(part[h]));
  }
}

// acc[h] += sum over j of weights[h][j] * V[cells[j]], for kHeads heads.
template <typename Cell, int kHeads>
void add_cells(const float* weights, const Cell* v, int64_t stride, const int32_t* cells, int count, int64_t size,
               float* acc) {
  constexpr int kWide = 4;
  int64_t d = 0;
  for (; d + kWide * kLanes <= size; d += kWide * kLanes) {
    Vec sum[kHeads][kWide];
    for (int h = 0; h < kHeads; ++h) {
      for (int i = 0; i < kWide; ++i) sum[h][i] = load(acc + h * size + d + i * kLanes);
    }
    for (int j = 0; j < count; ++j) {
      const Cell* row = v + cells[j] * stride + d;
      if (j + 8 < count) prefetch(v + cells[j + 8] * stride + d, kWide * kLanes);
      for (int i = 0; i < kWide; ++i) {
        Vec x = load(row + i * kLanes);
        for (int h = 0; h < kHeads; ++h) sum[h][i] += weights[h * kChunk + j] * x;
      }
    }
    for (int h = 0; h < kHeads; ++h) {
      for (int i = 0; i < kWide; ++i) store(acc + h * size + d + i * kLanes, sum[h][i]);
    }
  }
  for (; d < size; d += kLanes) {
    Vec sum[kHeads];
    for (int h = 0; h < kHeads; ++h) sum[h] = load(acc + h * size + d);
    for (int j = 0; j < count; ++j) {
      Vec x = load(v + cells[j] * stride + d);
      for (int h = 0; h < kHeads; ++h) sum[h] += weights[h * kChunk + j] * x;
    }
    for (int h = 0; h < kHeads; ++h) store(acc + h * size + d, sum[h]);
  }
}

// The softmax of one token over some of its positions, per query head: sum of weights, weighted V, in units of
// 2^maximum. Laid out as maximum[N], sum[N], acc[N][H].
struct Partial {
  float* maximum;
  float* sum;
  float* acc;
  Partial(float* at, int64_t heads) : maximum(at), sum(at + heads), acc(at + 2 * heads) {}
  static int64_t floats(const Forward& f) { return f.heads * (f.size + 2); }
};

// What softmax needs of kHeads heads' logits, in place: logits become weights.
void weigh(float* logits, int count, const Softmax& softmax, float* maximum, float* sum) {
  const int whole = (count + kLanes - 1) / kLanes * kLanes;
  for (int j = count; j < whole; ++j) logits[j] = kMasked;
  Vec best = splat(kLowest);
  for (int j = 0; j < whole; j += kLanes) {
    Vec x = load(logits + j);
    if (softmax.softcap > 0) {
      x = select(x > kLowest, cap(x, softmax.softcap) * kLog2e, splat(kMasked));
      store(logits + j, x);
    }
    best = max(best, x);
  }
  const float top = widest(best);
  Vec sums = {};
  for (int j = 0; j < whole; j += kLanes) {
    Vec w = exp2(load(logits + j) - top);
    store(logits + j, w);
    sums += w;
  }
  *maximum = top;
  *sum = total(sums);
}

// Positions [first, first + count) of one row, count <= kChunk, for all heads; `out` is overwritten.
template <typename Cell>
void attend_chunk(const Forward& f, const Softmax& softmax, const float* q, const int32_t* cells, int count,
                  Partial out) {
  const int64_t size = f.size, group = f.heads / f.kv_heads, stride = f.kv_heads * size;
  alignas(64) float weights[4 * kChunk];
  std::fill(out.acc, out.acc + f.heads * size, 0.0f);
  for (int64_t g = 0; g < f.kv_heads; ++g) {
    const Cell* k = static_cast<const Cell*>(f.k_pool) + g * size;
    const Cell* v = static_cast<const Cell*>(f.v_pool) + g * size;
    for (int64_t h = 0; h < group;) {
      const int64_t head = g * group + h;
      const int heads = int(std::min<int64_t>(4, group - h));
      const float* qh = q + head * size;
      float* acc = out.acc + head * size;
#define DOT(HEADS)                                                                                      \
  size == 64    ? dot_cells<Cell, HEADS, 64>(qh, k, v, stride, cells, count, size, weights)                \
  : size == 128 ? dot_cells<Cell, HEADS, 128>(qh, k, v, stride, cells, count, size, weights)               \
                : dot_cells<Cell, HEADS, 0>(qh, k, v, stride, cells, count, size, weights)
      switch (heads) {
        case 1: DOT(1); break;
        case 2: DOT(2); break;
        case 3: DOT(3); break;
        default: DOT(4);
      }
#undef DOT
      for (int i = 0; i < heads; ++i) {
        weigh(weights + i * kChunk, count, softmax, out.maximum + head + i, out.sum + head + i);
      }
      switch (heads) {
        case 1: add_cells<Cell, 1>(weights, v, stride, cells, count, size, acc); break;
        case 2: add_cells<Cell, 2>(weights, v, stride, cells, count, size, acc); break;
        case 3: add_cells<Cell, 3>(weights, v, stride, cells, count, size, acc); break;
        default: add_cells<Cell, 4>(weights, v, stride, cells, count, size, acc);
      }
      h += heads;
    }
  }
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define MICROTOME_BF16_DOT 1

// The same two products for bfloat16 tokens over a bfloat16 pool. Dot products take pairs of elements at once (exact
// products, float32 sums); `unit` is what makes them logits. Weights stay float32: V's even and odd elements are widened
// apart, which takes one instruction each, and are put in order at the end.
template <int kHeads, int kSize>
void dot_cells_bf16(const bf16* const* q, float unit, const bf16* k, const bf16* v, int64_t stride,
                    const int32_t* cells, int count, int64_t any_size, float* logits) {
  const int64_t size = kSize ? kSize : any_size;
  alignas(64) Vec part[kHeads][kLanes];
  for (int from = 0; from < count; from += kLanes) {
    const int here = std::min(kLanes, count - from);
    for (int j = 0; j < here; ++j) {
      const bf16* row = k + cells[from + j] * stride;
      if (from + j + kLanes < count) prefetch(k + cells[from + j + kLanes] * stride, size);
      prefetch_far(v + cells[from + j] * stride, size);
      __m512 sum[kHeads];
      for (int h = 0; h < kHeads; ++h) sum[h] = _mm512_setzero_ps();
      for (int64_t d = 0; d < size; d += 32) {
        const __m512bh x = (__m512bh)_mm512_loadu_si512(row + d);
        for (int h = 0; h < kHeads; ++h) {
          sum[h] = _mm512_dpbf16_ps(sum[h], x, (__m512bh)_mm512_loadu_si512(q[h] + d));
        }
      }
      for (int h = 0; h < kHeads; ++h) part[h][j] = (Vec)sum[h];
    }
    for (int j = here; j < kLanes; ++j) {
      for (int h = 0; h < kHeads; ++h) part[h][j] = Vec{};
    }
    for (int h = 0; h < kHeads; ++h) store(logits + h * kChunk + from, sum_each(part[h]) * unit);
  }
}

template <int kHeads, int kPairs>
INLINE void add_cells_bf16(const float* weights, const bf16* v, int64_t stride, const int32_t* cells, int count,
                           int64_t size, float* acc) {
  __m512 even[kHeads][kPairs], odd[kHeads][kPairs];
  for (int h = 0; h < kHeads; ++h) {
    for (int i = 0; i < kPairs; ++i) even[h][i] = odd[h][i] = _mm512_setzero_ps();
  }
  const __m512i high = _mm512_set1_epi32(int32_t(0xffff0000));
  for (int j = 0; j < count; ++j) {
    const bf16* row = v + cells[j] * stride;
    if (j + 8 < count) prefetch(v + cells[j + 8] * stride, kPairs * 32);
    for (int i = 0; i < kPairs; ++i) {
      const __m512i x = _mm512_loadu_si512(row + i * 32);
      const __m512 x_even = (__m512)_mm512_slli_epi32(x, 16), x_odd = (__m512)_mm512_and_si512(x, high);
      for (int h = 0; h < kHeads; ++h) {
        const __m512 w = _mm512_set1_ps(weights[h * kChunk + j]);
        even[h][i] = _mm512_fmadd_ps(w, x_even, even[h][i]);
        odd[h][i] = _mm512_fmadd_ps(w, x_odd, odd[h][i]);
      }
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int i = 0; i < kPairs; ++i) {
      const Vec e = (Vec)even[h][i], o = (Vec)odd[h][i];
      float* to = acc + h * size + i * 32;
      store(to, __builtin_shufflevector(e, o, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
      store(to + 16, __builtin_shufflevector(e, o, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31));
    }
  }
}

template <int kHeads>
void weigh_group_bf16(const bf16* const* q, float unit, const bf16* k, const bf16* v, int64_t stride,
                      const int32_t* cells, int count, int64_t size, const Softmax& softmax, float* maximum,
                      float* sum, float* acc) {
  alignas(64) float weights[kHeads * kChunk];
  if (size == 64) {
    dot_cells_bf16<kHeads, 64>(q, unit, k, v, stride, cells, count, size, weights);
  } else if (size == 128) {
    dot_cells_bf16<kHeads, 128>(q, unit, k, v, stride, cells, count, size, weights);
  } else {
    dot_cells_bf16<kHeads, 0>(q, unit, k, v, stride, cells, count, size, weights);
  }
  for (int h = 0; h < kHeads; ++h) weigh(weights + h * kChunk, count, softmax, maximum + h, sum + h);
  int64_t d = 0;
  for (; d + 64 <= size; d += 64) add_cells_bf16<kHeads, 2>(weights, v + d, stride, cells, count, size, acc + d);
  if (d < size) add_cells_bf16<kHeads, 1>(weights, v + d, stride, cells, count, size, acc + d);
}

void attend_chunk_bf16(const Forward& f, const Softmax& softmax, const Tokens& q, int64_t token, const int32_t* cells,
                       int count, Partial out) {
  const int64_t size = f.size, group = f.heads / f.kv_heads, stride = f.kv_heads * size;
  const float unit = query_scale(softmax);
  for (int64_t head = 0; head < f.heads;) {
    const int64_t g = head / group;
    const int heads = int(std::min<int64_t>(4, (g + 1) * group - head));
    const bf16* k = static_cast<const bf16*>(f.k_pool) + g * size;
    const bf16* v = static_cast<const bf16*>(f.v_pool) + g * size;
    const bf16* queries[4];
    for (int h = 0; h < heads; ++h) {
      queries[h] = static_cast<const bf16*>(q.data) + token * q.token_stride + (head + h) * q.head_stride;
    }
    float *maximum = out.maximum + head, *sum = out.sum + head, *acc = out.acc + head * size;
    const auto weigh_group = heads == 1   ? weigh_group_bf16<1>
                             : heads == 2 ? weigh_group_bf16<2>
                             : heads == 3 ? weigh_group_bf16<3>
                                          : weigh_group_bf16<4>;
    weigh_group(queries, unit, k, v, stride, cells, count, size, softmax, maximum, sum, acc);
    head += heads;
  }
}
#endif

float exp2_one(float x) { return exp2(splat(x))[0]; }

// Fold `from` into `into`.
void merge(const Forward& f, Partial into, Partial from) {
  for (int64_t head = 0; head < f.heads; ++head) {
    const float top = std::max(into.maximum[head], from.maximum[head]);
    const float keep = exp2_one(into.maximum[head] - top), add = exp2_one(from.maximum[head] - top);
    into.maximum[head] = top;
    into.sum[head] = into.sum[head] * keep + from.sum[head] * add;
    float* to = into.acc + head * f.size;
    const float* more = from.acc + head * f.size;
    for (int64_t d = 0; d < f.size; d += kLanes) store(to + d, load(to + d) * keep + load(more + d) * add);
  }
}

// Before any position: the sinks' share of the denominator, or nothing.
void start(const Forward& f, const Softmax& softmax, Partial state) {
  for (int64_t head = 0; head < f.heads; ++head) {
    state.maximum[head] = softmax.sinks ? softmax.sinks[head] * kLog2e : kLowest;
    state.sum[head] = softmax.sinks ? 1.0f : 0.0f;
  }
  std::fill(state.acc, state.acc + f.heads * f.size, 0.0f);
}

void finish(const Forward& f, Partial state, const Tokens& out, int64_t token) {
  for (int64_t head = 0; head < f.heads; ++head) {
    const float share = 1.0f / state.sum[head];
    const int64_t at = token * out.token_stride + head * out.head_stride;
    for (int64_t d = 0; d < f.size; d += kLanes) store_at(out, at + d, load(state.acc + head * f.size + d) * share);
  }
}

void load_queries(const Forward& f, const Softmax& softmax, const Tokens& q, int64_t token, float* to) {
  const float scale = query_scale(softmax);
  for (int64_t head = 0; head < f.heads; ++head) {
    const int64_t at = token * q.token_stride + head * q.head_stride;
    for (int64_t d = 0; d < f.size; d += kLanes) store(to + head * f.size + d, load_at(q, at + d) * scale);
  }
}

// One lone token, or some of its chunks: with `partials` null it is finished here, else each chunk is left there.
template <typename Cell>
void attend_alone(const Forward& f, const Softmax& softmax, const Tokens& q, const Tokens& out, int64_t token,
                  int64_t first_chunk, int64_t last_chunk, float* partials) {
  const int64_t position = f.positions[token], low = first_seen(softmax, position);
  const int32_t* row = f.rows + f.token_rows[token] * f.row_stride;
  const int64_t queries = f.heads * f.size, partial = Partial::floats(f);
  float* mine = scratch(queries + 2 * partial);
#ifdef MICROTOME_BF16_DOT
  const bool pairs = std::is_same_v<Cell, bf16> && q.type == Type::BF16 && f.size % 32 == 0;
#else
  constexpr bool pairs = false;
#endif
  if (!pairs) load_queries(f, softmax, q, token, mine);
  Partial state(mine + queries, f.heads), here(mine + queries + partial, f.heads);
  if (!partials) start(f, softmax, state);
  for (int64_t chunk = first_chunk; chunk < last_chunk; ++chunk) {
    const int64_t from = low + chunk * kChunk;
    const int count = int(std::min<int64_t>(kChunk, position + 1 - from));
    Partial to = partials ? Partial(partials + chunk * partial, f.heads) : here;
    if (!pairs) {
      attend_chunk<Cell>(f, softmax, mine, row + from, count, to);
    } else {
#ifdef MICROTOME_BF16_DOT
      attend_chunk_bf16(f, softmax, q, token, row + from, count, to);
#endif
    }
    if (!partials) merge(f, state, here);
  }
  if (!partials) finish(f, state, out, token);
}

}  // namespace
}  // namespace microtome
