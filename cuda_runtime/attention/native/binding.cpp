// The kernels as torch operators of the CPU: checks what is cheap, before anything is touched.
//
// Dtypes and head sizes that the kernels do not have go to the stock operators (`microtome::..._cpu`).

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <vector>

#include "kernels.h"

namespace {

using at::Tensor;

std::optional<microtome::Type> type_of(const Tensor& t) {
  if (t.scalar_type() == at::kFloat) return microtome::Type::F32;
  if (t.scalar_type() == at::kBFloat16) return microtome::Type::BF16;
  return std::nullopt;
}

bool served(const Tensor& tokens, const Tensor& pool) {
  return type_of(tokens) && type_of(pool) && tokens.size(2) % 16 == 0 && tokens.size(2) <= microtome::kMaxSize;
}

microtome::Tokens tokens_of(const Tensor& t) { return {t.data_ptr(), *type_of(t), t.stride(0), t.stride(1)}; }

void check_tokens(const char* name, const Tensor& t, int64_t tokens, int64_t heads, int64_t size) {
  TORCH_CHECK(t.dim() == 3 && t.size(0) == tokens && t.size(1) == heads && t.size(2) == size, name, " has shape ",
              t.sizes(), ", not [", tokens, ", ", heads, ", ", size, "]");
  TORCH_CHECK(t.stride(2) == 1, name, "'s last axis is not dense");
}

void check_index(const char* name, const Tensor& t, int64_t tokens) {
  TORCH_CHECK(t.scalar_type() == at::kInt && t.is_contiguous() && t.dim() == 1 && t.size(0) == tokens, name,
              " is not a dense int32 vector of ", tokens);
}

void check_range(const char* name, const int32_t* values, int64_t count, int64_t limit) {
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_INDEX(values[i] >= 0 && values[i] < limit, name, " ", values[i], " at token ", i, " is not in [0, ",
                      limit, ")");
  }
}

void check_pools(const Tensor& k_pool, const Tensor& v_pool) {
  TORCH_CHECK(k_pool.dim() == 3 && k_pool.sizes() == v_pool.sizes() && k_pool.scalar_type() == v_pool.scalar_type(),
              "the pools differ: ", k_pool.sizes(), " and ", v_pool.sizes());
  TORCH_CHECK(k_pool.is_contiguous() && v_pool.is_contiguous(), "the pools are not dense");
}

microtome::Forward forward_of(int64_t tokens, int64_t heads, const Tensor& k_pool, const Tensor& v_pool) {
  microtome::Forward f{};
  f.tokens = tokens;
  f.heads = heads;
  f.kv_heads = k_pool.size(1);
  f.size = k_pool.size(2);
  f.k_pool = k_pool.data_ptr();
  f.v_pool = v_pool.data_ptr();
  f.pool_type = *type_of(k_pool);
  f.threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  return f;
}

microtome::Forward forward_of(const Tensor& q, const Tensor& k_pool, const Tensor& v_pool, const Tensor& rows,
                              const Tensor& token_rows, const Tensor& positions) {
  check_pools(k_pool, v_pool);
  TORCH_CHECK(q.dim() == 3 && q.size(1) % k_pool.size(1) == 0, "q's ", q.size(1), " heads are no multiple of ",
              k_pool.size(1), " key/value heads");
  check_tokens("q", q, q.size(0), q.size(1), k_pool.size(2));
  TORCH_CHECK(rows.scalar_type() == at::kInt && rows.dim() == 2 && rows.is_contiguous(),
              "the row table is not a dense int32 matrix");
  check_index("token_rows", token_rows, q.size(0));
  check_index("positions", positions, q.size(0));
  microtome::Forward f = forward_of(q.size(0), q.size(1), k_pool, v_pool);
  f.rows = rows.const_data_ptr<int32_t>();
  f.row_stride = rows.size(1);
  f.token_rows = token_rows.const_data_ptr<int32_t>();
  f.positions = positions.const_data_ptr<int32_t>();
  check_range("row", f.token_rows, f.tokens, rows.size(0));
  check_range("position", f.positions, f.tokens, rows.size(1));
  return f;
}

