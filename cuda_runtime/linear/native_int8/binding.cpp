// The kernels as torch operators of the CPU: checks what is cheap, before anything is touched.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>

#include "kernels.h"

namespace {

using at::Tensor;
using microtome_int8::Unit;
using Bias = std::optional<Tensor>;

struct Weight {
  const Tensor& packed;
  const Tensor& scale;
  const Bias& bias;
  int64_t outputs;
};

void check(const Tensor& x, const Weight& weight) {
  TORCH_CHECK(weight.packed.scalar_type() == at::kChar && weight.packed.is_contiguous(),
              "the packed weight is not a dense tensor of 8-bit numbers");
  const int64_t inputs = x.size(-1), blocks = (weight.outputs + microtome_int8::kBlock - 1) / microtome_int8::kBlock;
  TORCH_CHECK(weight.packed.numel() == blocks * microtome_int8::kBlock * inputs, "a weight of ", weight.packed.numel(),
              " elements does not take ", inputs, " inputs to ", weight.outputs, " outputs");
  const Tensor& scale = weight.scale;
  TORCH_CHECK(scale.dim() == 1 && scale.size(0) == weight.outputs && scale.is_contiguous() &&
                  scale.scalar_type() == at::kFloat,
              "the scale is not a dense float32 vector of ", weight.outputs);
  const Bias& bias = weight.bias;
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == weight.outputs && bias->is_contiguous() &&
                        bias->scalar_type() == x.scalar_type()),
              "the bias is not a dense vector of ", weight.outputs);
}

template <size_t kCount>
std::array<Tensor, kCount> run(const Tensor& x, const std::array<Weight, kCount>& weights, Unit unit) {
  TORCH_CHECK(x.dim() >= 1, "x has no axis");
  for (const Weight& weight : weights) check(x, weight);
  const int64_t inputs = x.size(-1);
  const bool is_float32 = x.scalar_type() == at::kFloat;
  TORCH_CHECK(is_float32 ? microtome_int8::float32_served() : x.scalar_type() == at::kBFloat16 && unit != Unit::kNone,
              "this CPU has no unit for ", x.scalar_type());
  TORCH_CHECK(inputs % microtome_int8::kUnitInputs == 0, inputs, " inputs are no multiple of 32");
  const Tensor flat = x.reshape({-1, inputs});
  const Tensor rows = flat.stride(1) == 1 ? flat : flat.contiguous();
  std::array<Tensor, kCount> results;
  std::array<microtome_int8::Linear, kCount> layers{};
  auto shape = x.sizes().vec();
  for (size_t i = 0; i < kCount; ++i) {
    shape.back() = weights[i].outputs;
    results[i] = at::empty(shape, x.options());
    layers[i].x = rows.const_data_ptr();
    layers[i].x_stride = rows.stride(0);
    layers[i].packed = static_cast<const int8_t*>(weights[i].packed.const_data_ptr());
    layers[i].scale = static_cast<const float*>(weights[i].scale.const_data_ptr());
    layers[i].bias = weights[i].bias ? weights[i].bias->const_data_ptr() : nullptr;
    layers[i].y = results[i].data_ptr();
    layers[i].rows = rows.size(0);
    layers[i].inputs = inputs;
    layers[i].outputs = weights[i].outputs;
    layers[i].threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  }
  if (rows.size(0) == 0) return results;
  if (is_float32) {
    microtome_int8::linear_float32(layers.data(), kCount);
  } else {
    microtome_int8::linear_bfloat16(layers.data(), kCount, unit);
  }
  return results;
}

Unit widest_unit() {
  static const Unit unit = microtome_int8::bfloat16_unit();
  return unit;
}

Tensor int8_linear(const Tensor& x, const Tensor& packed, const Tensor& scale, const Bias& bias, int64_t outputs) {
  return run<1>(x, {{{packed, scale, bias, outputs}}}, widest_unit())[0];
}

std::tuple<Tensor, Tensor> int8_linear_2(const Tensor& x, const Tensor& packed, const Tensor& scale, const Bias& bias,
                                         int64_t outputs, const Tensor& packed_1, const Tensor& scale_1,
                                         const Bias& bias_1, int64_t outputs_1) {
  auto results =
      run<2>(x, {{{packed, scale, bias, outputs}, {packed_1, scale_1, bias_1, outputs_1}}}, widest_unit());
  return {results[0], results[1]};
}

std::tuple<Tensor, Tensor, Tensor> int8_linear_3(const Tensor& x, const Tensor& packed, const Tensor& scale,
                                                 const Bias& bias, int64_t outputs, const Tensor& packed_1,
                                                 const Tensor& scale_1, const Bias& bias_1, int64_t outputs_1,
                                                 const Tensor& packed_2, const Tensor& scale_2, const Bias& bias_2,
                                                 int64_t outputs_2) {
  auto results = run<3>(x,
                        {{{packed, scale, bias, outputs},
                          {packed_1, scale_1, bias_1, outputs_1},
                          {packed_2, scale_2, bias_2, outputs_2}}},
                        widest_unit());
  return {results[0], results[1], results[2]};
}

// The same on the narrower unit, so that it is tested where there is a wider one.
Tensor int8_linear_vectors(const Tensor& x, const Tensor& packed, const Tensor& scale, const Bias& bias,
                           int64_t outputs) {
  const Unit unit = widest_unit() == Unit::kNone ? Unit::kNone : Unit::kVectors;
  return run<1>(x, {{{packed, scale, bias, outputs}}}, unit)[0];
}

// 0: none, 1: vectors, 2: the matrix unit.
int64_t int8_bfloat16_unit() { return int64_t(microtome_int8::bfloat16_unit()); }
bool int8_float32_served() { return microtome_int8::float32_served(); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(microtome, m) {
  m.def("int8_linear(Tensor x, Tensor packed, Tensor scale, Tensor? bias, int outputs) -> Tensor");
  m.def(
      "int8_linear_2(Tensor x, Tensor packed, Tensor scale, Tensor? bias, int outputs, Tensor packed_1, "
      "Tensor scale_1, Tensor? bias_1, int outputs_1) -> (Tensor, Tensor)");
  m.def(
      "int8_linear_3(Tensor x, Tensor packed, Tensor scale, Tensor? bias, int outputs, Tensor packed_1, "
      "Tensor scale_1, Tensor? bias_1, int outputs_1, Tensor packed_2, Tensor scale_2, Tensor? bias_2, "
      "int outputs_2) -> (Tensor, Tensor, Tensor)");
  m.def("int8_linear_vectors(Tensor x, Tensor packed, Tensor scale, Tensor? bias, int outputs) -> Tensor");
  m.def("int8_bfloat16_unit() -> int", int8_bfloat16_unit);
  m.def("int8_float32_served() -> bool", int8_float32_served);
}

TORCH_LIBRARY_IMPL(microtome, CPU, m) {
  m.impl("int8_linear", int8_linear);
  m.impl("int8_linear_2", int8_linear_2);
  m.impl("int8_linear_3", int8_linear_3);
  m.impl("int8_linear_vectors", int8_linear_vectors);
}
