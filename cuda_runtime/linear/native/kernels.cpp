// Weights stream through once per call, in the order in which they lie; rows wait in the nearer caches.

#include "kernels.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define MICROTOME_AVX512 1
#include <immintrin.h>
#if defined(__AVX512BF16__)
#define MICROTOME_BF16 1
#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)
#define MICROTOME_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif
#endif

namespace microtome {

#ifndef MICROTOME_AVX512

Unit bfloat16_unit() { return Unit::kNone; }
bool float32_served() { return false; }
void linear_float32(const Linear*, int) {}
void linear_bfloat16(const Linear*, int, Unit) {}
void gated_float32(const Linear&, const Linear&, void*) {}
bool gated_needs_room(int64_t, Unit) { return true; }
void gated_bfloat16(const Linear&, const Linear&, void*, Unit) {}
void norm(const Norm&, bool) {}
void rotate(const Turned*, int, const Turn&, bool) {}

#else

namespace {

constexpr int kRows = 12;     // of bfloat16 over one block: 24 sums, two vectors of weights
constexpr int kRowsWide = 6;  // of float32 over two blocks: as many sums, fewer loads for each
constexpr int kRowsFew = 2;   // of float32 over four blocks: four streams from memory
constexpr int64_t kSerialWork = 1 << 14;  // multiply-adds of whole blocks below which waking threads costs more

constexpr int64_t kAheadBytes = 1024;  // weights that come from memory are asked for so long before they are needed

inline __mmask16 mask16(int64_t count) { return count >= 16 ? 0xffff : __mmask16((1u << std::max<int64_t>(count, 0)) - 1); }

inline int64_t blocks_of(const Linear& l) { return (l.outputs + kBlock - 1) / kBlock; }

// Calls work(layer, first, end) on every thread with its share of the blocks of 32 outputs of all layers.
template <typename Work>
void over_blocks(const Linear* layers, int count, Work work) {
  int64_t blocks = 0;
  for (int i = 0; i < count; ++i) blocks += blocks_of(layers[i]);
  const int64_t useful = layers->rows * layers->inputs * blocks <= kSerialWork ? 1 : blocks;
  const int threads = int(std::min<int64_t>(layers->threads, useful));
  const auto share = [&](int64_t first, int64_t end) {
    for (int i = 0; i < count && end > 0; ++i) {
      const int64_t here = blocks_of(layers[i]);
      if (first < here) work(layers[i], std::max<int64_t>(first, 0), std::min(end, here));
      first -= here;
      end -= here;
    }
  };
  if (threads <= 1) return share(0, blocks);
#pragma omp parallel for schedule(static, 1) num_threads(threads)
  for (int i = 0; i < threads; ++i) share(blocks * i / threads, blocks * (i + 1) / threads);
}

constexpr float kLog2e = 1.4426950408889634f;

// 2^x, relative error below 3e-7; below -126 as there, infinite above 127.
inline __m512 exp2_of(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-126.0f), x);  // in this order a NaN stays one
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, whole);  // [-0.5, 0.5]
  __m512 p = _mm512_set1_ps(1.5403530e-4f);
  for (const float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f}) {
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
  }
  return _mm512_scalef_ps(p, whole);
}

// ---- float32 ----

// kCount rows of kBlocks neighbouring blocks.
template <int kCount, int kBlocks, bool kPrefetch>
void rows_float32(const Linear& l, int64_t block, int64_t row) {
  const float* x = static_cast<const float*>(l.x) + row * l.x_stride;
  const float* w = static_cast<const float*>(l.packed) + block * l.inputs * kBlock;
  const int64_t next = l.inputs * kBlock;
  __m512 sum[kCount][2 * kBlocks];
  for (int r = 0; r < kCount; ++r) {
    for (int i = 0; i < 2 * kBlocks; ++i) sum[r][i] = _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < l.inputs; ++k) {
    __m512 weight[2 * kBlocks];
    for (int i = 0; i < 2 * kBlocks; ++i) {
      const float* at = w + i / 2 * next + k * kBlock + i % 2 * 16;
      weight[i] = _mm512_loadu_ps(at);
      if (kPrefetch) _mm_prefetch(reinterpret_cast<const char*>(at) + kAheadBytes, _MM_HINT_T0);
    }
    for (int r = 0; r < kCount; ++r) {
      const __m512 value = _mm512_set1_ps(x[r * l.x_stride + k]);
      for (int i = 0; i < 2 * kBlocks; ++i) sum[r][i] = _mm512_fmadd_ps(value, weight[i], sum[r][i]);
    }
  }
  const float* bias = static_cast<const float*>(l.bias);
  float* y = static_cast<float*>(l.y) + row * l.outputs;
  for (int i = 0; i < 2 * kBlocks; ++i) {
    const int64_t first = block * kBlock + i * 16;
    const __mmask16 there = mask16(l.outputs - first);
    const __m512 b = bias ? _mm512_maskz_loadu_ps(there, bias + first) : _mm512_setzero_ps();
    for (int r = 0; r < kCount; ++r) {
      _mm512_mask_storeu_ps(y + r * l.outputs + first, there, _mm512_add_ps(sum[r][i], b));
    }
  }
}

