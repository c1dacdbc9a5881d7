// The kernels as torch operators of the CPU: checks what is cheap, before anything is touched.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "kernels.h"

namespace {

using at::Tensor;

void check(const char* name, const Tensor& t, at::ScalarType type, int64_t rows) {
  TORCH_CHECK(t.scalar_type() == type && t.is_contiguous() && t.dim() == 1 && t.size(0) == rows, name,
              " is not a dense vector of ", rows, " ", type);
}

void check_logits(const Tensor& logits) {
  TORCH_CHECK(logits.dim() == 2 && logits.stride(1) == 1 && logits.size(1) > 0, "the logits are no rows of tokens");
  TORCH_CHECK(logits.scalar_type() == at::kFloat || logits.scalar_type() == at::kBFloat16, "the logits are ",
              logits.scalar_type());
}

const void* row_of(const Tensor& logits, int64_t row) {
  return static_cast<const char*>(logits.const_data_ptr()) +
         row * logits.stride(0) * static_cast<int64_t>(logits.element_size());
}

microtome::Type type_of(const Tensor& logits) {
  return logits.scalar_type() == at::kFloat ? microtome::Type::F32 : microtome::Type::BF16;
}

int threads_for(int64_t rows) { return static_cast<int>(std::clamp<int64_t>(rows, 1, at::get_num_threads())); }

// Of row rows[i] of the logits, the token drawn under the i-th policy.
Tensor draw(const Tensor& logits, const Tensor& rows, const Tensor& temperature, const Tensor& top_k,
            const Tensor& top_p, const Tensor& min_p, const Tensor& coin) {
  check_logits(logits);
  const int64_t count = rows.dim() == 1 ? rows.size(0) : 0;
  check("rows", rows, at::kLong, count);
  check("temperature", temperature, at::kDouble, count);
  check("top_k", top_k, at::kLong, count);
  check("top_p", top_p, at::kDouble, count);
  check("min_p", min_p, at::kDouble, count);
  check("coin", coin, at::kDouble, count);
  const Tensor tokens = at::empty({count}, rows.options());
  const int64_t* row = rows.const_data_ptr<int64_t>();
  std::vector<microtome::Row> policies(count);
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_INDEX(row[i] >= 0 && row[i] < logits.size(0), "row ", row[i], " is not in [0, ", logits.size(0), ")");
    policies[i] = {row_of(logits, row[i]),
                   type_of(logits),
                   temperature.const_data_ptr<double>()[i],
                   top_k.const_data_ptr<int64_t>()[i],
                   top_p.const_data_ptr<double>()[i],
                   min_p.const_data_ptr<double>()[i],
                   coin.const_data_ptr<double>()[i]};
  }
  microtome::draw(policies.data(), count, logits.size(1), threads_for(count), tokens.data_ptr<int64_t>());
  return tokens;
}

// Per row of the logits how likely its token is, and which `top` tokens are likeliest; float64 [rows, 1 + 2 * top].
Tensor likelihoods(const Tensor& logits, const Tensor& tokens, int64_t top) {
  check_logits(logits);
  const int64_t count = logits.size(0);
  check("tokens", tokens, at::kLong, count);
  TORCH_CHECK(top >= 0 && top <= logits.size(1), top, " of ", logits.size(1), " tokens are asked for");
  const int64_t* token = tokens.const_data_ptr<int64_t>();
  std::vector<microtome::Asked> rows(count);
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_INDEX(token[i] >= 0 && token[i] < logits.size(1), "token ", token[i], " is not in [0, ", logits.size(1),
                      ")");
    rows[i] = {row_of(logits, i), type_of(logits), token[i]};
  }
  const Tensor table = at::empty({count, 1 + 2 * top}, tokens.options().dtype(at::kDouble));
  microtome::likelihoods(rows.data(), count, logits.size(1), top, threads_for(count), table.data_ptr<double>());
  return table;
}

TORCH_LIBRARY_FRAGMENT(microtome, m) {
  m.def("draw(Tensor logits, Tensor rows, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor coin) -> Tensor");
  m.def("likelihoods(Tensor logits, Tensor tokens, int top) -> Tensor");
}

TORCH_LIBRARY_IMPL(microtome, CPU, m) {
  m.impl("draw", &draw);
  m.impl("likelihoods", &likelihoods);
}

}  // namespace
