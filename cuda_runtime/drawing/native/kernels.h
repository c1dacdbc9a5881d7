// Draws one token per row from its logits, and says how likely tokens are, without sorting a vocabulary.
//
// Knows nothing of torch: plain memory. The rules are those of `microtome.cuda_runtime.drawing.stock` and of
// `microtome.cuda_runtime.log_probabilities`.

#pragma once

#include <cstdint>

namespace microtome {

enum class Type { F32, BF16 };

struct Row {
  const void* logits;  // [vocabulary], dense
  Type type;
  double temperature;  // above 0
  int64_t top_k;       // the vocabulary's size where off
  double top_p;        // infinite where off
  double min_p;        // 0 where off
  double coin;         // in [0, 1)
};

// Writes a token of [0, vocabulary) per row; which one, where a row holds a NaN, nobody can tell.
void draw(const Row* rows, int64_t count, int64_t vocabulary, int threads, int64_t* tokens);

struct Asked {
  const void* logits;  // [vocabulary], dense
  Type type;
  int64_t token;
};

// Writes per row, [1 + 2 * top]: the log-probability of its token, the `top` likeliest tokens, best first, the lower id
// first of those alike, and their log-probabilities, rounded to float32. Of a row with a NaN all of these are NaN.
void likelihoods(const Asked* rows, int64_t count, int64_t vocabulary, int64_t top, int threads, double* table);

}  // namespace microtome