// Fewer than kCount + 1 rows.
template <int kCount, int kBlocks, bool kPrefetch>
void last_float32(const Linear& l, int64_t block, int64_t row) {
  if constexpr (kCount > 0) {
    if (l.rows - row == kCount) return rows_float32<kCount, kBlocks, kPrefetch>(l, block, row);
    last_float32<kCount - 1, kBlocks, kPrefetch>(l, block, row);
  }
}

// All rows of kBlocks neighbouring blocks, whose weights the first rows bring nearer for the others.
template <int kBlocks>
void all_float32(const Linear& l, int64_t block) {
  if (l.rows < kRowsWide) return last_float32<kRowsWide - 1, kBlocks, true>(l, block, 0);
  rows_float32<kRowsWide, kBlocks, true>(l, block, 0);
  int64_t row = kRowsWide;
  for (; row + kRowsWide <= l.rows; row += kRowsWide) rows_float32<kRowsWide, kBlocks, false>(l, block, row);
  last_float32<kRowsWide - 1, kBlocks, false>(l, block, row);
}

#ifdef MICROTOME_BF16

// ---- bfloat16 in vectors: dot products of pairs ----

inline __m512 pair(const uint16_t* at) {
  int32_t bits;
  std::memcpy(&bits, at, 4);
  return _mm512_castsi512_ps(_mm512_set1_epi32(bits));
}

// Two vectors of sums to 32 bfloat16 outputs.
inline void store_outputs(const Linear& l, int64_t row, int64_t first, __m512 low, __m512 high) {
  const int64_t count = std::min<int64_t>(kBlock, l.outputs - first);
  const __mmask32 there = count >= 32 ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
  if (l.bias) {
    const __m512i b = _mm512_maskz_loadu_epi16(there, static_cast<const uint16_t*>(l.bias) + first);
    const __m512i b0 = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(b));
    const __m512i b1 = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(b, 1));
    low = _mm512_add_ps(low, _mm512_castsi512_ps(_mm512_slli_epi32(b0, 16)));
    high = _mm512_add_ps(high, _mm512_castsi512_ps(_mm512_slli_epi32(b1, 16)));
  }
  const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(high, low);
  _mm512_mask_storeu_epi16(static_cast<uint16_t*>(l.y) + row * l.outputs + first, there, rounded);
}

inline __m512 widened(__m256i bits) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)); }
inline __m512 rounded(__m512 x) { return widened((__m256i)_mm512_cvtneps_pbh(x)); }

// 16 sums to which the layer's bias is added, rounded to bfloat16.
inline __m512 with_bias(const Linear& l, int64_t first, __m512 sums) {
  if (l.bias) {
    const __mmask16 there = mask16(l.outputs - first);
    sums = _mm512_add_ps(sums, widened(_mm256_maskz_loadu_epi16(there, static_cast<const uint16_t*>(l.bias) + first)));
  }
  return rounded(sums);
}

// silu(g) * v, both rounded to bfloat16 as silu's result is; errors of 2^-20 are hidden by the rounding.
inline __m256i gated(__m512 g, __m512 v) {
  const __m512 below = _mm512_add_ps(_mm512_set1_ps(1.0f), exp2_of(_mm512_mul_ps(g, _mm512_set1_ps(-kLog2e))));
  __m512 share = _mm512_rcp14_ps(below);
  // One step of Newton's, which infinity has no share in; a NaN goes on.
  const __mmask16 finite = _mm512_cmp_ps_mask(below, _mm512_set1_ps(1e37f), _CMP_NGE_UQ);
  share = _mm512_maskz_mul_ps(finite, share, _mm512_fnmadd_ps(below, share, _mm512_set1_ps(2.0f)));
  return (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(rounded(_mm512_mul_ps(g, share)), v));
}

