// Attention over cells on a CPU: what the kernels are given. Plain C++, no torch.
//
// T tokens, N query heads, K key/value heads, H head size, C+1 cells, rows of cells; as in seam.py.
#pragma once

#include <cstdint>

namespace microtome {

enum class Type { F32, BF16 };

// A [T, heads, H] array whose last axis is dense; strides count elements.
struct Tokens {
  void* data;
  Type type;
  int64_t token_stride;
  int64_t head_stride;
};

struct Forward {
  int64_t tokens;    // T
  int64_t heads;     // N, a multiple of kv_heads
  int64_t kv_heads;  // K
  int64_t size;      // H, a multiple of 16, at most kMaxSize
  void* k_pool;      // [C+1, K, H], dense
  void* v_pool;
  Type pool_type;
  const int32_t* rows;  // [S, row_stride]
  int64_t row_stride;
  const int32_t* token_rows;  // [T]
  const int32_t* positions;   // [T]
  int threads;
};

struct Softmax {
  float scale;
  int64_t window;      // tokens; 0: no limit
  float softcap;       // 0: off
  const float* sinks;  // [N], or null
};

constexpr int64_t kMaxSize = 256;

// Store each token's K and V at its cell. The caller has checked that the cells exist.
void write_cells(const Forward& forward, const Tokens& k, const Tokens& v, const int32_t* cells);

// Softmax-weighted V of what each token sees, into `out`.
void attend(const Forward& forward, const Tokens& q, const Softmax& softmax, const Tokens& out);

// The instructions the kernels were built for and may use on this machine, for people to read.
const char* instruction_set();

}  // namespace microtome
