// y = x (q s)^T + b for rows x [M, K] in float32 or bfloat16, whole numbers q [N, K] in 8 bits, and a scale s and a
// bias b for each of the N outputs.
//
// q lies packed in blocks of 32 outputs, whole blocks only (missing outputs are zero): [N / 32][K / 4][2][16][4], so
// that 64 bytes are 16 outputs' next 4 inputs. K is a multiple of 32.
//
// Numbers become floating-point in registers or in the first-level cache: memory is read at a byte each. Every number
// of 8 bits is exact in bfloat16, so products are exact, and sums run over K in order in float32; the scale is applied
// to the sum. A row of y has the same bits whatever other rows are computed with it, and however many threads there
// are.
#pragma once

#include <cstdint>

namespace microtome_int8 {

constexpr int64_t kBlock = 32;
constexpr int64_t kUnitInputs = 32;

struct Linear {
  const void* x;       // [rows, inputs], rows `x_stride` elements apart
  int64_t x_stride;
  const int8_t* packed;
  const float* scale;  // [outputs]
  const void* bias;    // [outputs] in x's type, or null
  void* y;             // [rows, outputs], dense
  int64_t rows, inputs, outputs;
  int threads;         // of all layers of a call, the first one's
};

enum class Unit { kNone, kVectors, kMatrix };  // what this CPU multiplies bfloat16 with

Unit bfloat16_unit();
bool float32_served();

// `count` layers over the same rows, side by side: threads are woken once for all of them.
void linear_float32(const Linear* layers, int count);
void linear_bfloat16(const Linear* layers, int count, Unit unit);  // `unit` is one this CPU has, and not kNone

}  // namespace microtome_int8
