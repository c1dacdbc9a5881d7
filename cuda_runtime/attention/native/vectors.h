// Vectors of floats as the compiler's own vector type: the widest the target has, so one source serves every CPU.
#pragma once

#include <cstdint>
#include <cstring>

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
INLINE Vec max(Vec a, Vec b) { return select(a > b, a, b); }

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

// 2^x, relative error below 2e-7 for x in [-126, 126]; 0 below that.
INLINE Vec exp2(Vec x) {
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits
  IntVec tiny = x < -126.0f;
  x = select(tiny, splat(-126.0f), x);
  Vec shifted = x + magic;
  Vec f = x - (shifted - magic);  // [-0.5, 0.5]
  // Taylor coefficients of 2^f = e^(f ln 2).
  Vec p = splat(1.5403530e-4f);
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  IntVec scaled = (IntVec)p + (((IntVec)shifted) << 23);
  return (Vec)(scaled & ~tiny);
}

constexpr float kLog2e = 1.4426950408889634f;

// c * tanh(x / c)
INLINE Vec cap(Vec x, float c) {
  Vec e = exp2(max(x * (-2.0f * kLog2e / c), splat(-126.0f)));          // e^(-2x/c), large for negative x
  e = select(x < -40.0f * c, splat(1e30f), e);                          // far below: tanh is -1
  return c * ((1.0f - e) / (1.0f + e));
}

}  // namespace microtome
