// Tokens of one row that ride together, as tiles of queries that share each loaded cell: a vector runs along the
// queries, so the softmax needs no sum across lanes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "tokens.h"
#include "vectors.h"

namespace microtome {
namespace {

constexpr int kBlock = 64;  // positions taken at once
constexpr int kRows = 4;    // rows of a register block
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kWidestTile = 4;  // vectors of queries: 4 x 4 accumulators fit into 32 registers
#else
constexpr int kWidestTile = 2;
#endif

// to[m][n] (+)= sum over k of a[m * a_row + k * a_step] * b[k][n], for kRows rows and kVecs vectors of n.
template <int kVecs, bool kAdd>
INLINE void multiply(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t depth, float* to) {
  constexpr int kWidth = kVecs * kLanes;
  Vec sum[kRows][kVecs];
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kVecs; ++n) sum[m][n] = kAdd ? load(to + m * kWidth + n * kLanes) : Vec{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vec x[kVecs];
    for (int n = 0; n < kVecs; ++n) x[n] = load(b + k * kWidth + n * kLanes);
    for (int m = 0; m < kRows; ++m) {
      const float y = a[m * a_row + k * a_step];
      for (int n = 0; n < kVecs; ++n) sum[m][n] += y * x[n];
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kVecs; ++n) store(to + m * kWidth + n * kLanes, sum[m][n]);
  }
}

// Queries [begin, end) of a run under one key/value head; query i is token first_token + i / group, head i % group.
struct Tile {
  int64_t first_token;
  int64_t kv_head;
  int64_t begin, end;
  int64_t pack;  // where the run's packed K and V are, for the matrix unit
};

template <typename Cell, int kVecs>
void attend_tile(const Forward& f, const Softmax& softmax, const Tokens& q, const Tokens& out, const Tile& tile) {
  constexpr int kWidth = kVecs * kLanes;
  const int64_t size = f.size, group = f.heads / f.kv_heads, stride = f.kv_heads * size;
  float* q_HW = scratch(2 * size * kWidth + 2 * kBlock * size + kBlock * kWidth);
  float* acc_HW = q_HW + size * kWidth;
  float* k_PH = acc_HW + size * kWidth;
  float* v_PH = k_PH + kBlock * size;
  float* s_PW = v_PH + kBlock * size;
  alignas(64) int32_t position_W[kWidth];
  alignas(64) float maximum_W[kWidth], sum_W[kWidth];

  int64_t q_at[kWidth], out_at[kWidth];

  const int count = int(tile.end - tile.begin);
  for (int w = 0; w < kWidth; ++w) {  // lanes past the end repeat the last query; their results are dropped
    const int64_t query = tile.begin + std::min(w, count - 1);
    const int64_t token = tile.first_token + query / group, head = tile.kv_head * group + query % group;
    q_at[w] = token * q.token_stride + head * q.head_stride;
    out_at[w] = token * out.token_stride + head * out.head_stride;
    position_W[w] = f.positions[token];
    maximum_W[w] = softmax.sinks ? softmax.sinks[head] * kLog2e : kLowest;
    sum_W[w] = softmax.sinks ? 1.0f : 0.0f;
  }
  const float scale = query_scale(softmax);
  Vec block[kLanes];
  for (int w = 0; w < kWidth; w += kLanes) {
    for (int64_t d = 0; d < size; d += kLanes) {
      for (int i = 0; i < kLanes; ++i) block[i] = load_at(q, q_at[w + i] + d) * scale;
      transpose(block);
      for (int i = 0; i < kLanes; ++i) store(q_HW + (d + i) * kWidth + w, block[i]);
    }
  }
  std::fill(acc_HW, acc_HW + size * kWidth, 0.0f);
  const int64_t lowest = *std::min_element(position_W, position_W + kWidth);
  const int64_t highest = *std::max_element(position_W, position_W + kWidth);
  const int32_t* row = f.rows + f.token_rows[tile.first_token] * f.row_stride;
  const Cell* k = static_cast<const Cell*>(f.k_pool) + tile.kv_head * size;
  const Cell* v = static_cast<const Cell*>(f.v_pool) + tile.kv_head * size;

  for (int64_t from = first_seen(softmax, lowest); from <= highest; from += kBlock) {
    const int here = int(std::min<int64_t>(kBlock, highest + 1 - from));
    const int whole = (here + kRows - 1) / kRows * kRows;
    for (int j = 0; j < whole; ++j) {
      if (j < here) {
        const int64_t cell = row[from + j];
        for (int64_t d = 0; d < size; d += kLanes) store(k_PH + j * size + d, load(k + cell * stride + d));
        for (int64_t d = 0; d < size; d += kLanes) store(v_PH + j * size + d, load(v + cell * stride + d));
      } else {
        std::fill(k_PH + j * size, k_PH + (j + 1) * size, 0.0f);
        std::fill(v_PH + j * size, v_PH + (j + 1) * size, 0.0f);
      }
    }
    for (int j = 0; j < whole; j += kRows) {
      multiply<kVecs, false>(k_PH + j * size, size, 1, q_HW, size, s_PW + j * kWidth);
    }
    const bool masked = from + whole - 1 > lowest || from < first_seen(softmax, highest);
    for (int n = 0; n < kVecs; ++n) {
      IntVec position;
      std::memcpy(&position, position_W + n * kLanes, sizeof position);
      Vec best = load(maximum_W + n * kLanes);
      const Vec before = best;
      for (int j = 0; j < whole; ++j) {
        float* at = s_PW + j * kWidth + n * kLanes;
        Vec x = load(at);
        if (softmax.softcap > 0) x = cap(x, softmax.softcap) * kLog2e;
        if (masked) {
          const IntVec key = splat(int32_t(from + j));
          IntVec seen = key <= position;
          if (softmax.window > 0) seen &= key > position - int32_t(std::min<int64_t>(softmax.window, 1 << 30));
          x = select(seen, x, splat(kMasked));
        }
        if (masked || softmax.softcap > 0) store(at, x);
        best = max(best, x);
      }
      const Vec keep = exp2(before - best);
      Vec sum = load(sum_W + n * kLanes) * keep;
      for (int j = 0; j < whole; ++j) {
        float* at = s_PW + j * kWidth + n * kLanes;
        const Vec w = exp2(load(at) - best);
        store(at, w);
        sum += w;
      }
      store(maximum_W + n * kLanes, best);
      store(sum_W + n * kLanes, sum);
      for (int64_t d = 0; d < size; ++d) {
        float* at = acc_HW + d * kWidth + n * kLanes;
        store(at, load(at) * keep);
      }
    }
    for (int64_t d = 0; d < size; d += kRows) {
      multiply<kVecs, true>(v_PH + d, 1, size, s_PW, whole, acc_HW + d * kWidth);
    }
  }
  for (int w = 0; w < count; w += kLanes) {
    const Vec share = 1.0f / load(sum_W + w);
    const int here = std::min(kLanes, count - w);
    for (int64_t d = 0; d < size; d += kLanes) {
      for (int i = 0; i < kLanes; ++i) block[i] = load(acc_HW + (d + i) * kWidth + w) * share;
      transpose(block);
      for (int i = 0; i < here; ++i) store_at(out, out_at[w + i] + d, block[i]);
    }
  }
}

}  // namespace
}  // namespace microtome
