// Weights stream through once per call, in the order in which they lie; rows wait in the nearer caches.

#include "kernels.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

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

namespace microtome_int8 {

#ifndef MICROTOME_AVX512

Unit bfloat16_unit() { return Unit::kNone; }
bool float32_served() { return false; }
void linear_float32(const Linear*, int) {}
void linear_bfloat16(const Linear*, int, Unit) {}

#else

namespace {

constexpr int kRows = 10;  // over half a block of float32, or a whole one of bfloat16: 20 sums
constexpr int64_t kSerialWork = 1 << 14;  // multiply-adds of whole blocks below which waking threads costs more
constexpr int64_t kAheadBytes = 2048;     // weights that come from memory are asked for so long before they are needed
constexpr float kUnscale = 0x1p-24f;      // numbers are used where they stand, in a word's highest byte

inline int64_t blocks_of(const Linear& l) { return (l.outputs + kBlock - 1) / kBlock; }
inline const int8_t* block_at(const Linear& l, int64_t block) { return l.packed + block * l.inputs * kBlock; }

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

inline void prefetch(const int8_t* at) {
  _mm_prefetch(reinterpret_cast<const char*>(at) + kAheadBytes, _MM_HINT_T0);
}

// 16 outputs' next four inputs as four vectors of floats, each 2^24 times its number, exactly. A sign comes with the
// highest byte, so no byte is ever extended.
struct Four {
  __m512 input[4];
};

inline Four widened(const int8_t* at) {
  const __m512i bytes = _mm512_loadu_si512(at);
  const __m512i highest = _mm512_set1_epi32(int32_t(0xff000000u));
  return {{_mm512_cvtepi32_ps(_mm512_slli_epi32(bytes, 24)),
           _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_slli_epi32(bytes, 16), highest)),
           _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_slli_epi32(bytes, 8), highest)),
           _mm512_cvtepi32_ps(_mm512_and_si512(bytes, highest))}};
}

inline __m512 scale_at(const Linear& l, int64_t first, __mmask16 there) {
  return _mm512_mul_ps(_mm512_maskz_loadu_ps(there, l.scale + first), _mm512_set1_ps(kUnscale));
}

inline __mmask16 mask16(int64_t count) {
  return count >= 16 ? 0xffff : __mmask16((1u << std::max<int64_t>(count, 0)) - 1);
}

// ---- float32 ----

template <int kCount, bool kPrefetch>
void rows_float32(const Linear& l, int64_t block, int64_t row) {
  const float* x = static_cast<const float*>(l.x) + row * l.x_stride;
  const int8_t* w = block_at(l, block);
  __m512 sum[kCount][2];
  for (int r = 0; r < kCount; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
  for (int64_t k = 0; k < l.inputs; k += 4) {
    const int8_t* at = w + k * kBlock;
    if (kPrefetch) prefetch(at);
    if (kPrefetch) prefetch(at + 64);
    const Four low = widened(at), high = widened(at + 64);
    for (int i = 0; i < 4; ++i) {
      for (int r = 0; r < kCount; ++r) {
        const __m512 value = _mm512_set1_ps(x[r * l.x_stride + k + i]);
        sum[r][0] = _mm512_fmadd_ps(value, low.input[i], sum[r][0]);
        sum[r][1] = _mm512_fmadd_ps(value, high.input[i], sum[r][1]);
      }
    }
  }
  for (int half = 0; half < 2; ++half) {
    const int64_t first = block * kBlock + half * 16;
    const __mmask16 there = mask16(l.outputs - first);
    const __m512 scale = scale_at(l, first, there);
    const __m512 bias =
        l.bias ? _mm512_maskz_loadu_ps(there, static_cast<const float*>(l.bias) + first) : _mm512_setzero_ps();
    for (int r = 0; r < kCount; ++r) {
      float* y = static_cast<float*>(l.y) + (row + r) * l.outputs + first;
      _mm512_mask_storeu_ps(y, there, _mm512_fmadd_ps(sum[r][half], scale, bias));
    }
  }
}

// ---- bfloat16 ----

#ifdef MICROTOME_BF16

// Two vectors of 16 outputs' pairs of inputs, in bfloat16: a float of an 8-bit number has no bits in its lower half.
inline __m512i pair(__m512 even, __m512 odd) {
  return _mm512_or_si512(_mm512_castps_si512(odd), _mm512_srli_epi32(_mm512_castps_si512(even), 16));
}

inline __m512bh pair_of_x(const uint16_t* at) {
  int32_t bits;
  std::memcpy(&bits, at, 4);
  return (__m512bh)_mm512_set1_epi32(bits);
}

// Two vectors of sums to 32 bfloat16 outputs.
inline void store_outputs(const Linear& l, int64_t row, int64_t first, __m512 low, __m512 high) {
  const int64_t count = std::min<int64_t>(kBlock, l.outputs - first);
  const __mmask32 there = count >= 32 ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
  __m512 b0 = _mm512_setzero_ps(), b1 = b0;
  if (l.bias) {
    const __m512i b = _mm512_maskz_loadu_epi16(there, static_cast<const uint16_t*>(l.bias) + first);
    b0 = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(b)), 16));
    b1 = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(b, 1)), 16));
  }
  low = _mm512_fmadd_ps(low, scale_at(l, first, __mmask16(there)), b0);
  high = _mm512_fmadd_ps(high, scale_at(l, first + 16, __mmask16(there >> 16)), b1);
  const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(high, low);
  _mm512_mask_storeu_epi16(static_cast<uint16_t*>(l.y) + row * l.outputs + first, there, rounded);
}