void attend_checked(const microtome::Forward& f, const Tensor& q, double scale, int64_t window, double softcap,
                    const std::optional<Tensor>& sinks, const Tensor& out) {
  std::optional<Tensor> wide;
  if (sinks) {
    TORCH_CHECK(sinks->dim() == 1 && sinks->size(0) == f.heads, "sinks has shape ", sinks->sizes(), ", not [", f.heads,
                "]");
    wide = sinks->to(at::kFloat).contiguous();
  }
  const microtome::Softmax softmax{float(scale), window, float(softcap), wide ? wide->const_data_ptr<float>() : nullptr};
  microtome::attend(f, tokens_of(q), softmax, tokens_of(out));
}

template <typename Signature>
auto stock(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

void write_cells(const Tensor& k, const Tensor& v, Tensor k_pool, Tensor v_pool, const Tensor& cells) {
  if (!served(k, k_pool)) {
    static const auto fallback = stock<decltype(write_cells)>("microtome::write_cells_cpu");
    return fallback.call(k, v, k_pool, v_pool, cells);
  }
  check_pools(k_pool, v_pool);
  check_tokens("k", k, k.size(0), k_pool.size(1), k_pool.size(2));
  check_tokens("v", v, k.size(0), k_pool.size(1), k_pool.size(2));
  check_index("cells", cells, k.size(0));
  const int32_t* to = cells.const_data_ptr<int32_t>();
  check_range("cell", to, k.size(0), k_pool.size(0));
  microtome::write_cells(forward_of(k.size(0), k_pool.size(1), k_pool, v_pool), tokens_of(k), tokens_of(v), to);
}

void attend(const Tensor& q, const Tensor& k_pool, const Tensor& v_pool, const Tensor& rows, const Tensor& token_rows,
            const Tensor& positions, double scale, int64_t window, double softcap, const std::optional<Tensor>& sinks,
            Tensor out) {
  if (!served(q, k_pool) || !type_of(out)) {
    static const auto fallback = stock<decltype(attend)>("microtome::attend_cpu");
    return fallback.call(q, k_pool, v_pool, rows, token_rows, positions, scale, window, softcap, sinks, out);
  }
  const microtome::Forward f = forward_of(q, k_pool, v_pool, rows, token_rows, positions);
  check_tokens("out", out, f.tokens, f.heads, f.size);
  attend_checked(f, q, scale, window, softcap, sinks, out);
}

Tensor update_and_attend(const Tensor& q, const Tensor& k, const Tensor& v, Tensor k_pool, Tensor v_pool,
                         const Tensor& rows, const Tensor& token_rows, const Tensor& positions, double scale,
                         int64_t window, double softcap, const std::optional<Tensor>& sinks) {
  if (!served(q, k_pool) || !type_of(k) || !type_of(v)) {
    static const auto fallback = stock<decltype(update_and_attend)>("microtome::update_and_attend_cpu");
    return fallback.call(q, k, v, k_pool, v_pool, rows, token_rows, positions, scale, window, softcap, sinks);
  }
  const microtome::Forward f = forward_of(q, k_pool, v_pool, rows, token_rows, positions);
  check_tokens("k", k, f.tokens, f.kv_heads, f.size);
  check_tokens("v", v, f.tokens, f.kv_heads, f.size);
  std::vector<int32_t> cells(f.tokens);
  for (int64_t t = 0; t < f.tokens; ++t) cells[t] = f.rows[f.token_rows[t] * f.row_stride + f.positions[t]];
  check_range("cell", cells.data(), f.tokens, k_pool.size(0));
  Tensor out = at::empty(q.sizes(), q.options());
  microtome::write_cells(f, tokens_of(k), tokens_of(v), cells.data());
  attend_checked(f, q, scale, window, softcap, sinks, out);
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(microtome, CPU, library) {
  library.impl("write_cells_cpu_native", &write_cells);
  library.impl("attend_cpu_native", &attend);
  library.impl("update_and_attend_cpu_native", &update_and_attend);
}
