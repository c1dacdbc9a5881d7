// Vectors of floats as the compiler's own vector type: the widest the target has, so one source serves every CPU.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace microtome {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t UintVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(kLanes * 2)));

struct bf16 {
  uint16_t bits;
};

#define INLINE inline __attribute__((always_inline))

INLINE Vec splat(float x) { return x - Vec{}; }
INLINE IntVec splat(int32_t x) { return x - IntVec{}; }

INLINE Vec load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

INLINE Vec load(const bf16* from) {
  HalfVec half;
  std::memcpy(&half, from, sizeof half);
  return (Vec)(__builtin_convertvector(half, UintVec) << 16);
}

INLINE void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }

// Round to nearest, ties to even. A NaN stays one.
INLINE void store(bf16* to, Vec v) {
  UintVec bits = (UintVec)v;
  UintVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  UintVec nan = (UintVec)(v != v);
  HalfVec half = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), HalfVec);
  std::memcpy(to, &half, sizeof half);
}

INLINE Vec select(IntVec mask, Vec yes, Vec no) { return (Vec)((mask & (IntVec)yes) | (~mask & (IntVec)no)); }

INLINE Vec max(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return select(a > b, a, b);
#endif
}

INLINE float widest(Vec v) {
  float best = v[0];
  for (int i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
  return best;
}

INLINE float total(Vec v) {
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}

// 2^x, relative error below 2e-7 for x in [-126, 126]; 0 far below that.
INLINE Vec exp2(Vec x) {
#if defined(__AVX512F__)
  const Vec whole = (Vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vec f = x - whole;  // [-0.5, 0.5]
#else
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits
  const IntVec tiny = x < -126.0f;
  const Vec shifted = select(tiny, splat(-126.0f), x) + magic;
  const Vec f = select(tiny, splat(0.0f), x - (shifted - magic));
#endif
  // Taylor coefficients of 2^f = e^(f ln 2).
  Vec p = splat(1.5403530e-4f);
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
#if defined(__AVX512F__)
  return (Vec)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
  return (Vec)(((IntVec)p + (((IntVec)shifted) << 23)) & ~tiny);
#endif
}

// Turn kLanes vectors of kLanes floats over: lane j of vector i becomes lane i of vector j.
INLINE void transpose(Vec* rows) {
#if defined(__AVX512F__)
  __m512i* r = reinterpret_cast<__m512i*>(rows);
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i + 0] = _mm512_unpacklo_epi64(t[4 * i + 0], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i + 0], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i + 0] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i + 0] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
#else
  Vec turned[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < kLanes; ++j) turned[j][i] = rows[i][j];
  }
  for (int i = 0; i < kLanes; ++i) rows[i] = turned[i];
#endif
}

constexpr float kLog2e = 1.4426950408889634f;

// c * tanh(x / c)
INLINE Vec cap(Vec x, float c) {
  Vec e = exp2(max(x * (-2.0f * kLog2e / c), splat(-126.0f)));          // e^(-2x/c), large for negative x
  e = select(x < -40.0f * c, splat(1e30f), e);                          // far below: tanh is -1
  return c * ((1.0f - e) / (1.0f + e));
}

}  // namespace microtome