template <int kCount, bool kPrefetch>
void rows_bfloat16(const Linear& l, int64_t block, int64_t row) {
  const uint16_t* x = static_cast<const uint16_t*>(l.x) + row * l.x_stride;
  const int8_t* w = block_at(l, block);
  __m512 sum[kCount][2];
  for (int r = 0; r < kCount; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
  for (int64_t k = 0; k < l.inputs; k += 4) {
    for (int half = 0; half < 2; ++half) {
      const int8_t* at = w + k * kBlock + half * 64;
      if (kPrefetch) prefetch(at);
      const Four weights = widened(at);
      for (int i = 0; i < 4; i += 2) {
        const __m512bh both = (__m512bh)pair(weights.input[i], weights.input[i + 1]);
        for (int r = 0; r < kCount; ++r) {
          sum[r][half] = _mm512_dpbf16_ps(sum[r][half], pair_of_x(x + r * l.x_stride + k + i), both);
        }
      }
    }
  }
  for (int r = 0; r < kCount; ++r) store_outputs(l, row + r, block * kBlock, sum[r][0], sum[r][1]);
}

#endif  // MICROTOME_BF16

// ---- all rows of a block, a few at a time ----

enum class Numbers { kFloat32, kBFloat16 };

template <Numbers kNumbers, int kCount, bool kPrefetch>
inline void some_rows(const Linear& l, int64_t block, int64_t row) {
#ifdef MICROTOME_BF16
  if constexpr (kNumbers == Numbers::kBFloat16) return rows_bfloat16<kCount, kPrefetch>(l, block, row);
#endif
  if constexpr (kNumbers == Numbers::kFloat32) return rows_float32<kCount, kPrefetch>(l, block, row);
}

template <Numbers kNumbers, int kCount, bool kPrefetch>
void last_rows(const Linear& l, int64_t block, int64_t row) {
  if constexpr (kCount > 0) {
    if (l.rows - row == kCount) return some_rows<kNumbers, kCount, kPrefetch>(l, block, row);
    last_rows<kNumbers, kCount - 1, kPrefetch>(l, block, row);
  }
}

// The first rows bring a block's weights nearer for the others.
template <Numbers kNumbers>
void in_vectors(const Linear& l, int64_t first, int64_t end) {
  for (int64_t block = first; block < end; ++block) {
    if (l.rows < kRows) {
      last_rows<kNumbers, kRows - 1, true>(l, block, 0);
      continue;
    }
    some_rows<kNumbers, kRows, true>(l, block, 0);
    int64_t row = kRows;
    for (; row + kRows <= l.rows; row += kRows) some_rows<kNumbers, kRows, false>(l, block, row);
    last_rows<kNumbers, kRows - 1, false>(l, block, row);
  }
}

#ifdef MICROTOME_AMX

// ---- bfloat16 in tiles ----
//
// Tiles 0 to 3 hold sums: rows [0, 16) and [16, 32) by the block's halves. 4 and 5 hold rows of x, 6 and 7 weights,
// which are widened into memory that stays in the nearest cache first: the unit takes them from nowhere else.

constexpr int64_t kUnitElements = kUnitInputs * kBlock;  // of one step: a tile for each half
constexpr int kRing = 4;    // steps' widened weights that are there at once
constexpr int kLead = 2;    // steps between widening and use, in which stores settle

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

// 32 inputs of a block as two tiles, one after the other.
inline void widen(const int8_t* from, uint16_t* to) {
  for (int j = 0; j < 8; ++j) {
    for (int half = 0; half < 2; ++half) {
      const int8_t* at = from + j * 128 + half * 64;
      prefetch(at);
      const Four weights = widened(at);
      uint16_t* rows = to + half * 512 + j * 64;
      _mm512_store_si512(rows, pair(weights.input[0], weights.input[1]));
      _mm512_store_si512(rows + 32, pair(weights.input[2], weights.input[3]));
    }
  }
  __asm__ volatile("" ::: "memory");  // GCC 12 does not know that a tile load reads memory
}

// One step of sums: 32 inputs of rows `x` by the two tiles at `w`.
template <bool kBoth>
inline void step(const uint16_t* x, int64_t x_stride, const uint16_t* w) {
  _tile_loadd(4, x, x_stride * 2);
  _tile_loadd(6, w, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, w + 512, 64);
  _tile_dpbf16ps(1, 4, 7);
  if (kBoth) {
    _tile_loadd(5, x + 16 * x_stride, x_stride * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

template <bool kBoth>
inline void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  if (kBoth) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

template <bool kBoth>
inline void store_sums(float* sums) {
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  if (kBoth) {
    _tile_stored(2, sums + 16 * 32, 128);
    _tile_stored(3, sums + 16 * 32 + 16, 128);
  }
  __asm__ volatile("" ::: "memory");  // nor that a tile store writes it
}

void outputs_of(const Linear& l, int64_t block, int64_t row, int64_t count, const float* sums) {
  for (int64_t r = 0; r < count; ++r) {
    store_outputs(l, row + r, block * kBlock, _mm512_load_ps(sums + r * 32), _mm512_load_ps(sums + r * 32 + 16));
  }
}

// Up to 32 rows: weights are widened a little ahead of their only use.
template <bool kBoth>
void few_rows(const Linear& l, int64_t first, int64_t end, int64_t low, int64_t high) {
  alignas(64) uint16_t ring[kRing][kUnitElements];
  alignas(64) float sums[32 * 32];
  const uint16_t* x = static_cast<const uint16_t*>(l.x);
  const int8_t* from = block_at(l, first);
  const int64_t units = l.inputs / kUnitInputs, all = units * (end - first);
  configure(low, high);
  for (int64_t i = 0; i < std::min<int64_t>(kLead, all); ++i) widen(from + i * kUnitElements, ring[i % kRing]);
  int64_t i = 0;
  for (int64_t block = first; block < end; ++block) {
    clear_sums<kBoth>();
    for (int64_t unit = 0; unit < units; ++unit, ++i) {
      if (i + kLead < all) widen(from + (i + kLead) * kUnitElements, ring[(i + kLead) % kRing]);
      step<kBoth>(x + unit * kUnitInputs, l.x_stride, ring[i % kRing]);
    }
    store_sums<kBoth>(sums);
    outputs_of(l, block, 0, low + high, sums);
  }
}

// More rows: a block is widened once, into the second-level cache, and taken by panel after panel of 32 rows.
void many_rows(const Linear& l, int64_t first, int64_t end) {
  alignas(64) float sums[32 * 32];
  const int64_t units = l.inputs / kUnitInputs;
  const std::unique_ptr<uint16_t[]> memory(new uint16_t[l.inputs * kBlock + 32]);
  uint16_t* wide = memory.get();
  wide += (64 - reinterpret_cast<uintptr_t>(wide) % 64) % 64 / 2;
  const int64_t whole = l.rows / 32 * 32, left = l.rows - whole;
  const int64_t low = std::min<int64_t>(left, 16), high = left - low;
  for (int64_t block = first; block < end; ++block) {
    for (int64_t unit = 0; unit < units; ++unit) {
      widen(block_at(l, block) + unit * kUnitElements, wide + unit * kUnitElements);
    }
    configure(16, 16);
    for (int64_t row = 0; row < whole; row += 32) {
      const uint16_t* x = static_cast<const uint16_t*>(l.x) + row * l.x_stride;
      clear_sums<true>();
      for (int64_t unit = 0; unit < units; ++unit) {
        step<true>(x + unit * kUnitInputs, l.x_stride, wide + unit * kUnitElements);
      }
      store_sums<true>(sums);
      outputs_of(l, block, row, 32, sums);
    }
    if (left == 0) continue;
    const uint16_t* x = static_cast<const uint16_t*>(l.x) + whole * l.x_stride;
    configure(low, high);
    high > 0 ? clear_sums<true>() : clear_sums<false>();
    for (int64_t unit = 0; unit < units; ++unit) {
      const uint16_t* w = wide + unit * kUnitElements;
      high > 0 ? step<true>(x + unit * kUnitInputs, l.x_stride, w) : step<false>(x + unit * kUnitInputs, l.x_stride, w);
    }
    high > 0 ? store_sums<true>(sums) : store_sums<false>(sums);
    outputs_of(l, block, whole, left, sums);
  }
}

void in_tiles(const Linear& l, int64_t first, int64_t end) {
  __asm__ volatile("" ::: "memory");
  if (l.rows > 32) {
    many_rows(l, first, end);
  } else if (l.rows > 16) {
    few_rows<true>(l, first, end, 16, l.rows - 16);
  } else {
    few_rows<false>(l, first, end, l.rows, 0);
  }
  _tile_release();
}

#endif  // MICROTOME_AMX

}  // namespace

bool float32_served() { return true; }

void linear_float32(const Linear* layers, int count) { over_blocks(layers, count, in_vectors<Numbers::kFloat32>); }

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
  if (unit == Unit::kMatrix) return over_blocks(layers, count, in_tiles);
#endif
#ifdef MICROTOME_BF16
  over_blocks(layers, count, in_vectors<Numbers::kBFloat16>);
#endif
}

#endif  // MICROTOME_AVX512

}  // namespace microtome_int8
