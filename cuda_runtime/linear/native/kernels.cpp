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

// Inputs [from, to) of rows [row, row + low + high) of one block; `sums` [32][32] carries what came before from call to
// call, and outputs are written with the last inputs.
template <bool kBoth, bool kPrefetch>
void tiles(const Linear& l, int64_t block, int64_t row, int64_t low, int64_t high, int64_t from, int64_t to,
           float* sums) {
  const uint16_t* x = static_cast<const uint16_t*>(l.x) + row * l.x_stride;
  const uint16_t* w = static_cast<const uint16_t*>(l.packed) + block * l.inputs * kBlock;
  if (from == 0) {
    _tile_zero(0);
    _tile_zero(1);
    if (kBoth) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, sums, 128);
    _tile_loadd(1, sums + 16, 128);
    if (kBoth) {
      _tile_loadd(2, sums + 16 * 32, 128);
      _tile_loadd(3, sums + 16 * 32 + 16, 128);
    }
  }
  for (int64_t k = from; k < to; k += 32) {
    if (kPrefetch) {
      prefetch_tile(w + k * kBlock + kAheadBytes / 2);
      prefetch_tile(w + k * kBlock + kAheadBytes / 2 + 512);
    }
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
  if (to < l.inputs) return;
  for (int64_t r = 0; r < low + high; ++r) {
    store_outputs(l, row + r, block * kBlock, _mm512_load_ps(sums + r * 32), _mm512_load_ps(sums + r * 32 + 16));
  }
}

constexpr int64_t kNearInputs = 320;        // 32 rows of so many inputs stay in the first-level cache
constexpr int64_t kNearBytes = 768 * 1024;  // of weights that stay in the second-level cache
constexpr int64_t kNearBlocks = 2;          // at most (measured: more is slower)

// Whole panels of 32 rows. Weights of a few blocks are brought near once and taken by panel after panel, whose inputs
// are brought nearer still, as many as fit, and taken by block after block.
void panels(const Linear& l, int64_t first, int64_t end, int64_t rows) {
  alignas(64) float sums[kNearBlocks][32 * 32];
  const int64_t parts = (l.inputs + kNearInputs - 1) / kNearInputs;
  const int64_t part = (l.inputs / 32 + parts - 1) / parts * 32;
  const int64_t fit = std::min(kNearBlocks, std::max<int64_t>(1, kNearBytes / (l.inputs * kBlock * 2)));
  configure(16, 16);
  for (int64_t begin = first; begin < end; begin += fit) {
    const int64_t stop = std::min(begin + fit, end);
    for (int64_t row = 0; row < rows; row += 32) {
      for (int64_t from = 0; from < l.inputs; from += part) {
        const int64_t to = std::min(from + part, l.inputs);
        for (int64_t block = begin; block < stop; ++block) {
          if (row == 0) {
            tiles<true, true>(l, block, row, 16, 16, from, to, sums[block - begin]);
          } else {
            tiles<true, false>(l, block, row, 16, 16, from, to, sums[block - begin]);
          }
        }
      }
    }
  }
}

void share_of_tiles(const Linear& l, int64_t first, int64_t end) {
  const int64_t whole = l.rows / 32 * 32, left = l.rows - whole;
  const int64_t low = std::min<int64_t>(left, 16), high = left - low;
  __asm__ volatile("" ::: "memory");
  if (whole > 0) panels(l, first, end, whole);
  if (left > 0) {
    alignas(64) float sums[32 * 32];
    configure(low, high);
    for (int64_t block = first; block < end; ++block) {
      if (high > 0) {
        tiles<true, true>(l, block, whole, low, high, 0, l.inputs, sums);
      } else {
        tiles<false, true>(l, block, whole, low, 0, 0, l.inputs, sums);
      }
    }
  }
  _tile_release();
}

#endif  // MICROTOME_AMX

}  // namespace

bool float32_served() { return true; }

void linear_float32(const Linear* layers, int count) {
  over_blocks(layers, count, [](const Linear& l, int64_t first, int64_t end) {
    int64_t block = first;
    if (l.rows <= kRowsFew) {
      for (; block + 4 <= end; block += 4) last_float32<kRowsFew, 4, true>(l, block, 0);
    }
    for (; block + 2 <= end; block += 2) all_float32<2>(l, block);
    for (; block < end; ++block) all_float32<1>(l, block);
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
#ifdef MICROTOME_AMX
  if (unit == Unit::kMatrix) return over_blocks(layers, count, share_of_tiles);
#endif
#ifdef MICROTOME_BF16
  over_blocks(layers, count, [](const Linear& l, int64_t first, int64_t end) {
    for (int64_t block = first; block < end; ++block) {
      int64_t row = 0;
      for (; row + kRows <= l.rows; row += kRows) rows_bfloat16<kRows>(l, block, row);
      tail_bfloat16<kRows - 1>(l, block, row);
    }
  });
#endif
}

#endif  // MICROTOME_AVX512

}  // namespace microtome
