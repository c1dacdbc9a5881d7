// Flash-style attention straight over the cells of a pool.
//
// Tokens that stand alone in their row (decodes) go one by one: dot products along the head size, every query head of
// a group while the cell is in registers. Tokens of one row that ride together (a prefill) form tiles of queries that
// share each loaded cell; there a vector runs along the queries, so the softmax needs no sum across lanes. On a CPU
// with AMX, tiles over a bfloat16 pool run on the matrix unit (amx.h).
//
// A token that stands alone is summed in chunks of 256 positions, merged in order, by however many threads: its result
// does not depend on the batch around it.

#include "kernels.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#include "amx.h"
#include "vectors.h"

namespace microtome {
namespace {

constexpr int kChunk = 256;     // positions of a lone token that are weighed at once
constexpr int kBlock = 64;      // positions a tile takes at once
constexpr int kRows = 4;        // rows of a register block
constexpr float kLowest = -1e30f;   // below every logit: where a running maximum starts
constexpr float kMasked = -3e38f;   // below that: exp2 of the difference is 0
constexpr int64_t kAlone = 2;       // a run this narrow is taken token by token
constexpr int64_t kSerialWork = 16384;  // multiply-adds (of whole vectors) below which one thread is quicker

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kWidestTile = 4;  // vectors of queries: 4 x 4 accumulators fit into 32 registers
#else
constexpr int kWidestTile = 2;
#endif

// Scratch that lives as long as its thread, so that a step allocates nothing once it has run.
float* scratch(int64_t floats) {
  struct Buffer {
    float* data = nullptr;
    int64_t floats = 0;
    ~Buffer() { std::free(data); }
  };
  static thread_local Buffer buffer;
  if (buffer.floats < floats) {
    std::free(buffer.data);
    buffer.floats = 0;
    buffer.data = static_cast<float*>(std::aligned_alloc(64, (floats * 4 + 63) / 64 * 64));
    if (buffer.data == nullptr) throw std::bad_alloc();
    buffer.floats = floats;
  }
  return buffer.data;
}

INLINE Vec load_at(const Tokens& tokens, int64_t index) {
  return tokens.type == Type::F32 ? load(static_cast<const float*>(tokens.data) + index)
                                  : load(static_cast<const bf16*>(tokens.data) + index);
}

INLINE void store_at(const Tokens& tokens, int64_t index, Vec v) {
  if (tokens.type == Type::F32) {
    store(static_cast<float*>(tokens.data) + index, v);
  } else {
    store(static_cast<bf16*>(tokens.data) + index, v);
  }
}

// ---- lone tokens -----------------------------------------------------------------------------------------------

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

// What makes a dot product the logit: in units of log 2, unless a soft cap comes first.
float query_scale(const Softmax& softmax) { return softmax.scale * (softmax.softcap > 0 ? 1.0f : kLog2e); }

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

int64_t first_seen(const Softmax& softmax, int64_t position) {
  return softmax.window > 0 ? std::max<int64_t>(0, position + 1 - softmax.window) : 0;
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

// ---- tiles of queries --------------------------------------------------------------------------------------------

// to[m][n] (+)= sum over k of a[m * a_row + k * a_step] * b[k][n], for kRows rows and kVecs vectors of n.
template <int kVecs, bool kAdd>
INLINE void multiply(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t depth, float* to) {
  constexpr int kWidth = kVecs * kLanes;
  Vec sum[kRows][kVecs];
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kVecs; ++n) sum[m][n] = kAdd ? load(to + m * kWidth + n * kLanes) : Vec{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vec x[kVecs];
    for (int n = 0; n < kVecs; ++n) x[n] = load(b + k * kWidth + n * kLanes);
    for (int m = 0; m < kRows; ++m) {
      const float y = a[m * a_row + k * a_step];
      for (int n = 0; n < kVecs; ++n) sum[m][n] += y * x[n];
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kVecs; ++n) store(to + m * kWidth + n * kLanes, sum[m][n]);
  }
}

// Queries [begin, end) of a run under one key/value head; query i is token first_token + i / group, head i % group.
struct Tile {
  int64_t first_token;
  int64_t kv_head;
  int64_t begin, end;
  int64_t pack;  // where the run's packed K and V are, for the matrix unit
};

template <typename Cell, int kVecs>
void attend_tile(const Forward& f, const Softmax& softmax, const Tokens& q, const Tokens& out, const Tile& tile) {
  constexpr int kWidth = kVecs * kLanes;
  const int64_t size = f.size, group = f.heads / f.kv_heads, stride = f.kv_heads * size;
  float* q_HW = scratch(2 * size * kWidth + 2 * kBlock * size + kBlock * kWidth);
  float* acc_HW = q_HW + size * kWidth;
  float* k_PH = acc_HW + size * kWidth;
  float* v_PH = k_PH + kBlock * size;
  float* s_PW = v_PH + kBlock * size;
  alignas(64) int32_t position_W[kWidth];
  alignas(64) float maximum_W[kWidth], sum_W[kWidth];

  int64_t q_at[kWidth], out_at[kWidth];

  const int count = int(tile.end - tile.begin);
  for (int w = 0; w < kWidth; ++w) {  // lanes past the end repeat the last query; their results are dropped
    const int64_t query = tile.begin + std::min(w, count - 1);
    const int64_t token = tile.first_token + query / group, head = tile.kv_head * group + query % group;
    q_at[w] = token * q.token_stride + head * q.head_stride;
    out_at[w] = token * out.token_stride + head * out.head_stride;
    position_W[w] = f.positions[token];
    maximum_W[w] = softmax.sinks ? softmax.sinks[head] * kLog2e : kLowest;
    sum_W[w] = softmax.sinks ? 1.0f : 0.0f;
  }
  const float scale = query_scale(softmax);
  Vec block[kLanes];
  for (int w = 0; w < kWidth; w += kLanes) {
    for (int64_t d = 0; d < size; d += kLanes) {
      for (int i = 0; i < kLanes; ++i) block[i] = load_at(q, q_at[w + i] + d) * scale;
      transpose(block);
      for (int i = 0; i < kLanes; ++i) store(q_HW + (d + i) * kWidth + w, block[i]);
    }
  }
  std::fill(acc_HW, acc_HW + size * kWidth, 0.0f);
  const int64_t lowest = *std::min_element(position_W, position_W + kWidth);
  const int64_t highest = *std::max_element(position_W, position_W + kWidth);
  const int32_t* row = f.rows + f.token_rows[tile.first_token] * f.row_stride;
  const Cell* k = static_cast<const Cell*>(f.k_pool) + tile.kv_head * size;
  const Cell* v = static_cast<const Cell*>(f.v_pool) + tile.kv_head * size;

  for (int64_t from = first_seen(softmax, lowest); from <= highest; from += kBlock) {
    const int here = int(std::min<int64_t>(kBlock, highest + 1 - from));
    const int whole = (here + kRows - 1) / kRows * kRows;
    for (int j = 0; j < whole; ++j) {
      if (j < here) {
        const int64_t cell = row[from + j];
        for (int64_t d = 0; d < size; d += kLanes) store(k_PH + j * size + d, load(k + cell * stride + d));
        for (int64_t d = 0; d < size; d += kLanes) store(v_PH + j * size + d, load(v + cell * stride + d));
      } else {
        std::fill(k_PH + j * size, k_PH + (j + 1) * size, 0.0f);
        std::fill(v_PH + j * size, v_PH + (j + 1) * size, 0.0f);
      }
    }
    for (int j = 0; j < whole; j += kRows) {
      multiply<kVecs, false>(k_PH + j * size, size, 1, q_HW, size, s_PW + j * kWidth);
    }
    const bool masked = from + whole - 1 > lowest || from < first_seen(softmax, highest);
    for (int n = 0; n < kVecs; ++n) {
      IntVec position;
      std::memcpy(&position, position_W + n * kLanes, sizeof position);
      Vec best = load(maximum_W + n * kLanes);
      const Vec before = best;
      for (int j = 0; j < whole; ++j) {
        float* at = s_PW + j * kWidth + n * kLanes;
        Vec x = load(at);
        if (softmax.softcap > 0) x = cap(x, softmax.softcap) * kLog2e;
        if (masked) {
          const IntVec key = splat(int32_t(from + j));
          IntVec seen = key <= position;
          if (softmax.window > 0) seen &= key > position - int32_t(std::min<int64_t>(softmax.window, 1 << 30));
          x = select(seen, x, splat(kMasked));
        }
        if (masked || softmax.softcap > 0) store(at, x);
        best = max(best, x);
      }
      const Vec keep = exp2(before - best);
      Vec sum = load(sum_W + n * kLanes) * keep;
      for (int j = 0; j < whole; ++j) {
        float* at = s_PW + j * kWidth + n * kLanes;
        const Vec w = exp2(load(at) - best);
        store(at, w);
        sum += w;
      }
      store(maximum_W + n * kLanes, best);
      store(sum_W + n * kLanes, sum);
      for (int64_t d = 0; d < size; ++d) {
        float* at = acc_HW + d * kWidth + n * kLanes;
        store(at, load(at) * keep);
      }
    }
    for (int64_t d = 0; d < size; d += kRows) {
      multiply<kVecs, true>(v_PH + d, 1, size, s_PW, whole, acc_HW + d * kWidth);
    }
  }
  for (int w = 0; w < count; w += kLanes) {
    const Vec share = 1.0f / load(sum_W + w);
    const int here = std::min(kLanes, count - w);
    for (int64_t d = 0; d < size; d += kLanes) {
      for (int i = 0; i < kLanes; ++i) block[i] = load(acc_HW + (d + i) * kWidth + w) * share;
      transpose(block);
      for (int i = 0; i < here; ++i) store_at(out, out_at[w + i] + d, block[i]);
    }
  }
}

// ---- one forward ---------------------------------------------------------------------------------------------------

// A lone token, whole (partials < 0) or a few of its chunks.
struct Alone {
  int64_t token;
  int64_t first_chunk, last_chunk;
  int64_t partials;  // offset in floats
};

struct Split {
  int64_t token;
  int64_t chunks;
  int64_t partials;
};

struct Work {
  std::vector<Tile> tiles;
  std::vector<Alone> alone;
  std::vector<Split> splits;
  std::vector<amx::Run> packs;
  int64_t partial_floats = 0;
  int64_t tile_vectors = 1;
  int64_t cost = 0;
};

int64_t chunks_of(const Softmax& softmax, int64_t position) {
  return (position - first_seen(softmax, position)) / kChunk + 1;
}

Work lay_out(const Forward& f, const Softmax& softmax, bool all_bf16) {
  Work work;
  const int64_t group = f.heads / f.kv_heads;
  const bool matrix_unit = f.pool_type == Type::BF16 && all_bf16 && amx::usable();
  std::vector<int64_t> lone;
  int64_t widest_run = 0;
  for (int64_t begin = 0, end = 0; begin < f.tokens; begin = end) {
    for (end = begin + 1; end < f.tokens && f.token_rows[end] == f.token_rows[begin];) ++end;
    int64_t lowest = f.positions[begin], highest = lowest;
    for (int64_t t = begin; t < end; ++t) {
      lowest = std::min<int64_t>(lowest, f.positions[t]);
      highest = std::max<int64_t>(highest, f.positions[t]);
      work.cost += (f.positions[t] + 1 - first_seen(softmax, f.positions[t])) * f.heads * f.size / kLanes;
    }
    if (end - begin <= kAlone || highest == 0) {  // highest 0: padding, one cell
      for (int64_t t = begin; t < end; ++t) lone.push_back(t);
      continue;
    }
    const int64_t queries = (end - begin) * group;
    const bool packed = matrix_unit && queries >= amx::kWidth / 2;
    if (!packed) widest_run = std::max(widest_run, queries);
    for (int64_t g = 0; g < f.kv_heads; ++g) {
      int64_t pack = -1;
      if (packed) {
        pack = int64_t(work.packs.size());
        work.packs.push_back({f.token_rows[begin], g, first_seen(softmax, lowest), highest + 1, 0});
      }
      work.tiles.push_back({begin, g, 0, queries, pack});
    }
  }
  while (work.tile_vectors < kWidestTile && work.tile_vectors * kLanes < widest_run) work.tile_vectors *= 2;
  std::vector<Tile> runs;
  runs.swap(work.tiles);
  for (const Tile& run : runs) {  // the last tile of a run sees most: it goes first
    const int64_t width = run.pack < 0 ? work.tile_vectors * kLanes : amx::kWidth;
    for (int64_t begin = (run.end - 1) / width * width; begin >= 0; begin -= width) {
      work.tiles.push_back({run.first_token, run.kv_head, begin, std::min(run.end, begin + width), run.pack});
    }
  }
  const bool share = f.threads > 1 && int64_t(lone.size() + work.tiles.size()) < 2 * f.threads;
  for (int64_t token : lone) {
    const int64_t chunks = chunks_of(softmax, f.positions[token]);
    if (!share || chunks == 1) {
      work.alone.push_back({token, 0, chunks, -1});
      continue;
    }
    const int64_t each = std::max<int64_t>(1, chunks / (4 * f.threads));
    work.splits.push_back({token, chunks, work.partial_floats});
    for (int64_t c = 0; c < chunks; c += each) {
      work.alone.push_back({token, c, std::min(chunks, c + each), work.partial_floats});
    }
    work.partial_floats += chunks * Partial::floats(f);
  }
  return work;
}

template <typename Cell>
void run_tile(const Forward& f, const Softmax& softmax, const Tokens& q, const Tokens& out, const Tile& tile,
              int64_t vectors) {
  switch (vectors) {
    case 1: attend_tile<Cell, 1>(f, softmax, q, out, tile); break;
    case 2: attend_tile<Cell, 2>(f, softmax, q, out, tile); break;
    default: attend_tile<Cell, kWidestTile>(f, softmax, q, out, tile);
  }
}

template <typename Cell>
void attend_as(const Forward& f, const Tokens& q, const Softmax& softmax, const Tokens& out) {
  Work work = lay_out(f, softmax, q.type == Type::BF16 && out.type == Type::BF16);
  std::unique_ptr<float[]> partials(work.partial_floats ? new float[work.partial_floats] : nullptr);
  amx::Packed packed(f, work.packs);
  const int64_t tiles = int64_t(work.tiles.size()), alone = int64_t(work.alone.size());
  const int threads = work.cost < kSerialWork ? 1 : f.threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    if (packed.pieces() > 0) {
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < packed.pieces(); ++i) packed.fill(f, i);
      amx::configure();
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < tiles + alone; ++i) {
      if (i >= tiles) {
        const Alone& a = work.alone[i - tiles];
        float* to = a.partials < 0 ? nullptr : partials.get() + a.partials;
        attend_alone<Cell>(f, softmax, q, out, a.token, a.first_chunk, a.last_chunk, to);
      } else if (work.tiles[i].pack >= 0) {
        const Tile& t = work.tiles[i];
        packed.attend(f, softmax, q, out, t.first_token, t.begin, t.end, t.pack, scratch(amx::scratch_floats(f.size)));
      } else {
        run_tile<Cell>(f, softmax, q, out, work.tiles[i], work.tile_vectors);
      }
    }
    if (packed.pieces() > 0) amx::release();
  }
  for (const Split& split : work.splits) {
    const int64_t partial = Partial::floats(f);
    Partial state(scratch(partial), f.heads);
    start(f, softmax, state);
    for (int64_t c = 0; c < split.chunks; ++c) {
      merge(f, state, Partial(partials.get() + split.partials + c * partial, f.heads));
    }
    finish(f, state, out, split.token);
  }
}