template <int kCount>
void rows_bfloat16(const Linear& l, int64_t block, int64_t row) {
  const uint16_t* x = static_cast<const uint16_t*>(l.x) + row * l.x_stride;
  const uint16_t* w = static_cast<const uint16_t*>(l.packed) + block * l.inputs * kBlock;
  __m512 sum[kCount][2];
  for (int r = 0; r < kCount; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
  for (int64_t k = 0; k < l.inputs; k += 32) {
    const uint16_t* tiles = w + k * kBlock;
    for (int64_t p = 0; p < 16; ++p) {
      const __m512bh w0 = (__m512bh)_mm512_loadu_si512(tiles + p * 32);
      const __m512bh w1 = (__m512bh)_mm512_loadu_si512(tiles + 512 + p * 32);
      for (int r = 0; r < kCount; ++r) {
        const __m512bh value = (__m512bh)pair(x + r * l.x_stride + k + 2 * p);
        sum[r][0] = _mm512_dpbf16_ps(sum[r][0], value, w0);
        sum[r][1] = _mm512_dpbf16_ps(sum[r][1], value, w1);
      }
    }
  }
  for (int r = 0; r < kCount; ++r) store_outputs(l, row + r, block * kBlock, sum[r][0], sum[r][1]);
}

template <int kCount>
void tail_bfloat16(const Linear& l, int64_t block, int64_t row) {
  if constexpr (kCount > 0) {
    if (l.rows - row == kCount) return rows_bfloat16<kCount>(l, block, row);
    tail_bfloat16<kCount - 1>(l, block, row);
  }
}

#endif  // MICROTOME_BF16

#ifdef MICROTOME_AMX

// ---- bfloat16 in tiles ----
//
// Tiles 0 to 3 hold sums: rows [0, 16) and [16, 32) by the block's halves. 4 and 5 hold rows of x, 6 and 7 weights.

bool matrix_granted() {
  // The kernel hands out the matrix unit's state on request, once per process.
  static const bool granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
  return granted;
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {};
};

// Tiles for `low` rows of x in the first and `high` in the second; the unit takes a cycle per row.
inline void configure(int64_t low, int64_t high) {
  TileConfig config;
  config.rows[0] = config.rows[1] = config.rows[4] = uint8_t(low);
  config.rows[2] = config.rows[3] = config.rows[5] = uint8_t(std::max<int64_t>(high, 1));
  config.rows[6] = config.rows[7] = 16;
  // GCC 12 believes that the load reads eight bytes only, and would drop the other stores.
  __asm__ volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}

inline void prefetch_tile(const uint16_t* at) {
  for (int i = 0; i < 16; ++i) _mm_prefetch(reinterpret_cast<const char*>(at) + i * 64, _MM_HINT_T0);
}

// The `low` + `high` rows of one block, fewer than 32; `sums` [32][32] is room.
template <bool kBoth>
void tiles(const Linear& l, int64_t block, int64_t low, int64_t high, float* sums) {
  const uint16_t* x = static_cast<const uint16_t*>(l.x);
  const uint16_t* w = static_cast<const uint16_t*>(l.packed) + block * l.inputs * kBlock;
  _tile_zero(0);
  _tile_zero(1);
  if (kBoth) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < l.inputs; k += 32) {
    prefetch_tile(w + k * kBlock + kAheadBytes / 2);
    prefetch_tile(w + k * kBlock + kAheadBytes / 2 + 512);
    _tile_loadd(4, x + k, l.x_stride * 2);
    _tile_loadd(6, w + k * kBlock, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + k * kBlock + 512, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (kBoth) {
      _tile_loadd(5, x + 16 * l.x_stride + k, l.x_stride * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  if (kBoth) {
    _tile_stored(2, sums + 16 * 32, 128);
    _tile_stored(3, sums + 16 * 32 + 16, 128);
  }
  __asm__ volatile("" ::: "memory");  // GCC 12 does not know that a tile store writes memory
  for (int64_t r = 0; r < low + high; ++r) {
    store_outputs(l, r, block * kBlock, _mm512_load_ps(sums + r * 32), _mm512_load_ps(sums + r * 32 + 16));
  }
}

// ---- many rows ----
//
// A block of weights, or as much of it as fits, stays in the first-level cache while panels of 32 rows stream past it
// from the second-level one; meanwhile the next block is asked for from memory. Streaming loads leave the nearer cache
// as it is (measured: a third more than ordinary ones). What a panel leaves in its sums is turned into outputs between
// the products of the panel after it, since the matrix unit leaves the vector units idle.

constexpr int64_t kNearInputs = 576;       // of a block that stay in the first-level cache
constexpr int64_t kNearRows = 896 * 1024;  // bytes of rows that stay in the second-level cache

// Bytes that are asked for in equal parts.
struct Ahead {
  const char* at;
  int64_t lines;  // each time
  Ahead(const void* from, int64_t bytes, int64_t times)
      : at(static_cast<const char*>(from)), lines((bytes / 64 + times - 1) / times) {}
  void some() {
    for (int64_t i = 0; i < lines; ++i) _mm_prefetch(at + i * 64, _MM_HINT_T1);
    at += lines * 64;
  }
};

// Rows of outputs that wait in sums [32][32]; `kFinish(row, sums)` makes one of them.
template <typename Finish>
struct Waiting {
  Finish finish;
  const float* sums = nullptr;
  int64_t row = 0, first = 0;  // of the outputs
  int64_t at = 0, rows = 0, each = 0;
  void some() {
    for (int64_t i = 0; i < each && at < rows; ++i, ++at) finish(row + at, first, sums + at * 32);
  }
  void rest() {
    for (; at < rows; ++at) finish(row + at, first, sums + at * 32);
  }
};

// Sums of 32 (kBoth) or 16 rows with two tiles of weights per 32 inputs, `step` elements apart.
template <bool kBoth, bool kNear, typename Finish>
inline void multiply_tiles(const uint16_t* x, int64_t x_stride, const uint16_t* w0, const uint16_t* w1, int64_t count,
                           Ahead& ahead, Waiting<Finish>& waiting) {
  const uint16_t* x1 = x + 16 * x_stride;
  for (int64_t i = 0; i < count; ++i) {
    ahead.some();
    _tile_stream_loadd(4, x + i * 32, x_stride * 2);
    if (kNear) {
      _tile_loadd(6, w0 + i * 1024, 64);
    } else {
      _tile_stream_loadd(6, w0 + i * 1024, 64);
    }
    _tile_dpbf16ps(0, 4, 6);
    if (kNear) {
      _tile_loadd(7, w1 + i * 1024, 64);
    } else {
      _tile_stream_loadd(7, w1 + i * 1024, 64);
    }
    _tile_dpbf16ps(1, 4, 7);
    waiting.some();
    if (kBoth) {
      _tile_stream_loadd(5, x1 + i * 32, x_stride * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// Rows [row, row + 32) or, not kBoth, [row, row + 16) into `sums`.
template <bool kBoth, typename Finish>
void panel(const Linear& l, int64_t row, const uint16_t* w0, const uint16_t* w1, float* sums, Ahead& ahead,
           Waiting<Finish>& waiting) {
  const uint16_t* x = static_cast<const uint16_t*>(l.x) + row * l.x_stride;
  const int64_t steps = l.inputs / 32, near = std::min(steps, kNearInputs / 32);
  _tile_zero(0);
  _tile_zero(1);
  if (kBoth) {
    _tile_zero(2);
    _tile_zero(3);
  }
  multiply_tiles<kBoth, true>(x, l.x_stride, w0, w1, near, ahead, waiting);
  if (near < steps) {
    const int64_t from = near * 1024;
    multiply_tiles<kBoth, false>(x + near * 32, l.x_stride, w0 + from, w1 + from, steps - near, ahead, waiting);
  }
  waiting.rest();
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  if (kBoth) {
    _tile_stored(2, sums + 16 * 32, 128);
    _tile_stored(3, sums + 16 * 32 + 16, 128);
  }
  __asm__ volatile("" ::: "memory");  // GCC 12 does not know that a tile store writes memory
}

// At least 32 rows. `strips` of two tiles of weights per 32 inputs: pair(strip, &w0, &w1) says where, next(strip) what
// comes after. Rows that are no whole panel are taken once more with those before them, to the same bits.
template <typename Pair, typename Next, typename Finish>
void panels(const Linear& l, int64_t first, int64_t end, Pair pair, Next next, int64_t outputs_of_strip,
            Finish finish) {
  alignas(64) float sums[2][32 * 32];
  Waiting<Finish> waiting{finish};
  waiting.each = (32 * 32 + l.inputs - 1) / l.inputs;
  const int64_t chunks = (l.rows * l.inputs * 2 + kNearRows - 1) / kNearRows;
  const int64_t chunk = std::max<int64_t>(32, (l.rows / 32 + chunks - 1) / chunks * 32);
  int64_t turn = 0;
  configure(16, 16);
  for (int64_t begin = 0; begin < l.rows; begin += chunk) {
    const int64_t stop = std::min(begin + chunk, l.rows), left = (stop - begin) % 32;
    const int64_t count = (stop - begin) / 32 + (left > 0);
    for (int64_t strip = first; strip < end; ++strip) {
      const uint16_t *w0, *w1;
      pair(strip, &w0, &w1);
      const auto [at, bytes] = next(strip);
      Ahead ahead(at, begin == 0 ? bytes : 0, count * (l.inputs / 32));
      for (int64_t row = begin; row < stop; row += 32, ++turn) {
        float* to = sums[turn % 2];
        const bool whole = stop - row > 16;
        const int64_t from = std::min(row, stop - (whole ? 32 : 16));
        if (whole) {
          panel<true>(l, from, w0, w1, to, ahead, waiting);
        } else {
          panel<false>(l, from, w0, w1, to, ahead, waiting);
        }
        waiting.sums = to;
        waiting.row = from;
        waiting.first = strip * outputs_of_strip;
        waiting.at = 0;
        waiting.rows = whole ? 32 : 16;
      }
    }
  }
  waiting.rest();
}

struct Bytes {
  const void* at;
  int64_t count;
};

void whole_blocks(const Linear& l, int64_t first, int64_t end) {
  const uint16_t* w = static_cast<const uint16_t*>(l.packed);
  const int64_t block = l.inputs * kBlock;
  panels(
      l, first, end,
      [=](int64_t strip, const uint16_t** w0, const uint16_t** w1) {
        *w0 = w + strip * block;
        *w1 = *w0 + 512;
      },
      [=](int64_t strip) { return Bytes{w + (strip + 1) * block, strip + 1 < end ? block * 2 : 0}; }, kBlock,
      [&l](int64_t row, int64_t at, const float* sums) {
        store_outputs(l, row, at, _mm512_load_ps(sums), _mm512_load_ps(sums + 16));
      });
}

void share_of_tiles(const Linear& l, int64_t first, int64_t end) {
  __asm__ volatile("" ::: "memory");
  if (l.rows >= 32) {
    whole_blocks(l, first, end);
  } else {
    const int64_t low = std::min<int64_t>(l.rows, 16), high = l.rows - low;
    alignas(64) float sums[32 * 32];
    configure(low, high);
    for (int64_t block = first; block < end; ++block) {
      if (high > 0) {
        tiles<true>(l, block, low, high, sums);
      } else {
        tiles<false>(l, block, low, 0, sums);
      }
    }
  }
  _tile_release();
}

// ---- gated ----
//
// Half a block of each layer side by side: what is gated lies in one row of sums.
void gated_panels(const Linear& gate, const Linear& up, void* y, int64_t first, int64_t end) {
  __asm__ volatile("" ::: "memory");
  const uint16_t *w = static_cast<const uint16_t*>(gate.packed), *u = static_cast<const uint16_t*>(up.packed);
  const int64_t block = gate.inputs * kBlock;
  panels(
      gate, first * 2, end * 2,
      [=](int64_t strip, const uint16_t** w0, const uint16_t** w1) {
        *w0 = w + strip / 2 * block + strip % 2 * 512;
        *w1 = u + strip / 2 * block + strip % 2 * 512;
      },
      [=](int64_t strip) {
        return Bytes{(strip % 2 ? u : w) + (strip / 2 + 1) * block, strip / 2 + 1 < end ? block * 2 : 0};
      },
      16,
      [&](int64_t row, int64_t at, const float* sums) {
        const __m512 g = with_bias(gate, at, _mm512_load_ps(sums)), v = with_bias(up, at, _mm512_load_ps(sums + 16));
        const __mmask16 there = mask16(gate.outputs - at);
        _mm256_mask_storeu_epi16(static_cast<uint16_t*>(y) + row * gate.outputs + at, there, gated(g, v));
      });
  _tile_release();
}

#endif  // MICROTOME_AMX

}  // namespace

bool float32_served() { return true; }

namespace {

void share_of_float32(const Linear& l, int64_t first, int64_t end) {
  int64_t block = first;
  if (l.rows <= kRowsFew) {
    for (; block + 4 <= end; block += 4) last_float32<kRowsFew, 4, true>(l, block, 0);
  }
  for (; block + 2 <= end; block += 2) all_float32<2>(l, block);
  for (; block < end; ++block) all_float32<1>(l, block);
}

#ifdef MICROTOME_BF16
void share_of_bfloat16(const Linear& l, int64_t first, int64_t end, Unit unit) {
#ifdef MICROTOME_AMX
  if (unit == Unit::kMatrix) return share_of_tiles(l, first, end);
#endif
  for (int64_t block = first; block < end; ++block) {
    int64_t row = 0;
    for (; row + kRows <= l.rows; row += kRows) rows_bfloat16<kRows>(l, block, row);
    tail_bfloat16<kRows - 1>(l, block, row);
  }
}
#endif

// Calls each(offset of 16 outputs, how many there are) over all rows' outputs of blocks [first, end).
template <typename Each>
void over_outputs(const Linear& l, int64_t first, int64_t end, Each each) {
  const int64_t stop = std::min(end * kBlock, l.outputs);
  for (int64_t row = 0; row < l.rows; ++row) {
    for (int64_t at = first * kBlock; at < stop; at += 16) each(row * l.outputs + at, mask16(stop - at));
  }
}

}  // namespace

void linear_float32(const Linear* layers, int count) { over_blocks(layers, count, share_of_float32); }

void gated_float32(const Linear& gate, const Linear& up, void* y) {
  over_blocks(&gate, 1, [&](const Linear& l, int64_t first, int64_t end) {
    share_of_float32(l, first, end);
    share_of_float32(up, first, end);
    over_outputs(l, first, end, [&](int64_t at, __mmask16 there) {
      const __m512 g = _mm512_maskz_loadu_ps(there, static_cast<const float*>(l.y) + at);
      const __m512 v = _mm512_maskz_loadu_ps(there, static_cast<const float*>(up.y) + at);
      const __m512 below = _mm512_add_ps(_mm512_set1_ps(1.0f), exp2_of(_mm512_mul_ps(g, _mm512_set1_ps(-kLog2e))));
      _mm512_mask_storeu_ps(static_cast<float*>(y) + at, there, _mm512_mul_ps(_mm512_div_ps(g, below), v));
    });
  });
}

Unit bfloat16_unit() {
#ifdef MICROTOME_AMX
  if (matrix_granted()) return Unit::kMatrix;
#endif
#ifdef MICROTOME_BF16
  return Unit::kVectors;
#else
  return Unit::kNone;
#endif
}

void linear_bfloat16(const Linear* layers, int count, Unit unit) {
#ifdef MICROTOME_BF16
  over_blocks(layers, count, [=](const Linear& l, int64_t first, int64_t end) { share_of_bfloat16(l, first, end, unit); });
#endif
}

bool gated_needs_room(int64_t rows, Unit unit) { return unit != Unit::kMatrix || rows < 32; }

void gated_bfloat16(const Linear& gate, const Linear& up, void* y, Unit unit) {
#ifdef MICROTOME_BF16
  over_blocks(&gate, 1, [&](const Linear& l, int64_t first, int64_t end) {
#ifdef MICROTOME_AMX
    if (!gated_needs_room(l.rows, unit)) return gated_panels(l, up, y, first, end);
#endif
    share_of_bfloat16(l, first, end, unit);
    share_of_bfloat16(up, first, end, unit);
    over_outputs(l, first, end, [&](int64_t at, __mmask16 there) {
      const __m512 g = widened(_mm256_maskz_loadu_epi16(there, static_cast<const uint16_t*>(l.y) + at));
      const __m512 v = widened(_mm256_maskz_loadu_epi16(there, static_cast<const uint16_t*>(up.y) + at));
      _mm256_mask_storeu_epi16(static_cast<uint16_t*>(y) + at, there, gated(g, v));
    });
  });
#endif
}

}  // namespace microtome

#include "between.h"

namespace microtome {

#endif  // MICROTOME_AVX512

}  // namespace microtome
