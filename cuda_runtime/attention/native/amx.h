// Tiles of queries on the matrix unit of a CPU that has AMX with bfloat16; elsewhere `usable` is false and the rest is
// never called.
//
// A run's K and V are packed once per key/value head and shared by all its tiles of queries. Both products are computed
// transposed, so that a vector always runs along 16 queries: S^T = K Q^T takes K's rows as they lie, and O^T = V^T P^T
// takes P^T as two rows of S^T woven together. Sums are float32; weights are rounded to bfloat16 before the second
// product, as V is.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "kernels.h"
#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__) && defined(__linux__)
#define MICROTOME_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace microtome::amx {

constexpr int64_t kWidth = 32;   // queries of a tile
constexpr int64_t kBlock = 128;  // positions taken at once
constexpr int64_t kPiece = 128;  // positions packed by one thread at once

// Positions [first, end) of one row under one key/value head; `offset` in bf16 elements, set by `Packed`.
struct Run {
  int64_t row;
  int64_t kv_head;
  int64_t first, end;
  int64_t offset;
};

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Query, S^T, P^T and O^T of one tile, in floats.
inline int64_t scratch_floats(int64_t size) {
  const int64_t wide = round_up(size, 32);
  return wide * kWidth / 2 + kBlock * kWidth + kBlock * kWidth / 2 + wide * kWidth;
}

#ifdef MICROTOME_AMX

// The kernel hands out the matrix unit's state on request, once per process.
inline bool usable() {
  static const bool granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
  return granted;
}

// All eight tiles: 16 rows of 64 bytes.
inline void configure() {
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  // GCC 12 believes that the load reads eight bytes only, and would drop the other stores.
  __asm__ volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}

inline void release() { _tile_release(); }

// Finish all stores here: GCC 12 does not know that a tile load reads memory.
INLINE void settle() { __asm__ volatile("" ::: "memory"); }

// As for floats: 16 x 16 elements of 32 bits, whatever they mean.
INLINE void transpose(__m512i* rows) { microtome::transpose(reinterpret_cast<Vec*>(rows)); }