template <typename Cell>
void write_as(const Forward& f, const Tokens& tokens, void* pool, const int32_t* cells, int64_t t) {
  for (int64_t g = 0; g < f.kv_heads; ++g) {
    const int64_t from = t * tokens.token_stride + g * tokens.head_stride;
    Cell* to = static_cast<Cell*>(pool) + (int64_t{cells[t]} * f.kv_heads + g) * f.size;
    for (int64_t d = 0; d < f.size; d += kLanes) store(to + d, load_at(tokens, from + d));
  }
}

}  // namespace

void write_cells(const Forward& f, const Tokens& k, const Tokens& v, const int32_t* cells) {
  const int threads = f.tokens < 64 ? 1 : f.threads;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < f.tokens; ++t) {
    if (f.pool_type == Type::F32) {
      write_as<float>(f, k, f.k_pool, cells, t);
      write_as<float>(f, v, f.v_pool, cells, t);
    } else {
      write_as<bf16>(f, k, f.k_pool, cells, t);
      write_as<bf16>(f, v, f.v_pool, cells, t);
    }
  }
}

void attend(const Forward& forward, const Tokens& q, const Softmax& softmax, const Tokens& out) {
  if (forward.pool_type == Type::F32) {
    attend_as<float>(forward, q, softmax, out);
  } else {
    attend_as<bf16>(forward, q, softmax, out);
  }
}

const char* instruction_set() {
  if (amx::usable()) return "AVX-512 and AMX";
#if defined(__AVX512F__)
  return "AVX-512";
#elif defined(__AVX2__)
  return "AVX2";
#elif defined(__aarch64__)
  return "NEON";
#else
  return "baseline";
#endif
}

}  // namespace microtome
