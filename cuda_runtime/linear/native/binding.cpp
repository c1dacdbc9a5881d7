// The kernels as a torch operator of the CPU: checks what is cheap, before anything is touched.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>

#include "kernels.h"

namespace {

using at::Tensor;
using microtome::Unit;

Tensor packed_linear_by(const Tensor& x_any, const Tensor& packed, const std::optional<Tensor>& bias, int64_t outputs,
                        Unit unit) {
  TORCH_CHECK(x_any.dim() >= 1 && packed.scalar_type() == x_any.scalar_type() && packed.is_contiguous(),
              "the packed weight is not a dense ", x_any.scalar_type(), " tensor");
  const int64_t inputs = x_any.size(-1), blocks = (outputs + microtome::kBlock - 1) / microtome::kBlock;
  TORCH_CHECK(packed.numel() == blocks * microtome::kBlock * inputs, "a weight of ", packed.numel(),
              " elements does not take ", inputs, " inputs to ", outputs, " outputs");
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == outputs && bias->is_contiguous() &&
                        bias->scalar_type() == x_any.scalar_type()),
              "the bias is not a dense vector of ", outputs);
  const Tensor x = x_any.reshape({-1, inputs});
  const Tensor rows = x.stride(1) == 1 ? x : x.contiguous();
  auto shape = x_any.sizes().vec();
  shape.back() = outputs;
  Tensor y = at::empty(shape, x_any.options());
  microtome::Linear l{};
  l.x = rows.const_data_ptr();
  l.x_stride = rows.stride(0);
  l.packed = packed.const_data_ptr();
  l.bias = bias ? bias->const_data_ptr() : nullptr;
  l.y = y.data_ptr();
  l.rows = rows.size(0);
  l.inputs = inputs;
  l.outputs = outputs;
  l.threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  if (l.rows == 0) return y;
  if (x_any.scalar_type() == at::kFloat) {
    TORCH_CHECK(microtome::float32_served(), "this CPU has no unit for float32");
    microtome::linear_float32(l);
  } else {
    TORCH_CHECK(x_any.scalar_type() == at::kBFloat16 && unit != Unit::kNone, "this CPU has no unit for ",
                x_any.scalar_type());
    TORCH_CHECK(inputs % 32 == 0, inputs, " inputs are no multiple of 32");
    microtome::linear_bfloat16(l, unit);
  }
  return y;
}

Tensor packed_linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t outputs) {
  static const Unit unit = microtome::bfloat16_unit();
  return packed_linear_by(x, packed, bias, outputs, unit);
}

// The same on the narrower unit, so that it is tested where there is a wider one.
Tensor packed_linear_vectors(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias,
                             int64_t outputs) {
  const Unit unit = microtome::bfloat16_unit() == Unit::kNone ? Unit::kNone : Unit::kVectors;
  return packed_linear_by(x, packed, bias, outputs, unit);
}

// 0: none, 1: vectors, 2: the matrix unit.
int64_t bfloat16_unit() { return int64_t(microtome::bfloat16_unit()); }
bool float32_served() { return microtome::float32_served(); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(microtome, m) {
  m.def("packed_linear(Tensor x, Tensor packed, Tensor? bias, int outputs) -> Tensor");
  m.def("packed_linear_vectors(Tensor x, Tensor packed, Tensor? bias, int outputs) -> Tensor");
  m.def("bfloat16_unit() -> int", bfloat16_unit);
  m.def("float32_served() -> bool", float32_served);
}

TORCH_LIBRARY_IMPL(microtome, CPU, m) {
  m.impl("packed_linear", packed_linear);
  m.impl("packed_linear_vectors", packed_linear_vectors);
}