// 2^x within 4e-6, which the rounding of weights to bfloat16 hides; 0 far below.
INLINE __m512 exp2_short(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(9.6181291e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504109e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022651e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

// K as [positions, wide], V as [positions / 32, wide, 32]: both zero beyond what there is.
class Packed {
 public:
  Packed(const Forward& f, std::vector<Run>& runs) : runs_(runs), wide_(round_up(f.size, 32)) {
    int64_t elements = 0;
    for (size_t i = 0; i < runs.size(); ++i) {
      const int64_t positions = round_up(runs[i].end - runs[i].first, 32);
      runs[i].offset = elements;
      elements += 2 * positions * wide_;
      for (int64_t at = 0; at < positions; at += kPiece) pieces_.push_back({int64_t(i), at});
    }
    if (elements > 0) {
      data_ = static_cast<uint16_t*>(std::aligned_alloc(64, round_up(elements * 2, 64)));
      if (data_ == nullptr) throw std::bad_alloc();
    }
  }
  ~Packed() { std::free(data_); }
  Packed(const Packed&) = delete;
  Packed& operator=(const Packed&) = delete;

  int64_t pieces() const { return int64_t(pieces_.size()); }

  void fill(const Forward& f, int64_t piece) {
    const Run& run = runs_[pieces_[piece].run];
    const int64_t positions = run.end - run.first, stride = f.kv_heads * f.size;
    const int32_t* cells = f.rows + run.row * f.row_stride + run.first;
    const uint16_t* k = static_cast<const uint16_t*>(f.k_pool) + run.kv_head * f.size;
    const uint16_t* v = static_cast<const uint16_t*>(f.v_pool) + run.kv_head * f.size;
    const int64_t begin = pieces_[piece].first, end = std::min(begin + kPiece, round_up(positions, 32));
    for (int64_t p = begin; p < end; ++p) {
      uint16_t* to = data_ + run.offset + p * wide_;
      if (p < positions) {
        std::memcpy(to, k + cells[p] * stride, f.size * 2);
        std::fill(to + f.size, to + wide_, 0);
      } else {
        std::fill(to, to + wide_, 0);
      }
    }
    for (int64_t p = begin; p < end; p += 32) {
      uint16_t* to = v_of(run) + p * wide_;
      for (int64_t d = 0; d < wide_; d += 16) {
        __m512i woven[16];
        for (int64_t i = 0; i < 16; ++i) {
          const int64_t even = p + 2 * i;
          woven[i] = _mm512_or_si512(row16(v, cells, even, positions, stride, d, f.size),
                                     _mm512_slli_epi32(row16(v, cells, even + 1, positions, stride, d, f.size), 16));
        }
        transpose(woven);
        for (int64_t i = 0; i < 16; ++i) _mm512_store_si512(to + (d + i) * 32, woven[i]);
      }
    }
  }

  // Queries [begin, end) of the run that starts at `first_token`, at most kWidth of them.
  void attend(const Forward& f, const Softmax& softmax, const Tokens& q, const Tokens& out, int64_t first_token,
              int64_t begin, int64_t end, int64_t pack, float* room) const {
    const Run& run = runs_[pack];
    const int64_t group = f.heads / f.kv_heads, count = end - begin;
    uint16_t* q_packed = reinterpret_cast<uint16_t*>(room);         // [2][wide / 2][16][2]
    float* s_PW = room + wide_ * kWidth / 2;                        // [kBlock][kWidth]
    uint16_t* p_packed = reinterpret_cast<uint16_t*>(s_PW + kBlock * kWidth);  // [2][kBlock / 2][16][2]
    float* acc_HW = s_PW + kBlock * kWidth + kBlock * kWidth / 2;   // [wide][kWidth]
    alignas(64) int32_t position_W[kWidth];
    alignas(64) float maximum_W[kWidth], sum_W[kWidth];

    const uint16_t* queries[kWidth];
    for (int64_t w = 0; w < kWidth; ++w) {  // lanes past the end repeat the last query; their results are dropped
      const int64_t query = begin + std::min(w, count - 1);
      const int64_t token = first_token + query / group, head = run.kv_head * group + query % group;
      queries[w] = static_cast<const uint16_t*>(q.data) + token * q.token_stride + head * q.head_stride;
      position_W[w] = f.positions[token];
      maximum_W[w] = softmax.sinks ? softmax.sinks[head] * kLog2e : -1e30f;
      sum_W[w] = softmax.sinks ? 1.0f : 0.0f;
    }
    for (int64_t half = 0; half < 2; ++half) {
      for (int64_t d = 0; d < wide_; d += 32) {
        const __mmask32 there = f.size - d >= 32 ? ~__mmask32{0} : (__mmask32{1} << (f.size - d)) - 1;
        __m512i rows[16];
        for (int64_t i = 0; i < 16; ++i) rows[i] = _mm512_maskz_loadu_epi16(there, queries[half * 16 + i] + d);
        transpose(rows);
        uint16_t* to = q_packed + half * wide_ * 16 + d * 16;
        for (int64_t i = 0; i < 16; ++i) _mm512_store_si512(to + i * 32, rows[i]);
      }
    }
    std::memset(acc_HW, 0, wide_ * kWidth * sizeof(float));
    const int64_t lowest = *std::min_element(position_W, position_W + kWidth);
    const int64_t highest = *std::max_element(position_W, position_W + kWidth);
    const int64_t low = softmax.window > 0 ? std::max<int64_t>(0, lowest + 1 - softmax.window) : 0;
    const int64_t edge = softmax.window > 0 ? std::max<int64_t>(0, highest + 1 - softmax.window) : 0;
    const int64_t low_packed = (low - run.first) / 32 * 32, end_packed = round_up(highest + 1 - run.first, 32);
    const bool capped = softmax.softcap > 0;
    alignas(64) static constexpr uint16_t kWeave[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i weave = _mm512_load_si512(kWeave);
    const __m512 unit = _mm512_set1_ps(capped ? 1.0f : softmax.scale * kLog2e);  // of what s_PW holds

    for (int64_t from = low_packed; from < end_packed; from += kBlock) {
      const int64_t here = std::min(kBlock, end_packed - from);
      const uint16_t* k = data_ + run.offset + from * wide_;
      settle();
      for (int64_t p = 0; p < here; p += 32) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t d = 0; d < wide_; d += 32) {
          _tile_loadd(4, k + p * wide_ + d, wide_ * 2);
          _tile_loadd(6, q_packed + d * 16, 64);
          _tile_dpbf16ps(0, 4, 6);
          _tile_loadd(7, q_packed + wide_ * 16 + d * 16, 64);
          _tile_dpbf16ps(1, 4, 7);
          _tile_loadd(5, k + (p + 16) * wide_ + d, wide_ * 2);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, s_PW + p * kWidth, kWidth * 4);
        _tile_stored(1, s_PW + p * kWidth + 16, kWidth * 4);
        _tile_stored(2, s_PW + (p + 16) * kWidth, kWidth * 4);
        _tile_stored(3, s_PW + (p + 16) * kWidth + 16, kWidth * 4);
      }
      const int64_t first_key = run.first + from;
      const bool masked = first_key + here - 1 > lowest || first_key < edge;
      for (int64_t half = 0; half < 2; ++half) {
        float* s = s_PW + half * 16;
        const __m512i position = _mm512_load_si512(position_W + half * 16);
        if (masked || capped) {
          const int64_t window = softmax.window > 0 ? std::min<int64_t>(softmax.window, 1 << 30) : 1 << 30;
          const __m512i floor = _mm512_sub_epi32(position, _mm512_set1_epi32(int32_t(window)));
          for (int64_t p = 0; p < here; ++p) {
            __m512 x = _mm512_load_ps(s + p * kWidth);
            if (capped) x = (__m512)(cap((Vec)_mm512_mul_ps(x, _mm512_set1_ps(softmax.scale)), softmax.softcap) * kLog2e);
            const __m512i key = _mm512_set1_epi32(int32_t(first_key + p));
            const __mmask16 seen = _mm512_cmple_epi32_mask(key, position) & _mm512_cmpgt_epi32_mask(key, floor);
            _mm512_store_ps(s + p * kWidth, _mm512_mask_blend_ps(seen, _mm512_set1_ps(-3e38f), x));
          }
        }
        // Four chains each, for latency; `here` is a multiple of 32.
        __m512 best[4];
        for (int c = 0; c < 4; ++c) best[c] = _mm512_load_ps(s + c * kWidth);
        for (int64_t p = 4; p < here; p += 4) {
          for (int c = 0; c < 4; ++c) best[c] = _mm512_max_ps(best[c], _mm512_load_ps(s + (p + c) * kWidth));
        }
        const __m512 top = _mm512_max_ps(_mm512_max_ps(best[0], best[1]), _mm512_max_ps(best[2], best[3]));
        const __m512 before = _mm512_load_ps(maximum_W + half * 16);
        const __m512 maximum = _mm512_max_ps(before, _mm512_mul_ps(top, unit));
        const __m512 keep = exp2_short(_mm512_sub_ps(before, maximum));
        __m512 sums[2] = {_mm512_mul_ps(_mm512_load_ps(sum_W + half * 16), keep), _mm512_setzero_ps()};
        uint16_t* to = p_packed + half * kBlock * 16;
        for (int64_t p = 0; p < here; p += 2) {
          const __m512 even = exp2_short(_mm512_fmsub_ps(_mm512_load_ps(s + p * kWidth), unit, maximum));
          const __m512 odd = exp2_short(_mm512_fmsub_ps(_mm512_load_ps(s + (p + 1) * kWidth), unit, maximum));
          sums[0] = _mm512_add_ps(sums[0], even);
          sums[1] = _mm512_add_ps(sums[1], odd);
          const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
          _mm512_store_si512(to + p * 16, _mm512_permutexvar_epi16(weave, halves));
        }
        _mm512_store_ps(maximum_W + half * 16, maximum);
        _mm512_store_ps(sum_W + half * 16, _mm512_add_ps(sums[0], sums[1]));
        if (_mm512_cmpneq_ps_mask(before, maximum) != 0) {
          for (int64_t d = 0; d < wide_; ++d) {
            float* at = acc_HW + d * kWidth + half * 16;
            _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), keep));
          }
        }
      }
      const uint16_t* v = v_of(run) + from * wide_;
      settle();
      for (int64_t d = 0; d < wide_; d += 32) {
        float* acc = acc_HW + d * kWidth;
        _tile_loadd(0, acc, kWidth * 4);
        _tile_loadd(1, acc + 16, kWidth * 4);
        _tile_loadd(2, acc + 16 * kWidth, kWidth * 4);
        _tile_loadd(3, acc + 16 * kWidth + 16, kWidth * 4);
        for (int64_t p = 0; p < here; p += 32) {
          _tile_loadd(4, v + p * wide_ + d * 32, 64);
          _tile_loadd(6, p_packed + p * 16, 64);
          _tile_dpbf16ps(0, 4, 6);
          _tile_loadd(7, p_packed + kBlock * 16 + p * 16, 64);
          _tile_dpbf16ps(1, 4, 7);
          _tile_loadd(5, v + p * wide_ + (d + 16) * 32, 64);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, acc, kWidth * 4);
        _tile_stored(1, acc + 16, kWidth * 4);
        _tile_stored(2, acc + 16 * kWidth, kWidth * 4);
        _tile_stored(3, acc + 16 * kWidth + 16, kWidth * 4);
      }
      settle();
    }
    for (int64_t half = 0; half < 2; ++half) {
      const __m512 share = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(sum_W + half * 16));
      for (int64_t d = 0; d < f.size; d += 16) {
        __m512i rows[16];
        for (int64_t i = 0; i < 16; ++i) {
          rows[i] = (__m512i)_mm512_mul_ps(_mm512_load_ps(acc_HW + (d + i) * kWidth + half * 16), share);
        }
        transpose(rows);
        for (int64_t i = 0; i < 16 && half * 16 + i < count; ++i) {
          const int64_t query = begin + half * 16 + i;
          const int64_t token = first_token + query / group, head = run.kv_head * group + query % group;
          const int64_t at = token * out.token_stride + head * out.head_stride + d;
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<uint16_t*>(out.data) + at),
                              (__m256i)_mm512_cvtneps_pbh((__m512)rows[i]));
        }
      }
    }
  }

 private:
  struct Piece {
    int64_t run;
    int64_t first;
  };

  uint16_t* v_of(const Run& run) const { return data_ + run.offset + round_up(run.end - run.first, 32) * wide_; }

  // 16 elements of position p as the low halves of 32 bits.
  static INLINE __m512i row16(const uint16_t* v, const int32_t* cells, int64_t p, int64_t positions, int64_t stride,
                              int64_t d, int64_t size) {
    if (p >= positions || d >= size) return _mm512_setzero_si512();
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(v + cells[p] * stride + d)));
  }

  std::vector<Run>& runs_;
  std::vector<Piece> pieces_;
  int64_t wide_;
  uint16_t* data_ = nullptr;
};

#else

inline bool usable() { return false; }
inline void configure() {}
inline void release() {}

class Packed {
 public:
  Packed(const Forward&, std::vector<Run>&) {}
  int64_t pieces() const { return 0; }
  void fill(const Forward&, int64_t) {}
  void attend(const Forward&, const Softmax&, const Tokens&, const Tokens&, int64_t, int64_t, int64_t, int64_t,
              float*) const {}
};

#endif

}  // namespace microtome::amx
