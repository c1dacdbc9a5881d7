// y = x W^T + b for rows x [M, K] and a weight [N, K] that lies packed, in float32 or bfloat16.
//
// Packed in blocks of 32 outputs, whole blocks only (missing outputs are zero):
//   float32   [N / 32][K][32]
//   bfloat16  [N / 32][K / 32][2][16][16][2]: of each half block of 16 outputs, 16 pairs of inputs, each pair of every
//             output side by side: what a tile of the matrix unit holds, and what a dot product of pairs takes.
//
// A row of y has the same bits whatever other rows are computed with it, and however many threads there are: every sum
// runs over K in order, in float32.
#pragma once

#include <cstdint>

namespace microtome {

constexpr int64_t kBlock = 32;

struct Linear {
  const void* x;       // [rows, inputs], rows `x_stride` elements apart
  int64_t x_stride;
  const void* packed;
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

// y = silu(gate) * up for two layers of equal shape over the same rows, y dense as theirs are. Both layers' own y are
// room of that size; in bfloat16 they may be null where `gated_needs_room` says so. Threads are woken once.
void gated_float32(const Linear& gate, const Linear& up, void* y);
bool gated_needs_room(int64_t rows, Unit unit);
void gated_bfloat16(const Linear& gate, const Linear& up, void* y, Unit unit);

// y = weight * x / sqrt(mean(x^2) + epsilon) for rows x = a + b, which are kept in `sum`, or x = a where b is null.
// All dense, in one type, rounded to it where the library rounds: x, the quotient, y. `float32_served` says whether.
struct Norm {
  const void* a;
  const void* b;       // or null
  const void* weight;  // [width]
  void* sum;
  void* y;
  int64_t rows, width;
  float epsilon;
  int threads;
};

void norm(const Norm& norm, bool float32);

// Rotation by position: the first half of each head by cos and minus the second by sin, and the reverse.
struct Turned {
  const void* x;  // [tokens, heads, size], last axis dense
  int64_t token_stride, head_stride, heads;
  void* y;        // the same, dense
};

struct Turn {
  const void* cos;  // [tokens, size], dense
  const void* sin;
  int64_t tokens, size;  // size is even
  int threads;
};

void rotate(const Turned* turned, int count, const Turn& turn, bool float32);

}  // namespace microtome
