// The kernel as a torch operator of the CPU: checks what is cheap, before anything is touched.

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

// Of row rows[i] of the logits, the token drawn under the i-th policy.
Tensor draw(const Tensor& logits, const Tensor& rows, const Tensor& temperature, const Tensor& top_k,
            const Tensor& top_p, const Tensor& min_p, const Tensor& coin) {
  TORCH_CHECK(logits.dim() == 2 && logits.stride(1) == 1 && logits.size(1) > 0, "the logits are no rows of tokens");
  TORCH_CHECK(logits.scalar_type() == at::kFloat || logits.scalar_type() == at::kBFloat16, "the logits are ",
              logits.scalar_type());
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
    policies[i] = {static_cast<const char*>(logits.const_data_ptr()) +
                       row[i] * logits.stride(0) * static_cast<int64_t>(logits.element_size()),
                   logits.scalar_type() == at::kFloat ? microtome::Type::F32 : microtome::Type::BF16,
                   temperature.const_data_ptr<double>()[i],
                   top_k.const_data_ptr<int64_t>()[i],
                   top_p.const_data_ptr<double>()[i],
                   min_p.const_data_ptr<double>()[i],
                   coin.const_data_ptr<double>()[i]};
  }
  const int threads = static_cast<int>(std::clamp<int64_t>(count, 1, at::get_num_threads()));
  microtome::draw(policies.data(), count, logits.size(1), threads, tokens.data_ptr<int64_t>());
  return tokens;
}

TORCH_LIBRARY_FRAGMENT(microtome, m) {
  m.def("draw(Tensor logits, Tensor rows, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor coin) -> Tensor");
}

TORCH_LIBRARY_IMPL(microtome, CPU, m) { m.impl("draw", &draw); }

}  // namespace
