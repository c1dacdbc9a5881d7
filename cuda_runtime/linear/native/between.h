// What stands between linear layers: a residual sum with its norm, and rotation by position. Included once.
//
// Numbers are float32 or bfloat16; sums are float32. A row has the same bits in any company and on any number of threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels.h"

namespace microtome {
namespace {

constexpr int64_t kAloneNumbers = 16384;  // so few are done before another thread is awake

struct F32 {
  using Number = float;
  static __m512 load(const float* at, __mmask16 there) { return _mm512_maskz_loadu_ps(there, at); }
  static void store(float* at, __mmask16 there, __m512 x) { _mm512_mask_storeu_ps(at, there, x); }
  static __m512 round(__m512 x) { return x; }
};

struct BF16 {
  using Number = uint16_t;
  static __m512 widened(__m256i bits) { return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16); }
  static __m512 load(const uint16_t* at, __mmask16 there) { return widened(_mm256_maskz_loadu_epi16(there, at)); }
  // To nearest, ties to even; a NaN stays one.
  static __m256i narrowed(__m512 x) {
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    const __m512i bits = (__m512i)x, odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i near = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_blend_epi32(nan, near, _mm512_set1_epi32(0x7fc00000)), 16));
#endif
  }
  static void store(uint16_t* at, __mmask16 there, __m512 x) { _mm256_mask_storeu_epi16(at, there, narrowed(x)); }
  static __m512 round(__m512 x) { return widened(narrowed(x)); }
};

template <typename Each>
void over_rows(int64_t rows, int64_t width, int threads, Each each) {
  if (rows * width < kAloneNumbers) threads = 1;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row) each(row);
}

template <typename T>
void norm_as(const Norm& n) {
  using Number = typename T::Number;
  over_rows(n.rows, n.width, n.threads, [&](int64_t row) {
    const Number* a = static_cast<const Number*>(n.a) + row * n.width;
    const Number* b = n.b ? static_cast<const Number*>(n.b) + row * n.width : nullptr;
    const Number* weight = static_cast<const Number*>(n.weight);
    Number* sum = n.b ? static_cast<Number*>(n.sum) + row * n.width : nullptr;
    Number* y = static_cast<Number*>(n.y) + row * n.width;
    __m512 squares[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t i = 0; i < n.width; i += 16) {
      const __mmask16 there = mask16(n.width - i);
      __m512 x = T::load(a + i, there);
      if (b) {
        x = T::round(_mm512_add_ps(x, T::load(b + i, there)));
        T::store(sum + i, there, x);
      }
      squares[i / 16 % 2] = _mm512_fmadd_ps(x, x, squares[i / 16 % 2]);
    }
    const float mean = _mm512_reduce_add_ps(_mm512_add_ps(squares[0], squares[1])) / float(n.width);
    const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(mean + n.epsilon));
    const Number* x = b ? sum : a;
    for (int64_t i = 0; i < n.width; i += 16) {
      const __mmask16 there = mask16(n.width - i);
      const __m512 normed = T::round(_mm512_mul_ps(T::load(x + i, there), scale));
      T::store(y + i, there, _mm512_mul_ps(T::load(weight + i, there), normed));
    }
  });
}

template <typename T>
void rotate_as(const Turned* turned, int count, const Turn& turn) {
  using Number = typename T::Number;
  const int64_t half = turn.size / 2;
  int64_t heads = 0;
  for (int i = 0; i < count; ++i) heads += turned[i].heads;
  over_rows(turn.tokens, heads * turn.size, turn.threads, [&](int64_t token) {
    const Number* cos = static_cast<const Number*>(turn.cos) + token * turn.size;
    const Number* sin = static_cast<const Number*>(turn.sin) + token * turn.size;
    for (int64_t i = 0; i < half; i += 16) {
      const __mmask16 there = mask16(half - i);
      const __m512 cos_low = T::load(cos + i, there), cos_high = T::load(cos + half + i, there);
      const __m512 sin_low = T::load(sin + i, there), sin_high = T::load(sin + half + i, there);
      for (int part = 0; part < count; ++part) {
        const Turned& t = turned[part];
        for (int64_t head = 0; head < t.heads; ++head) {
          const Number* x = static_cast<const Number*>(t.x) + token * t.token_stride + head * t.head_stride + i;
          Number* y = static_cast<Number*>(t.y) + (token * t.heads + head) * turn.size + i;
          const __m512 low = T::load(x, there), high = T::load(x + half, there);
          T::store(y, there, _mm512_fmsub_ps(low, cos_low, _mm512_mul_ps(high, sin_low)));
          T::store(y + half, there, _mm512_fmadd_ps(high, cos_high, _mm512_mul_ps(low, sin_high)));
        }
      }
    }
  });
}

}  // namespace

void norm(const Norm& n, bool float32) { float32 ? norm_as<F32>(n) : norm_as<BF16>(n); }

void rotate(const Turned* turned, int count, const Turn& turn, bool float32) {
  float32 ? rotate_as<F32>(turned, count, turn) : rotate_as<BF16>(turned, count, turn);
}

}  // namespace microtome
