// What every kernel shares: reading and writing tokens, scratch, and the softmax's units.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "kernels.h"
#include "vectors.h"

namespace microtome {

constexpr float kLowest = -1e30f;  // below every logit: where a running maximum starts
constexpr float kMasked = -3e38f;  // below that: exp2 of the difference is 0

// Scratch that lives as long as its thread, so that a step allocates nothing once it has run.
inline float* scratch(int64_t floats) {
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

// What makes a dot product the logit: in units of log 2, unless a soft cap comes first.
inline float query_scale(const Softmax& softmax) { return softmax.scale * (softmax.softcap > 0 ? 1.0f : kLog2e); }

// The first position that a token at `position` sees.
inline int64_t first_seen(const Softmax& softmax, int64_t position) {
  return softmax.window > 0 ? std::max<int64_t>(0, position + 1 - softmax.window) : 0;
}

}  // namespace microtome
